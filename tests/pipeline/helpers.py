"""Small stages to exercise the store with. Imported by subprocesses too: no pytest here."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4tool.pipeline.artifact import Source
from g4tool.pipeline.work import Work

SIZE = 40_000


@dataclass
class Copies:
    """Writes `count` files whose bytes depend on `seed`; `log` gets a line for each one made."""

    count: int = 3
    seed: int = 0
    inputs: tuple[Any, ...] = ()
    name: str = "copies"
    version: int = 1
    env: dict[str, Any] = field(default_factory=dict)
    log: Path | None = None
    pause: float = 0.0

    def parameters(self) -> dict[str, Any]:
        return {"count": self.count, "seed": self.seed}

    def environment(self) -> dict[str, Any]:
        return self.env

    def run(self, work: Work) -> None:
        work.expect(self.count)
        results = [
            work.file(f"unit-{number}.bin", lambda path, n=number: self.unit(path, n))
            for number in range(self.count)
        ]
        work.fact("results", results)

    def unit(self, path: Path, number: int) -> dict[str, int]:
        if self.log:
            with self.log.open("a") as log:
                log.write(f"{path.name}\n")
        block = bytes((self.seed + number + i) % 256 for i in range(SIZE // 8))
        with path.open("wb") as file:
            for _ in range(8):
                file.write(block)
                file.flush()
                time.sleep(self.pause / 8)
        return {"number": number}

    def made(self) -> list[str]:
        return self.log.read_text().split() if self.log and self.log.exists() else []


@dataclass
class Pointer:
    """Refers to the files of its one source, without copying them."""

    source: Source
    name: str = "pointer"
    version: int = 1

    @property
    def inputs(self) -> tuple[Source, ...]:
        return (self.source,)

    def parameters(self) -> dict[str, Any]:
        return {}

    def environment(self) -> dict[str, Any]:
        return {}

    def run(self, work: Work) -> None:
        (given,) = work.inputs
        for name in given.files:
            work.refer(name, given.locate(name))
        work.file("index.txt", lambda path: path.write_text(" ".join(given.files)))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its content."""
    return {
        str((Path(where) / name).relative_to(folder)): (Path(where) / name).read_bytes()
        for where, _, names in os.walk(folder)
        for name in names
    }
