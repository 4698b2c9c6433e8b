"""Why an artifact is new: what sets it apart from the nearest one that exists."""

from collections.abc import Iterable, Mapping

from g4tool.pipeline.fingerprint import Json

_SHOWN = 3


def difference(wanted: Mapping[str, Json], existing: Iterable[Mapping[str, Json]]) -> str:
    """One phrase for what `wanted` has differently from the most similar of `existing`.

    Each is a manifest, of which stage, version, parameters, environment and inputs are read:
    "new: quantize.group_size 32 -> 128". "never made" when `existing` is empty.
    """
    found = [changes for other in existing if (changes := _changes(other, wanted))]
    if not found:
        return "never made"
    nearest = min(found, key=lambda changes: (len(changes), changes))
    more = f" and {len(nearest) - _SHOWN} more" if len(nearest) > _SHOWN else ""
    return f"new: {', '.join(nearest[:_SHOWN])}{more}"


def _changes(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[str]:
    stage = new["stage"]
    changes = []
    if old["version"] != new["version"]:
        changes.append(f"{stage}'s version {old['version']} -> {new['version']}")
    for part, label in (("parameters", f"{stage}."), ("environment", "environment ")):
        before, after = _flat(old[part]), _flat(new[part])
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                changes.append(f"{label}{key} {_show(before, key)} -> {_show(after, key)}")
    return changes + _input_changes(old["inputs"], new["inputs"])


def _input_changes(old: list[Json], new: list[Json]) -> list[str]:
    if len(old) != len(new):
        return [f"{len(old)} inputs -> {len(new)}"]
    changes = []
    for before, after in zip(old, new, strict=True):
        if before["identity"] == after["identity"]:
            continue
        if before["stage"] != after["stage"]:
            changes.append(f"input {before['stage']} -> {after['stage']}")
        elif "files" in before and "files" in after:
            changes.append(_file_change(before["files"], after["files"]))
        else:
            changes.append(f"input {after['stage']} {after['identity'][:12]} is another one")
    return changes


def _file_change(old: Mapping[str, Json], new: Mapping[str, Json]) -> str:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"source file {names[0]}{more} changed"


def _flat(value: Json, prefix: str = "") -> dict[str, Json]:
    if isinstance(value, list | tuple):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Json] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _show(values: Mapping[str, Json], key: str) -> str:
    if key not in values:
        return "(none)"
    text = str(values[key])
    return text if len(text) <= 40 else f"{text[:37]}..."
