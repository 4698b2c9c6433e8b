"""Kills `g4 build` at many moments and lets it resume; prints one JSON line a kill.

A process of its own: it imports everything once and forks a child for each build, so that a kill
hits the work and not the imports. Run as `python killed_builds.py FOLDER PRESET KILLS`.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

import g4tool.quantize.driver
from g4tool.cli.main import main
from g4tool.formats.torchao import Stored, shard_layout

State = tuple[int, int]


def start(home: Path, preset: str) -> int:
    """A child that builds `preset`; its pid."""
    pid = os.fork()
    if pid == 0:
        sys.argv = ["g4", "build", preset, "--home", str(home), "--quiet"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            main()
        except SystemExit as stop:
            os._exit(int(stop.code or 0))
    return pid


def finish(pid: int) -> int:
    """The child's exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def journaled(home: Path) -> dict[str, State]:
    """Inode and mtime of every shard that an unfinished quantize artifact has in its journal."""
    states = {}
    for journal in home.glob("artifacts/quantize/*.partial/journal.jsonl"):
        for line in journal.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                path = journal.parent / "files" / json.loads(line)["file"]
                # Killed after the last rename: the artifact is whole, only its journal is left.
                if path.exists():
                    stat = path.stat()
                    states[path.name] = (stat.st_ino, stat.st_mtime_ns)
    return states


def contents(home: Path) -> dict[str, bytes]:
    """Every file of every finished artifact, paths of this store left out."""
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in sorted((home / "artifacts").rglob("*"))
        if path.is_file() and path.name != "where.json"
    }


def progress(home: Path) -> int:
    """How many files the store holds, finished or not: it grows with the work."""
    return sum(len(files) for _, _, files in os.walk(home / "artifacts"))


def run(folder: Path, preset: str, kills: int) -> None:
    """One whole build for its time and bytes, then `kills` interrupted ones."""
    torch.set_num_threads(1)
    shard_layout([Stored("a.weight", "int4", (2, 32), torch.bfloat16, 32)])  # imports torchao
    began = time.monotonic()
    assert finish(start(folder / "whole", preset)) == 0
    step = (time.monotonic() - began) / kills
    wanted = contents(folder / "whole")
    total = progress(folder / "whole")
    moments = random.Random(0)
    for number in range(kills):
        home = folder / f"killed-{number}"
        pid = start(home, preset)
        # By work done rather than by the clock, so that a busy machine spreads kills as well.
        while (
            progress(home) < number * total / kills
            and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        ):
            time.sleep(0.002)
        time.sleep(step * moments.random() / 2)
        os.kill(pid, signal.SIGKILL)
        code = finish(pid)
        before = journaled(home)
        resumed = finish(start(home, preset))
        after = {
            path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in home.glob("artifacts/quantize/*/*")
        }
        outcome = {
            "killed": code == -signal.SIGKILL,
            "exit_after_resume": resumed,
            "shards_kept": len(before),
            "shards_made_again": [name for name, state in before.items() if after[name] != state],
            "same_bytes": contents(home) == wanted,
            "leftovers": [path.name for path in home.glob("artifacts/*/*.partial")],
        }
        print(json.dumps(outcome), flush=True)
        shutil.rmtree(home)


if __name__ == "__main__":
    assert g4tool.quantize.driver
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
