"""Notices that a file changes while a stage reads it, at the cost of asking the file system."""

from collections.abc import Callable, Iterable
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.hashes import StatKey, stat_key


def watch(stage: str, inputs: Iterable[Artifact]) -> Callable[[], None]:
    """A check that every file of `inputs` is still the one that it is now.

    It raises G4Error naming the file. A file that was changed and restored is noticed too: nobody
    can set its ctime back.
    """
    paths = [given.locate(name) for given in inputs for name in (*given.files, *given.external)]
    seen = {path: _look(path) for path in paths}

    def check() -> None:
        for path, key in seen.items():
            if _look(path) != key:
                raise G4Error(
                    f"{path} changed while {stage} was being made from it: wait until it is "
                    "finished and run the same command again."
                )

    return check


def _look(path: Path) -> StatKey | None:
    try:
        return stat_key(path.stat())
    except OSError:
        return None
