"""Peak memory is set by the block, not by the number of layers or their size."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "measure_memory.py"


def test_peak_does_not_grow_with_layers(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--layers", "2", "6", "--width", "336"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=True
    )
    anonymous, resident = [], []
    for line in done.stdout.splitlines():
        words = line.replace(",", "").split()
        anonymous.append(int(words[words.index("RssAnon") + 1]))
        resident.append(int(words[words.index("set") + 1]))
    assert anonymous[1] <= 1.1 * anonymous[0]
    assert resident[1] <= 1.1 * resident[0]
    assert resident[1] < 1024
