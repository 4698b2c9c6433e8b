"""`torchrun -m g4tool run` with two processes over gloo says what one process says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from g4tool.cli.main import main

# Longer than the window of 32 tokens.
_PROMPT = (
    "Once upon a time there was a ship upon the sea and the wind was cold, and the captain who had "
    "sailed for many years told his crew of an island."
)
_ARGUMENTS = ["run", "--raw", "--max-new-tokens", "64", "--dtype", "fp32", "--device", "cpu"]


def _run(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "G4_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )


@pytest.mark.parametrize("model", ["tiny-e2b", "tiny-26b-a4b"])
def test_two_processes_say_what_one_says(model: str, tmp_path: Path) -> None:
    arguments = [*_ARGUMENTS, model, _PROMPT]
    alone = _run(tmp_path, "g4tool", *arguments)
    assert alone.returncode == 0, alone.stderr
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = _run(tmp_path, *launcher, "-m", "g4tool", *arguments)
    assert both.returncode == 0, both.stderr
    assert len(alone.stdout) > 100
    assert both.stdout == alone.stdout
    assert both.stderr.count("decode 63 tokens") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny-31b", "--chat"], "there is no --chat"),
        (["tiny-31b", "hello", "--temperature", "1"], "sampling needs --seed"),
    ],
)
def test_what_ranks_cannot_share(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["g4", "run", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
