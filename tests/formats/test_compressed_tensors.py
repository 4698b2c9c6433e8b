"""The pack-quantized layout: as the compressed-tensors package packs it, and what is refused."""

import copy
from typing import Any

import pytest
import torch

from g4tool.errors import G4Error
from g4tool.formats import compressed_tensors as layout
from g4tool.formats.torchao import Stored
from g4tool.kernels.int4 import pack_int4

STORED = Stored("model.layers.0.mlp.up_proj.weight", "int4", (16, 64), torch.bfloat16, 32)


def codes(bits: int, rows: int = 16, columns: int = 64) -> torch.Tensor:
    """Signed codes over the whole range."""
    half = 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_the_package(bits: int) -> None:
    package = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers",
        reason="compares with the package: pip install compressed-tensors==0.20.1",
    )
    signed = codes(bits)
    qdata = pack_int4(signed + 8) if bits == 4 else signed
    words = layout.packed_words(qdata)
    assert torch.equal(words, package.pack_to_int32(signed, bits))
    assert torch.equal(layout.unpacked_words(words, bits, 64), qdata)


def test_a_word_by_hand() -> None:
    word = layout.packed_words(pack_int4(torch.arange(8)[None]))
    assert word.item() == 0x76543210
    word = layout.packed_words(torch.tensor([[-128, 0, 1, -1]], dtype=torch.int8))
    assert word.item() & 0xFFFFFFFF == 0x7F818000


def test_zero_points_are_packed_down_the_rows() -> None:
    zeros = torch.randint(0, 16, (13, 3), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([zeros, torch.zeros(3, 3, dtype=torch.int64)]).unflatten(0, (2, 8))
    words = (padded << torch.arange(0, 32, 4).view(1, 8, 1)).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    assert torch.equal(layout.unpacked_zeros(words, 13), zeros.to(torch.uint8))


def test_what_becomes_of_a_weight() -> None:
    stem = "model.layers.0.mlp.up_proj"
    assert layout.weight_specs(STORED) == {
        f"{stem}.weight_packed": (torch.int32, (16, 8)),
        f"{stem}.weight_scale": (torch.bfloat16, (16, 2)),
        f"{stem}.weight_shape": (torch.int64, (2,)),
    }
    experts = Stored("x.experts.gate_up_proj", "int8", (3, 32, 64), torch.bfloat16, 64)
    specs = layout.weight_specs(experts)
    assert len(specs) == 3 * 2 * 3
    assert specs["x.experts.2.up_proj.weight_packed"] == (torch.int32, (16, 16))
    plain = Stored("norm.weight", "plain", (64,), torch.float32)
    assert layout.weight_specs(plain) == {"norm.weight": (torch.float32, (64,))}
    for group, columns in ((48, 64), (None, 64), (4, 20)):
        odd = Stored("a.weight", "int4", (8, columns), torch.bfloat16, group)
        with pytest.raises(ValueError, match=r"do not fit a\.weight"):
            layout.weight_specs(odd)


def test_values_of_both_widths() -> None:
    scale = torch.rand(16, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    shape = torch.tensor([16, 64])
    for bits in (4, 8):
        signed = codes(bits)
        words = layout.packed_words(pack_int4(signed + 8) if bits == 4 else signed)
        expected = signed.float() * scale.repeat_interleave(32, 1)
        assert torch.equal(layout.dequantized(words, scale, shape), expected)


def test_experts_bring_the_word_that_stops_who_cannot_read_them() -> None:
    experts = Stored("m.experts.down_proj", "int4", (2, 16, 64), torch.bfloat16, 32)
    assert layout.quantization_config([STORED], [])["quantization_status"] == "compressed"
    section = layout.quantization_config([STORED, experts], ["lm_head"])
    assert section["quantization_status"] == layout.GUARD
    layout.check_config(section, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": {}}, "no config_groups"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme, which g4 does not do"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({"weights": None}, "does not say its weights"),
        ({"format": "marlin-24"}, "the format marlin-24"),
        ({"num_bits": 3}, "3-bit weights of type int"),
        ({"type": "float"}, "4-bit weights of type float"),
        ({"strategy": "tensor"}, "the strategy tensor"),
        ({"actorder": "group"}, "groups in the order of activations"),
        ({"input_activations": {"num_bits": 8}}, "quantized activations"),
    ],
)
def test_configs_that_mean_something_else_are_refused(change: dict[str, Any], message: str) -> None:
    section = copy.deepcopy(layout.quantization_config([STORED], []))
    ((key, value),) = change.items()
    group = section["config_groups"]["group_0"]
    place = next((p for p in (group["weights"], group, section) if key in p), section)
    place[key] = value
    with pytest.raises(G4Error, match=message):
        layout.check_config(section, "config.json")
