"""What the store asks of a stage: to read artifacts and to write one.

Nothing here knows what the files mean.
"""

from typing import Protocol, runtime_checkable

from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.work import Work


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

    def run(self, work: Work) -> None:
        """Write the artifact through `work`, file by file."""
        ...


@runtime_checkable
class SelfFed(Protocol):
    """A stage that fetches what it reads itself: its inputs count for its identity, and are not
    made for it."""

    @property
    def fetches(self) -> bool:
        """Whether it does so."""
        ...


@runtime_checkable
class Intact(Protocol):
    """A stage whose finished artifact can stop being usable for reasons its files do not show."""

    def intact(self, artifact: Artifact) -> str | None:
        """Why `artifact` must be made again, or None when it is good."""
        ...
