"""Runs the command line in this process, as `main` would be run in its own."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Ran:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as the one JSON object that it must be."""
        return json.loads(self.out)


G4 = Callable[..., Ran]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that all commands of a session share, so that each artifact is made once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def g4(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> G4:
    """`g4("build", "tiny-31b")`: runs with the shared store and returns what came of it."""
    from g4tool.cli.main import main

    monkeypatch.setenv("G4_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["g4", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return Ran(int(stop.value.code or 0), out, err)

    return run
