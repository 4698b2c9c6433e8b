import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from g4tool.pipeline.locks import hold, holder, try_hold

HOLD = """
import sys, time
from pathlib import Path
from g4tool.pipeline.locks import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_holder_is_named_while_it_holds(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    with hold(lock):
        about = holder(lock)
        assert about is not None
        assert about.pid == os.getpid()
    assert holder(lock) is None


def test_the_note_of_a_killed_process_is_nobodys(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with hold(lock):
        text = (tmp_path / "a.json").read_text()
        (tmp_path / "a.json").write_text(text.replace(str(os.getpid()), str(process.pid)))
        assert holder(lock) is None


def test_a_moment_of_waiting_is_not_told(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    taken = threading.Event()

    def look() -> None:
        with try_hold(lock) as held:
            assert held
            taken.set()
            time.sleep(0.1)

    thread = threading.Thread(target=look)
    thread.start()
    taken.wait()
    heard: list[object] = []
    with hold(lock, heard.append):
        pass
    thread.join()
    assert heard == []


def test_a_lock_of_another_process_is_seen_and_dies_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        with try_hold(lock) as held:
            assert not held

        def give_up(about: object) -> None:
            raise TimeoutError(str(about))

        with (
            pytest.raises(TimeoutError, match=f"process {process.pid} on .* since 2"),
            hold(lock, give_up),
        ):
            pass
        process.kill()
        process.wait()
        with try_hold(lock) as held:
            assert held
