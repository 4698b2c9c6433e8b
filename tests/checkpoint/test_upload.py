"""Tensors of a file in a device's memory: the file's values, whatever their size and dtype."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from g4tool.checkpoint import upload
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [False, True])
def test_gives_the_files_values(
    tmp_path: Path, device: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_BLOCK", 4096)
    values = {
        "a": torch.randn(300, 77).bfloat16(),
        "b": torch.randint(-128, 127, (5, 3, 9), dtype=torch.int8),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(values, tmp_path / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file, upload.reader(device) as read:
        got = {name: read(file, name, at_once) for name in values}
    for name, tensor in values.items():
        assert got[name].device.type == device
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].cpu(), tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_cut_short_meanwhile_is_told(tmp_path: Path, device: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    with SafetensorsFile(path) as file:
        with path.open("r+b") as cut:
            cut.truncate(2000)
        with (
            pytest.raises(G4Error, match=r"x\.safetensors: a ends too early"),
            upload.reader(device) as read,
        ):
            read(file, "a", False)


def test_bytes_from_the_middle(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3), "b": torch.arange(64, dtype=torch.uint8)}, tmp_path / "x")
    into = torch.empty(10, dtype=torch.uint8)
    with SafetensorsFile(tmp_path / "x") as file:
        file.read_bytes("b", 20, into)
    assert into.tolist() == list(range(20, 30))
