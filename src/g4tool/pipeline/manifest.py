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
_KEYS = ("identity", "stage", "version", "parameters", "environment", "inputs", "files", "facts")


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
        missing = [key for key in _KEYS if key not in manifest]
        if missing:
            raise ValueError(f"no {missing[0]!r}")
        files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
        where = json.loads((folder / WHERE).read_text()) if manifest.get("external") else {}
        external = {name: Path(where[name]) for name in manifest.get("external", {})}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise G4Error(f"{path} is no readable manifest ({error}).") from error
    return Artifact(manifest["identity"], manifest["stage"], folder, manifest, files, external)
