"""Ranks' files: what lies in them, joined again, and the memory that writing them takes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.formats.weights import open_weights
from g4tool.parallel.shards import join_shards, shard_key, write_shard
from g4tool.stages.ranks import plan_of
from tests.formats.bundles import make_bundle


@pytest.mark.parametrize("degree", [4, 8])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("bundle", [False, True])
def test_files_join_to_the_same_bits(name: str, degree: int, bundle: bool, tmp_path: Path) -> None:
    folder = tiny_folder(name)
    if bundle:
        make_bundle(folder, tmp_path / "bundle")
        folder = tmp_path / "bundle"
    weights = open_weights(folder)
    plan = plan_of(weights, degree)
    files = [tmp_path / f"{rank}.safetensors" for rank in range(degree)]
    for rank, path in enumerate(files):
        write_shard(path, weights, plan, rank)
    for weight in plan.splits:
        parts = join_shards(files, plan, weight)
        assert parts.keys() == weights.specs(weight).keys()
        for part, (_, shape) in weights.specs(weight).items():
            assert torch.equal(parts[part], weights.read(weight, part, 0, shape[0]))
    weights.close()


def test_safetensors_reads_them(tmp_path: Path) -> None:
    weights = open_weights(tiny_folder("tiny-31b"))
    plan = plan_of(weights, 4)
    write_shard(tmp_path / "1.safetensors", weights, plan, 1)
    held = load_file(tmp_path / "1.safetensors")
    assert sorted(held) == sorted(shard_key(name, "weight") for name in plan.splits)
    whole = weights.read("layers.0.mlp.down_proj.weight", "weight", 0, 128)
    assert torch.equal(held["layers.0.mlp.down_proj.weight"], whole[:, 128:256])


_MEASURE = """
import resource, sys
from pathlib import Path
import torch
from g4tool.formats.weights import open_weights
from g4tool.parallel.shards import write_shard
from g4tool.stages.ranks import plan_of
torch.set_num_threads(1)
weights = open_weights(Path(sys.argv[1]))
plan = plan_of(weights, 2)
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
before = peak()
for rank in range(2):
    write_shard(Path(sys.argv[2]) / f"{rank}.safetensors", weights, plan, rank)
print(peak() - before)
"""


def test_memory_is_that_of_some_blocks(tmp_path: Path) -> None:
    """A model of 940 MB, its largest tensor 262 MB: both shards in less than the largest tensor."""
    source = tmp_path / "model"
    source.mkdir()
    text = (tiny_folder("tiny-31b") / "config.json").read_text()
    text = text.replace('"vocab_size": 4096', '"vocab_size": 1024000')
    text = text.replace('"intermediate_size": 512', '"intermediate_size": 400000')
    (source / "config.json").write_text(text)
    tensors: dict[str, torch.Tensor] = {}
    for path in tiny_folder("tiny-31b").glob("*.safetensors"):
        tensors |= load_file(path)
    for key, value in tensors.items():
        if key.endswith("embed_tokens.weight"):
            tensors[key] = torch.zeros(1024000, 128, dtype=torch.bfloat16)
        elif ".mlp.down" in key:
            tensors[key] = torch.zeros(128, 400000, dtype=value.dtype)
        elif ".mlp." in key:
            tensors[key] = torch.zeros(400000, 128, dtype=value.dtype)
    save_file(tensors, source / "model.safetensors")
    largest = max(value.nbytes for value in tensors.values())
    total = sum(value.nbytes for value in tensors.values())
    del tensors
    ran = subprocess.run(
        [sys.executable, "-c", _MEASURE, source, tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert total > 3 * largest
    assert int(ran.stdout) < largest
