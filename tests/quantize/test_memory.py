"""Peak memory is set by the block, not by the number of layers or of formats."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "measure_memory.py"
WIDTH = "672"
ONE, ALL = "torchao", "torchao,compressed-tensors,executorch"
# A layer of 31B has 0.5 G weights of 2 bytes, and an eighth of the width makes a 64th of it.
LAYER_MIB = 15
_LINE = re.compile(r"(\d+) layers, ([\w,-]+): RssAnon (\d+) MiB, maximum resident set (\d+) MiB")

Peak = dict[tuple[str, str], tuple[int, int]]


@pytest.fixture(scope="module")
def peak(tmp_path_factory: pytest.TempPathFactory) -> Peak:
    """Layers and formats -> RssAnon and maximum resident set in MiB."""
    found: Peak = {}
    for layers, formats in (("2", [ONE]), ("6", [ONE, ALL])):
        command = [sys.executable, str(TOOL), "--layers", layers, "--width", WIDTH, "--formats"]
        where = ("--folder", str(tmp_path_factory.mktemp("memory")))
        done = subprocess.run(
            [*command, *formats, *where], capture_output=True, text=True, check=True
        )
        for match in _LINE.finditer(done.stdout):
            found[match[1], match[2]] = int(match[3]), int(match[4])
    return found


def test_peak_does_not_grow_with_layers(peak: Peak) -> None:
    for few, many in zip(peak["2", ONE], peak["6", ONE], strict=True):
        assert many <= 1.1 * few
        assert many < 1024


def test_further_formats_take_less_than_a_layer_more(peak: Peak) -> None:
    for one, several in zip(peak["6", ONE], peak["6", ALL], strict=True):
        assert several - one < LAYER_MIB
