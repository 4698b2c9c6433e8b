"""What is said while libraries work, and what is not."""

import copy
import subprocess
import sys

import pytest

from g4tool.backends.executorch.library import short_history

_SPEAKS = """
import logging, os, sys, warnings
from g4tool.backends.executorch.library import quiet
with quiet():
    os.write(2, b"from C++\\n")
    logging.getLogger("x").warning("from a log")
    warnings.warn("from a warning")
    print("a progress bar", file=sys.stderr)
print("afterwards", file=sys.stderr)
os.write(2, b"and C++ again\\n")
"""


def test_only_what_python_writes_is_seen_while_libraries_work() -> None:
    done = subprocess.run([sys.executable, "-c", _SPEAKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["a progress bar", "afterwards", "and C++ again"]


def test_origins_of_nodes_are_shared_only_while_lowering() -> None:
    traceback = pytest.importorskip("torch.fx.traceback")
    source = traceback.NodeSource(None)
    with short_history():
        assert copy.deepcopy([source])[0] is source
    assert copy.deepcopy([source])[0] is not source
