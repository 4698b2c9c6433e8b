"""One program of the stand-in backend for all tests, and the CUDA runtime on the CPU."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from g4tool.backends.executorch import cuda_runtime

pytest.importorskip("executorch", reason="exporting needs executorch")


@dataclass(frozen=True)
class Program:
    """The files, and the model that they were made from, its cache empty."""

    path: Path
    weights: Path
    model: torch.nn.Module


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Two methods of compiled code over one cache; made once, half a minute."""
    from tests.backends.executorch_cuda.stand_in import Model, write_program

    model = Model()
    return Program(*write_program(model, tmp_path_factory.mktemp("program")), model)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime as it is, but for the device and the container of code for it."""

    def container(path: str, models: int, *_: object) -> object:
        return torch._C._aoti.AOTIModelContainerRunnerCpu(path, models)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_runtime, "_DEVICE", torch.device("cpu"))
    runner = "AOTIModelContainerRunnerCuda"
    monkeypatch.setattr(torch._C._aoti, runner, container, raising=False)
