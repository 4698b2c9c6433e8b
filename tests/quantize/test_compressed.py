"""The compressed-tensors bundle: what its plan says, and that its files hold what is nearest."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.quantize.compressed import (
    compressed_config,
    compressed_index,
    compressed_plan,
    compressed_units,
)
from g4tool.quantize.compressed_shard import CompressedShard, compressed_unit
from g4tool.quantize.driver import quantize_unit, units
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.policy import TensorPlan, plan
from tests.formats.packed import tensors, weights

Tiny = Callable[[str], Path]


def packed_plan(checkpoint: Checkpoint, *rules: Rule, **options: object) -> dict[str, TensorPlan]:
    asked = QuantizeOptions(rules=rules, **options)  # type: ignore[arg-type]
    return {p.name: p for p in compressed_plan(checkpoint, plan(checkpoint, asked))}


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_all_matrices_but_embeddings_and_routers_are_symmetric(tiny: Tiny, name: str) -> None:
    checkpoint = open_checkpoint(tiny(name))
    embeddings = Rule("embed_tokens", "int8")
    for item in packed_plan(checkpoint, embeddings, head="int8").values():
        kept = len(item.shape) < 2 or "embed" in item.name or "router" in item.name
        assert item.scheme == ("keep" if kept else "int4-sym"), item.name
        assert item.solver == (None if kept else "symmetric")
    assert packed_plan(checkpoint).keys() == set(checkpoint.names)


def test_layers_that_vllm_joins_get_the_finest_of_them(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tiny-31b"))
    found = packed_plan(
        checkpoint,
        Rule(r"layers\.0\..*v_proj", "int8"),
        Rule(r"layers\.1\..*q_proj", "keep"),
        Rule(r"layers\.2\..*up_proj", "int4-hqq", 64),
    )

    def kinds(layer: int, *parts: str) -> list[tuple[str, int | None]]:
        items = [found[f"layers.{layer}.{part}_proj.weight"] for part in parts]
        return [(item.scheme, item.group_size) for item in items]

    attention = [f"self_attn.{part}" for part in "qkv"]
    assert kinds(0, *attention) == [("int8", 128)] * 3
    assert kinds(0, "self_attn.o", "mlp.up") == [("int4-sym", 32)] * 2
    assert kinds(1, *attention) == [("keep", None)] * 3
    assert kinds(2, "mlp.gate", "mlp.up", "mlp.down") == [("int4-sym", 32)] * 3
    assert (
        "as layers.0.self_attn.v_proj.weight, which vLLM joins"
        in found["layers.0.self_attn.k_proj.weight"].reason
    )


def test_int8_lies_as_vllm_has_it(tiny: Tiny, moe_704: Checkpoint) -> None:
    checkpoint = open_checkpoint(tiny("tiny-26b-a4b"))
    plans = packed_plan(checkpoint, scheme="int8")
    sizes = {name.partition(".experts.")[2]: p.group_size for name, p in plans.items()}
    assert sizes["gate_up_proj.weight"] == sizes["down_proj.weight"] == 128
    section = compressed_config(checkpoint, plans.values())["quantization_config"]
    found = [
        (group["weights"]["strategy"], group["weights"]["group_size"], group["targets"])
        for group in section["config_groups"].values()
    ]
    rows, grouped = sorted(found)
    assert rows[:2] == ("channel", None)
    assert not any("experts" in target for target in rows[2])
    assert grouped[:2] == ("group", 128)
    whole = plans["layers.0.self_attn.o_proj.weight"]
    assert whole.group_size == 256
    (wide,) = compressed_plan(checkpoint, [replace(whole, shape=(128, 512))])
    assert (wide.group_size, wide.scheme) == (128, "int8")
    # 704 columns take no group of 128, and vLLM joins the experts' matrices.
    found = packed_plan(moe_704, scheme="int8")
    assert {p.group_size for name, p in found.items() if ".experts." in name} == {64}


def test_odd_sizes(moe_704: Checkpoint) -> None:
    found = packed_plan(moe_704, group_size=128)
    assert found["layers.0.experts.down_proj.weight"].group_size == 64
    # Its partner goes with it, since vLLM has one group for the experts of a layer.
    assert found["layers.0.experts.gate_up_proj.weight"].group_size == 64
    item = found["layers.0.mlp.up_proj.weight"]
    narrow = replace(item, shape=(64, 66), scheme="int8", solver="int8", group_size=66)
    (kept,) = compressed_plan(moe_704, [narrow])
    assert kept.scheme == "keep"
    assert kept.reason.endswith("its columns do not fill whole words")


def test_config_names_what_is_plain_and_how_the_rest_lies(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tiny-26b-a4b"))
    plans = list(packed_plan(checkpoint).values())
    section = compressed_config(checkpoint, plans)["quantization_config"]
    routers = [f"model.layers.{layer}.router.proj" for layer in range(3)]
    assert section["ignore"] == ["lm_head", *routers]
    assert [g["targets"] for g in section["config_groups"].values()] == [["Linear"]]
    kept = list(packed_plan(checkpoint, Rule("experts", "keep")).values())
    section = compressed_config(checkpoint, kept)["quantization_config"]
    assert section["quantization_status"] == "compressed"
    assert r"re:.*layers\.2\.experts\..*down_proj$" in section["ignore"]
    two = list(packed_plan(checkpoint, Rule("o_proj", "int8")).values())
    groups = compressed_config(checkpoint, two)["quantization_config"]["config_groups"].values()
    bits = {g["weights"]["num_bits"]: g["targets"] for g in groups}
    assert bits[8] == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(3)]
    assert r"re:.*layers\.0\.experts\..*(gate|up)_proj$" in bits[4]
    # Each names all three, though the full layer has no v_proj: vLLM asks for it.
    joined = [rf"re:.*layers\.{layer}\.self_attn\.[qkv]_proj$" for layer in range(3)]
    assert [name for name in bits[4] if "self_attn" in name] == joined
    kept = list(packed_plan(checkpoint, Rule(r"layers\.2\..*k_proj", "keep")).values())
    section = compressed_config(checkpoint, kept)["quantization_config"]
    assert joined[2] in section["ignore"]


@pytest.mark.parametrize("group", [32, 128])
def test_files_beside_and_alone_hold_the_nearest_symmetric_codes(
    tiny: Tiny, tmp_path: Path, group: int
) -> None:
    checkpoint = open_checkpoint(tiny("tiny-26b-a4b"))
    rules = (Rule("o_proj", "int8", 64), Rule(r"layers\.1\..*down_proj", "keep"))
    plans = plan(checkpoint, QuantizeOptions(rules=rules, group_size=group))
    made = units(plans)
    packed = compressed_units(made, compressed_plan(checkpoint, plans))
    (tmp_path / "alone").mkdir()
    accounts = []
    for unit, twin in zip(made, packed, strict=True):
        with CompressedShard(tmp_path / twin.file, twin, "mark") as shard:
            quantize_unit(checkpoint, unit, tmp_path / "other", also=shard.take)
            accounts += shard.accounts
        alone = tmp_path / "alone" / twin.file
        found = compressed_unit(checkpoint, twin, alone, fingerprint="mark")
        assert found == accounts[-len(found) :]
        assert alone.read_bytes() == (tmp_path / twin.file).read_bytes()
    stored = tensors(tmp_path / "alone")
    assert compressed_index(packed)["weight_map"].keys() == stored.keys()
    assert sum(a.nbytes for a in accounts) == sum(value.nbytes for value in stored.values())
    values = weights(stored)
    source = {
        n: v for f in tiny("tiny-26b-a4b").glob("*.safetensors") for n, v in load_file(f).items()
    }
    up = torch.stack([values[f"model.layers.0.experts.{e}.up_proj.weight"] for e in range(8)])
    exact = source["model.layers.0.experts.gate_up_proj"].float()[:, 256:]
    error = ((up - exact).norm() / exact.norm()).item()
    # Rounding to the scale that spans each group, which a search can only improve on.
    groups = exact.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    plain = (((groups / scale).round() * scale - groups).norm() / exact.norm()).item()
    assert 0.5 * plain < error < plain
    kept = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(stored[kept], source[kept])
    both = [a for a in accounts if a.name.startswith("layers.1.experts.")]
    assert {a.scheme for a in both} == {"keep"}  # one of the two was, and vLLM joins them
