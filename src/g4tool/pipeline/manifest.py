"""The file that says what an artifact is: the same bytes wherever and whenever it was made."""

import json
from collections.abc import Mapping
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.files import write_json
from g4tool.pipeline.artifact import Artifact, FileRecord
from g4tool.pipeline.fingerprint import Json

NAME = "manifest.json"
WHERE = "where.json"
"""Absolute paths of the files an artifact refers to. Beside the manifest, since they differ from
machine to machine and the manifest does not."""

RESERVED = frozenset({NAME, WHERE})
_KEYS = {
    "identity": str,
    "stage": str,
    "version": int,
    "parameters": dict,
    "environment": dict,
    "inputs": list,
    "files": dict,
    "external": dict,
    "facts": dict,
}


def build(
    wanted: Mapping[str, Json],
    identity: str,
    files: Mapping[str, FileRecord],
    external: Mapping[str, FileRecord],
    facts: Mapping[str, Json],
) -> dict[str, Json]:
    """The manifest of a finished artifact; `wanted` is what its identity was made from."""
    return {
        **wanted,
        "identity": identity,
        "files": records(files),
        "external": records(external),
        "facts": dict(facts),
    }


def records(files: Mapping[str, FileRecord]) -> dict[str, Json]:
    """File records as JSON, sorted by name."""
    return {name: files[name]._asdict() for name in sorted(files)}


def write(folder: Path, manifest: Mapping[str, Json], where: Mapping[str, Path]) -> None:
    """Write the manifest, and `where` if the artifact refers to files outside."""
    if where:
        write_json(folder / WHERE, {name: str(where[name]) for name in sorted(where)})
    # Through JSON once, so that keys are sorted at every depth whatever order the stage used.
    write_json(folder / NAME, json.loads(json.dumps(manifest, sort_keys=True)))


def load(folder: Path) -> Artifact:
    """The finished artifact in `folder`. Raises G4Error when its manifest is missing or damaged."""
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text())
        _check(manifest)
        files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
        where = json.loads((folder / WHERE).read_text()) if manifest["external"] else {}
        external = {name: Path(where[name]) for name in manifest["external"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise G4Error(f"{path} is no readable manifest ({error}).") from error
    return Artifact(manifest["identity"], manifest["stage"], folder, manifest, files, external)


def _check(manifest: Json) -> None:
    """Raise ValueError naming what is not as `build` made it."""
    if not isinstance(manifest, dict):
        raise ValueError("not a table of keys")
    for key, kind in _KEYS.items():
        if key not in manifest:
            raise ValueError(f"no {key!r}")
        if not isinstance(manifest[key], kind):
            raise ValueError(f"{key!r} is not a {kind.__name__}")
    for key in ("files", "external"):
        _check_records(key, manifest[key])
    for number, given in enumerate(manifest["inputs"]):
        named = isinstance(given, dict) and all(
            isinstance(given.get(key), str) for key in ("stage", "identity")
        )
        if not named:
            raise ValueError(f"'inputs' {number} names no stage and identity")
        if "files" in given:
            _check_records(f"inputs {number}", given["files"])


def _check_records(where: str, records: Json) -> None:
    if not isinstance(records, dict):
        raise ValueError(f"{where!r} is not a dict")
    for name, record in records.items():
        whole = isinstance(record, dict) and set(record) == {"size", "sha256"}
        if not (whole and isinstance(record["size"], int) and isinstance(record["sha256"], str)):
            raise ValueError(f"{where!r} has no size and hash for {name}")
