import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)
from torchao.quantization import Int4Tensor, IntxUnpackedToInt8Tensor

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.writer import TensorFileWriter
from g4tool.errors import G4Error
from g4tool.formats.torchao import Stored, part_names, part_specs, read_layout, shard_layout
from g4tool.kernels.int8 import dequantize_int8

BF16 = torch.bfloat16
ENTRIES = [
    Stored("model.layers.0.mlp.up_proj.weight", "int4", (48, 96), BF16, 32),
    Stored("model.layers.0.mlp.down_proj.weight", "int4", (96, 48), BF16, 48),
    Stored("model.layers.0.experts.gate_up_proj", "int4", (4, 16, 128), BF16, 64),
    Stored("model.layers.0.experts.down_proj", "int8", (4, 128, 64), BF16, 32),
    Stored("model.layers.10.mlp.up_proj.weight", "int4", (16, 32), BF16, 32),
    Stored("model.layers.1.mlp.up_proj.weight", "int8", (24, 64), BF16, 32),
    Stored("model.embed_tokens.weight", "int8", (50, 96), BF16, 96),
    Stored("model.layers.0.layer_scalar", "plain", (1,), BF16),
    Stored("model.norm.weight", "plain", (96,), torch.float32),
]


def random_parts(entry: Stored) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(len(entry.name))
    parts = {}
    for part, (dtype, shape) in part_specs(entry).items():
        if dtype.is_floating_point:
            parts[part] = (torch.randn(shape, generator=random) * 3).to(dtype)
        elif part == "zero":
            parts[part] = torch.zeros(shape, dtype=dtype)
        else:
            low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
            parts[part] = torch.randint(low, high, shape, generator=random, dtype=dtype)
    return parts


def torchao_tensor(entry: Stored, parts: dict[str, Tensor]) -> Tensor:
    if entry.kind == "plain":
        return parts["weight"]
    block = [1] * (len(entry.shape) - 1) + [entry.group]
    data = (parts["qdata"], parts["scale"], parts["zero"])
    if entry.kind == "int4":
        return Int4Tensor(*data, block_size=block, shape=torch.Size(entry.shape))
    return IntxUnpackedToInt8Tensor(*data, torch.int8, block, entry.dtype, None)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    specs, metadata = shard_layout(ENTRIES)
    with TensorFileWriter(path, specs, metadata) as writer:
        for entry in ENTRIES:
            names = part_names(entry.name, entry.kind)
            for part, value in random_parts(entry).items():
                writer.write(names[part], value)
    return path


def test_layout_is_what_torchao_writes_for_real_tensors() -> None:
    real = {entry.name: torchao_tensor(entry, random_parts(entry)) for entry in ENTRIES}
    tensors, metadata = flatten_tensor_state_dict(real)
    specs, ours = shard_layout(ENTRIES)
    assert ours == metadata
    assert list(specs.items()) == [(k, (t.dtype, tuple(t.shape))) for k, t in tensors.items()]


def test_torchao_reads_our_file_bit_equal(written: Path) -> None:
    with safe_open(written, "pt") as file:
        metadata = file.metadata()
        flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert metadata.pop("format") == "pt"
    tensors, left = unflatten_tensor_state_dict(flat, metadata)
    assert left == {}
    assert list(tensors) == [entry.name for entry in ENTRIES]
    for entry in ENTRIES:
        tensor, parts = tensors[entry.name], random_parts(entry)
        assert tensor.shape == entry.shape
        assert tensor.dtype == entry.dtype
        if entry.kind == "plain":
            assert torch.equal(tensor, parts["weight"])
            continue
        kinds = {"int4": Int4Tensor, "int8": IntxUnpackedToInt8Tensor}
        assert type(tensor) is kinds[entry.kind]
        assert tensor.block_size[-1] == entry.group
        for part, field in (("qdata", "qdata"), ("scale", "scale"), ("zero", "zero_point")):
            value = getattr(tensor, field)
            assert value.dtype == parts[part].dtype
            assert torch.equal(value, parts[part])


def test_read_layout_finds_the_same_weights(written: Path) -> None:
    with SafetensorsFile(written) as file:
        found = read_layout("f", file.metadata, file.tensors)
        assert [(w.name, w.kind, w.group) for w in found] == [
            (e.name, e.kind, e.group) for e in ENTRIES
        ]
        for entry, weight in zip(ENTRIES, found, strict=True):
            for part, value in random_parts(entry).items():
                assert torch.equal(file.read(weight.parts[part]), value)


def test_int8_means_the_same_to_torchao() -> None:
    entry = ENTRIES[5]
    parts = random_parts(entry)
    want = torchao_tensor(entry, parts).dequantize()
    assert torch.equal(dequantize_int8(parts["qdata"], parts["scale"], BF16), want)


def test_a_file_without_table_is_plain() -> None:
    found = read_layout("f", {"format": "pt"}, ["a.weight", "b"])
    assert [(w.name, w.kind, w.parts) for w in found] == [
        ("a.weight", "plain", {"weight": "a.weight"}),
        ("b", "plain", {"weight": "b"}),
    ]


def _other_class(facts: dict) -> None:
    facts["_type"] = "Float8Tensor"


def _blocks_of_rows(facts: dict) -> None:
    facts["_data"]["block_size"] = [2, 32]


def _fewer_parts(facts: dict) -> None:
    facts["_tensor_data_names"] = ["qdata", "scale"]


def _pre_scale(facts: dict) -> None:
    facts["_tensor_data_names"].append("act_pre_scale")


def _no_type(facts: dict) -> None:
    del facts["_type"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other_class, "a.weight is a torchao Float8Tensor, which g4 does not read"),
        (_blocks_of_rows, "block_size of a.weight"),
        (_fewer_parts, "other parts than qdata, scale and zero_point"),
        (_pre_scale, "other parts than qdata, scale and zero_point"),
        (_no_type, "does not say how a.weight is stored"),
    ],
)
def test_foreign_headers_are_refused(change, says: str) -> None:
    specs, metadata = shard_layout([Stored("a.weight", "int4", (8, 64), BF16, 32)])
    facts = json.loads(metadata["a.weight"])
    change(facts)
    with pytest.raises(G4Error, match=says) as error:
        read_layout("x.safetensors", {**metadata, "a.weight": json.dumps(facts)}, specs)
    assert str(error.value).startswith("x.safetensors")


def test_int8_of_another_width_or_with_quantized_activations_is_refused() -> None:
    specs, metadata = shard_layout([Stored("a.weight", "int8", (8, 64), BF16, 32)])
    facts = json.loads(metadata["a.weight"])
    for key, value, says in (
        ("target_dtype", {"_type": "torch.dtype", "_data": "uint4"}, "no width of 1 to 8 bits"),
        ("activation_quantization", {"_type": "X", "_data": "Y"}, "quantized activations"),
        ("activation_dtype", {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "activations"),
    ):
        changed = json.dumps({**facts, "_data": {**facts["_data"], key: value}})
        with pytest.raises(G4Error, match=says):
            read_layout("f", {**metadata, "a.weight": changed}, specs)


def test_header_and_tensors_must_agree() -> None:
    specs, metadata = shard_layout(ENTRIES[:1])
    with pytest.raises(G4Error, match=r"has no tensor .*_weight_scale, a part of"):
        read_layout("f", metadata, [name for name in specs if "scale" not in name])
    with pytest.raises(G4Error, match=r"does not name stray\.weight"):
        read_layout("f", metadata, [*specs, "stray.weight"])
    with pytest.raises(G4Error, match="tensor_names"):
        read_layout("f", {**metadata, "tensor_names": "{"}, specs)


@pytest.mark.parametrize(("columns", "group"), [(96, 64), (33, 33), (96, None), (96, 0)])
def test_groups_that_do_not_fit_are_refused(columns: int, group: int | None) -> None:
    with pytest.raises(ValueError, match=r"a\.weight"):
        shard_layout([Stored("a.weight", "int4", (8, columns), BF16, group)])


def test_torchao_is_imported_late_and_silently() -> None:
    code = """
import logging, sys, torch
import g4tool.formats.load, g4tool.formats.torchao as f
assert not any(name.split(".")[0] == "torchao" for name in sys.modules)
f.shard_layout([f.Stored("a.weight", "int4", (8, 64), torch.bfloat16, 32)])
assert "torchao" in sys.modules
assert logging.getLogger("torchao").level == logging.NOTSET
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
