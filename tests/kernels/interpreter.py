"""Running Triton's kernels in tests: on a CUDA device, or in Triton's interpreter on the CPU."""

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


@pytest.fixture(autouse=True)
def loops_over_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 makes loop bounds of arrays in a way NumPy 2 refuses."""
    if DEVICE == "cuda" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
