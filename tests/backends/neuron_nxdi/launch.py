"""Runs a module of this folder in the Python that has NxD Inference's dependencies."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def launch(python: str, module: str, *arguments: str, ranks: int = 1) -> Any:
    """The JSON of the last line that `module` prints, run by `python` on `ranks` processes."""
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        python,
        *(many if ranks > 1 else []),
        *("-m", f"tests.backends.neuron_nxdi.{module}", *arguments),
    ]
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # All of it: torchrun ends with a summary that says which rank failed, and not of what.
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
