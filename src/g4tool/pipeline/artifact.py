"""Values that the store deals in: files with an identity, given or made, and what is to be done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from g4tool.pipeline.fingerprint import Json

Action = Literal["reuse", "resume", "make"]


class FileRecord(NamedTuple):
    """One file of an artifact: size in bytes and SHA-256 of the content in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """A file or a folder the user gave. `files` are names relative to `path`.

    None means every file below `path` that is not hidden; a single file is named by its own name.
    """

    path: Path
    files: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Artifact:
    """Files with an identity, whole and unchanging: a stage's, or a source's (stage "source").

    `files` holds those under `path`; `external` says where files lie that the artifact only refers
    to (their records are in `manifest["external"]`). A source's manifest has `files` only.
    """

    identity: str
    stage: str
    path: Path
    manifest: Mapping[str, Json]
    files: Mapping[str, FileRecord]
    external: Mapping[str, Path] = field(default_factory=dict)

    def locate(self, name: str) -> Path:
        """Where the file `name` lies, in the artifact's own folder or outside. KeyError if none."""
        if name in self.external:
            return self.external[name]
        if name not in self.files:
            raise KeyError(name)
        return self.path if self.path.is_file() else self.path / name


@dataclass(frozen=True)
class Decision:
    """What the store will do for one stage, and why."""

    action: Action
    stage: str
    identity: str
    reason: str
