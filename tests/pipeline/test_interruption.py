"""Two processes on one artifact, and processes killed at any moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from g4tool.pipeline.locks import Holder
from g4tool.pipeline.store import Store

from .helpers import Copies, tree

HERE = Path(__file__).parent
CODE = """
import sys
from pathlib import Path
from g4tool.pipeline.store import Store
from helpers import Copies
store = Store(Path(sys.argv[1]))
stage = Copies(count=6, log=Path(sys.argv[2]), pause=float(sys.argv[3]))
def say(*words): print(*words, flush=True)
store.ensure(stage, on_decision=lambda d: say(d.action), on_wait=lambda h: say("wait", h.pid))
"""


def start(home: Path, log: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CODE, str(home), str(log), str(pause)]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def wait_for(path: Path, lines: int) -> None:
    end = time.monotonic() + 60
    while not (path.exists() and len(path.read_text().split()) >= lines):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_second_process_waits_and_knows_for_whom(tmp_path: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    first = start(home, log, 0.4)
    wait_for(log, 1)
    heard: list[Holder | None] = []
    decisions: list[str] = []
    stage = Copies(count=6, log=log)
    Store(home).ensure(
        stage, on_decision=lambda d: decisions.append(d.action), on_wait=heard.append
    )
    assert first.wait(60) == 0
    assert [holder and holder.pid for holder in heard] == [first.pid]
    assert heard[0]
    assert "-c" in heard[0].command
    assert str(first.pid) in str(heard[0])
    assert decisions == ["reuse"]
    assert len(stage.made()) == 6


def test_whoever_waits_goes_on_where_a_killed_one_stopped(tmp_path: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    first = start(home, log, 1.0)
    wait_for(log, 2)
    second = start(home, log, 0)
    assert second.stdout
    assert second.stdout.readline().split() == ["wait", str(first.pid)]
    first.send_signal(signal.SIGKILL)
    first.wait()
    out, _ = second.communicate(timeout=60)
    assert out.split() == ["resume"]
    assert len(log.read_text().split()) <= 7


@pytest.mark.parametrize("moment", range(8))
def test_killed_at_any_moment_it_redoes_at_most_one_file(tmp_path: Path, moment: int) -> None:
    undisturbed = Store(tmp_path / "undisturbed").ensure(Copies(count=6))
    home, log = tmp_path / "home", tmp_path / "log"
    process = start(home, log, 0.05)
    wait_for(log, 1)
    time.sleep(moment * 0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    final = home / "artifacts" / "copies" / undisturbed.identity
    begun = len(log.read_text().split())
    whole = final.exists()

    made = Store(home).ensure(Copies(count=6, log=log))
    again = len(log.read_text().split()) - begun
    assert made.path == final
    assert tree(made.path) == tree(undisturbed.path)
    assert again == 0 if whole else again in (6 - begun, 6 - begun + 1)


def test_killed_between_the_last_file_and_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every system call after the last file is a moment too: stop before each of them in turn."""

    class Killed(BaseException):
        pass

    undisturbed = tree(Store(tmp_path / "undisturbed").ensure(Copies()).path)
    moment = 0
    while True:
        store = Store(tmp_path / f"home-{moment}")
        stage = Copies(log=tmp_path / f"log-{moment}")
        calls = 0

        def guarded(real):  # type: ignore[no-untyped-def]
            def call(*arguments, **options):  # type: ignore[no-untyped-def]
                nonlocal calls
                if len(stage.made()) == 3:  # noqa: B023
                    calls += 1
                    if calls == moment + 1:  # noqa: B023
                        raise Killed
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
                patch.setattr(os, name, guarded(getattr(os, name)))
            try:
                store.ensure(stage)
                killed = False
            except Killed:
                killed = True
        begun = len(stage.made())
        made = Store(store.home).ensure(stage)
        assert tree(made.path) == undisturbed
        assert len(stage.made()) - begun <= 1
        if not killed:
            break
        moment += 1
    assert moment > 8
