"""kill -9 at twenty moments of `g4 build`: every resumed run ends as an undisturbed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_builds.py")
KILLS = 20


@pytest.mark.timeout(600)
def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "tiny-31b", str(KILLS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stderr[-2000:]
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]

    assert len(outcomes) == KILLS
    for outcome in outcomes:
        assert outcome["exit_after_resume"] == 0
        assert outcome["same_bytes"]
        assert outcome["leftovers"] == []
        # What the journal had is not touched again, so at most the shard in flight is redone.
        assert outcome["shards_made_again"] == []
    assert sum(outcome["killed"] for outcome in outcomes) >= KILLS // 2
    assert len({outcome["shards_kept"] for outcome in outcomes}) >= 3, "kills hit one moment only"
