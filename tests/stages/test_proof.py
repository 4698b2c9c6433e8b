"""What an export says while it works."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from g4tool.progress import Progress
from g4tool.stages.proof import Given


def test_a_long_step_says_how_long_it_has_been_under_way() -> None:
    said: list[Progress] = []
    stage = SimpleNamespace(name="export-cpu")
    given = Given(stage, Path(), None, said.append)  # type: ignore[arg-type]
    with given.step("lower"):
        time.sleep(1.3)
    assert [(each.job, each.done, each.total) for each in said] == [("export-cpu", 2, 4)] * 2
    assert [each.note for each in said] == ["lower, 0 s", "lower, 1 s"]
    time.sleep(1.1)
    assert len(said) == 2


def test_the_clock_stops_when_a_step_fails() -> None:
    said: list[Progress] = []
    given = Given(SimpleNamespace(name="x"), Path(), None, said.append)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), given.step("prove"):
        raise KeyboardInterrupt
    time.sleep(1.1)
    assert len(said) == 1
