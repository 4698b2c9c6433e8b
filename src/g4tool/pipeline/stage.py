"""What the store knows of the work: a stage reads artifacts and writes one; a source is given.

Nothing here knows what the files mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from g4tool.pipeline.fingerprint import Json

if TYPE_CHECKING:
    from g4tool.pipeline.work import Work

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


class Stage(Protocol):
    """A step that turns inputs into one artifact, always the same bytes for the same identity."""

    @property
    def name(self) -> str:
        """Name of the kind of artifact: lower-case letters, digits and hyphens."""
        ...

    @property
    def version(self) -> int:
        """Raised when the same parameters come to give other bytes."""
        ...

    @property
    def inputs(self) -> tuple["Stage | Source", ...]:
        """What the stage reads, in a fixed order."""
        ...

    def parameters(self) -> dict[str, Json]:
        """What was asked for, as far as it shapes the bytes."""
        ...

    def environment(self) -> dict[str, Json]:
        """What else shapes the bytes: library versions, device class, compile mode."""
        ...

    def run(self, work: "Work") -> None:
        """Write the artifact through `work`, file by file."""
        ...


@runtime_checkable
class Intact(Protocol):
    """A stage whose finished artifact can stop being usable for reasons its files do not show."""

    def intact(self, artifact: Artifact) -> str | None:
        """Why `artifact` must be made again, or None when it is good."""
        ...


@dataclass(frozen=True)
class Decision:
    """What the store will do for one stage, and why."""

    action: Action
    stage: str
    identity: str
    reason: str
