import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.writer import INDEX, TensorFileWriter, plan_shards, write_checkpoint
from g4tool.errors import G4Error
from g4tool.files import sha256
from g4tool.progress import Progress

BF16 = torch.bfloat16


def spec(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "z": torch.randn(9, 5, generator=generator),
        "experts": torch.randn(4, 3, 2, generator=generator).to(BF16),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "codes": torch.randint(0, 255, (6,), dtype=torch.uint8, generator=generator),
    }


def test_row_blocks_in_any_order_equal_the_whole(
    tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    specs = {name: spec(value) for name, value in values.items()}
    with TensorFileWriter(tmp_path / "whole", specs, {"by": "test"}) as writer:
        for name, value in values.items():
            writer.write(name, value)
    with TensorFileWriter(tmp_path / "blocks", specs, {"by": "test"}) as writer:
        writer.write("codes", values["codes"])
        for start, stop in ((6, 9), (0, 2), (4, 6), (2, 4)):
            writer.write("z", values["z"][start:stop], start)
        writer.write("experts", values["experts"].transpose(1, 2).contiguous().transpose(1, 2))
        writer.write("scalar", values["scalar"])
    assert sha256(tmp_path / "whole") == sha256(tmp_path / "blocks")
    read = load_file(tmp_path / "blocks")
    assert all(read[name].equal(value) for name, value in values.items())
    with safe_open(tmp_path / "blocks", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}
    ours = SafetensorsFile(tmp_path / "blocks")
    assert sorted(ours.tensors, key=lambda n: ours.info(n).offset)[0] == "z"
    assert ours.info("z").offset % 8 == 0


def test_missing_rows_leave_nothing(tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / "a", {"x": (BF16, (4, 2))})
    writer.write("x", torch.ones(2, 2, dtype=BF16), 0)
    writer.write("x", torch.ones(1, 2, dtype=BF16), 3)
    with pytest.raises(ValueError, match="x was not written whole"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_wrong_writes_are_refused(tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / "a", {"x": (BF16, (4, 2))})
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16"):
        writer.write("x", torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"rows 3:5 of x"):
        writer.write("x", torch.ones(2, 2, dtype=BF16), 3)
    writer.write("x", torch.ones(2, 2, dtype=BF16), 1)
    for row in (0, 1, 2):
        with pytest.raises(ValueError, match="written twice"):
            writer.write("x", torch.ones(2, 2, dtype=BF16), row)
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_aborts(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="stop"),
        TensorFileWriter(tmp_path / "a", {"x": (BF16, (1,))}),
    ):
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_the_disk_refusing_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(G4Error, match="cannot be created"):
        TensorFileWriter(tmp_path / "absent" / "a", {})
    writer = TensorFileWriter(tmp_path / "a", {"x": (BF16, (1,))})

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(G4Error, match=r"a cannot be written: No space left"):
        writer.write("x", torch.ones(1, dtype=BF16))
    writer.abort()


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from g4tool.checkpoint.writer import write_checkpoint
def read(name, start, stop):
    if name == "c":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.ones(stop - start, 4)
specs = {name: (torch.float32, (100, 4)) for name in "abcd"}
write_checkpoint(Path(sys.argv[1]), specs, read, shard_bytes=1600)
"""


def test_a_killed_writer_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert done.returncode == -signal.SIGKILL
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "model-00001-of-00004.safetensors",
        "model-00002-of-00004.safetensors",
        "model-00003-of-00004.safetensors.part",
    ]
    specs = dict.fromkeys("abcd", (torch.float32, (100, 4)))
    write_checkpoint(folder, specs, lambda _, i, j: torch.ones(j - i, 4), shard_bytes=1600)
    assert len(list(folder.iterdir())) == 5
    assert (folder / INDEX).is_file()


def test_shards_and_index_as_transformers_names_them(
    tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    specs = {name: spec(value) for name, value in values.items()}
    seen: list[Progress] = []
    files = write_checkpoint(
        tmp_path,
        specs,
        lambda name, i, j: _rows(values[name], i, j),
        shard_bytes=230,
        report=seen.append,
    )
    assert [step.done for step in seen] == [180, 228, 232, 238]
    assert {step.total for step in seen} == {238}
    assert [path.name for path in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(v.nbytes for v in values.values())}
    for name, value in values.items():
        assert load_file(tmp_path / index["weight_map"][name])[name].equal(value)


def test_one_shard_has_no_index_and_converts(tmp_path: Path) -> None:
    value = torch.randn(8, 4)
    files = write_checkpoint(
        tmp_path, {"x": (BF16, (8, 4))}, lambda _, start, stop: value[start:stop]
    )
    assert files == [tmp_path / "model.safetensors"]
    assert load_file(files[0])["x"].equal(value.to(BF16))
    with pytest.raises(G4Error, match=r"model\.safetensors belongs to another checkpoint"):
        write_checkpoint(
            tmp_path,
            {"x": (BF16, (8, 4)), "y": (BF16, (8, 4))},
            lambda _, start, stop: value[start:stop],
            shard_bytes=64,
        )


def test_a_large_tensor_has_a_shard_of_its_own() -> None:
    small, large = (torch.uint8, (10,)), (torch.uint8, (100,))
    plan = plan_shards({"a": small, "b": small, "c": large, "d": small}, 20)
    assert [list(members) for members in plan.values()] == [["a", "b"], ["c"], ["d"]]


STREAM = """
import re, sys, torch
from pathlib import Path
from g4tool.checkpoint.tensorfile import SafetensorsFile, row_blocks
from g4tool.checkpoint.writer import write_checkpoint
torch.set_num_threads(1)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
folder, shape = Path(sys.argv[1]), (50_000, 4096)
before = peak()
write_checkpoint(folder, {"x": (torch.bfloat16, shape)},
                 lambda _, i, j: torch.full((j - i, 4096), 2, dtype=torch.bfloat16))
written = peak()
with SafetensorsFile(folder / "model.safetensors") as file:
    info = file.info("x")
    total = sum(file.read("x", i, j)[0, 0].item() for i, j in row_blocks(info.rows,
                info.row_nbytes, 1 << 23))
print(info.nbytes >> 20, written - before, peak() - written, int(total))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's VmHWM")
def test_memory_is_bounded_by_blocks(tmp_path: Path) -> None:
    """390 MiB written in blocks of 64 MiB, then read in blocks of 8 MiB."""
    out = subprocess.check_output([sys.executable, "-c", STREAM, tmp_path], text=True)
    size, writing, reading, total = map(int, out.split())
    assert size == 390
    assert total == 2 * 49
    assert writing < 160
    assert reading < 32


def _rows(value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return value[start:stop] if value.dim() else value
