"""Which tensor gets which scheme, and the mistakes that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import UsageError
from g4tool.quantize.options import QuantizeOptions, Rule, is_qat_source
from g4tool.quantize.policy import TensorPlan, plan, unmatched_rules

Tiny = Callable[[str], Path]


def plans_of(
    checkpoint: Checkpoint, source: str | None = None, **options: object
) -> dict[str, TensorPlan]:
    qat = source is not None and is_qat_source(source)
    made = plan(checkpoint, QuantizeOptions(**options), qat)  # type: ignore[arg-type]
    return {item.name: item for item in made}


def test_every_tensor_has_a_plan_and_every_matrix_is_quantized(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tiny-26b-a4b"))
    plans = plans_of(checkpoint)
    assert list(plans) == checkpoint.names
    kept = {n for n, p in plans.items() if p.scheme == "keep" and len(p.shape) > 1}
    assert kept == {"embed_tokens.weight"} | {f"layers.{i}.router.proj.weight" for i in range(3)}
    experts = plans["layers.0.experts.gate_up_proj.weight"]
    assert (experts.scheme, experts.group_size, experts.solver) == ("int4-hqq", 32, "hqq")
    assert experts.hf_name.endswith("layers.0.experts.gate_up_proj")
    assert all(item.reason for item in plans.values())


def test_first_rule_wins_and_is_named(tiny: Tiny) -> None:
    rules = (
        Rule(r"layers\.0\..*v_proj", "keep"),
        Rule("v_proj|embed_tokens", "int8"),
        Rule("down_proj", "int8", 64),
    )
    plans = plans_of(open_checkpoint(tiny("tiny-31b")), rules=rules)
    assert plans["layers.0.self_attn.v_proj.weight"].scheme == "keep"
    v_proj = plans["layers.1.self_attn.v_proj.weight"]
    assert (v_proj.scheme, v_proj.group_size) == ("int8", 128)
    assert v_proj.reason == "rule 2 ('v_proj|embed_tokens')"
    assert plans["layers.1.mlp.down_proj.weight"].group_size == 64
    assert plans["embed_tokens.weight"].scheme == "int8"


@pytest.mark.parametrize("match", ["embed_tokens_per_layer", r"^embed_tokens\.weight", "."])
def test_embeddings_at_4_bit_are_refused(tiny: Tiny, match: str) -> None:
    checkpoint = open_checkpoint(tiny("tiny-e2b"))
    with pytest.raises(UsageError, match="never stored at 4 bit; give int8 or keep"):
        plans_of(checkpoint, rules=(Rule(match, "int4-rtn"),))


def test_embeddings_are_kept_when_no_rule_speaks(tiny: Tiny) -> None:
    plans = plans_of(open_checkpoint(tiny("tiny-e2b")), group_size=128)
    for name in ("embed_tokens.weight", "embed_tokens_per_layer.weight"):
        assert plans[name].scheme == "keep"
        assert "never 4 bit" in plans[name].reason


def test_a_broad_rule_does_not_reach_vectors_and_router(tiny: Tiny) -> None:
    plans = plans_of(open_checkpoint(tiny("tiny-26b-a4b")), rules=(Rule(r"layers\.0\.", "int8"),))
    for name in ("input_layernorm.weight", "router.proj.weight", "router.scale", "layer_scalar"):
        item = plans[f"layers.0.{name}"]
        assert item.scheme == "keep"
        assert "rule 1" in item.reason
    assert plans["layers.0.experts.down_proj.weight"].scheme == "int8"


@pytest.mark.parametrize(("group", "expected"), [(32, 32), (64, 64), (128, 64)])
def test_group_falls_back_where_it_does_not_divide(
    moe_704: Checkpoint, group: int, expected: int
) -> None:
    plans = plans_of(moe_704, group_size=group)
    for name in ("experts.down_proj", "mlp.down_proj"):
        item = plans[f"layers.1.{name}.weight"]
        assert item.shape[-1] in (704, 2112)
        assert item.group_size == expected
        assert ("128 does not divide" in item.reason) == (group == 128)
    assert plans["layers.1.mlp.gate_proj.weight"].group_size == group


def test_a_misspelt_rule_is_an_error_and_one_for_another_size_is_not(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tiny-31b"))
    with pytest.raises(UsageError, match=r"Rule 1 \('v_prj'\) matches no tensor"):
        plans_of(checkpoint, rules=(Rule("v_prj", "keep"),))
    rules = (Rule("embed_tokens_per_layer", "int8"), Rule("vision|audio", "keep"))
    plans_of(checkpoint, rules=rules)
    lines = unmatched_rules(checkpoint, QuantizeOptions(rules=rules))
    assert [line.split(")")[0] for line in lines] == [
        "Rule 1 ('embed_tokens_per_layer'",
        "Rule 2 ('vision|audio'",
    ]


def test_head_is_made_from_the_embedding(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tiny-31b"))
    assert "lm_head.weight" not in plans_of(checkpoint)
    head = plans_of(checkpoint, head="int4-hqq")["lm_head.weight"]
    assert (head.source, head.hf_name) == ("embed_tokens.weight", "lm_head.weight")
    assert (head.scheme, head.shape) == ("int4-hqq", (4096, 128))
    assert plans_of(checkpoint, head="keep")["lm_head.weight"].scheme == "keep"


def test_trained_source_keeps_its_grid(tiny: Tiny) -> None:
    checkpoint = open_checkpoint(tiny("tiny-31b"))
    name = "layers.0.mlp.up_proj.weight"
    source = "google/gemma-4-31B-it-qat-q4_0-unquantized"
    item = plans_of(checkpoint, source, group_size=128)[name]
    assert (item.solver, item.group_size) == ("grid", 32)
    assert "trained on, which has groups of 32, not 128" in item.reason
    assert plans_of(checkpoint, source, scheme="int4-sym")[name].solver == "grid-symmetric"
    forced = plans_of(checkpoint, source, solver="hqq")[name]
    assert forced.solver == "hqq"
    assert "not on its trained grid, since the solver hqq was asked for" in forced.reason
    assert plans_of(checkpoint, "google/gemma-4-31B-it")[name].solver == "hqq"


def test_towers_are_carried_whatever_the_rules_say(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "multimodal"
    shutil.copytree(tiny("tiny-31b"), folder)
    tower = "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight"
    index = folder / "model.safetensors.index.json"
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    values = load_file(shard)
    values[tower] = torch.ones(4, 4, dtype=torch.bfloat16)
    save_file(values, shard, {"format": "pt"})
    if index.exists():
        facts = json.loads(index.read_text())
        facts["weight_map"][tower] = shard.name
        index.write_text(json.dumps(facts))
    with SafetensorsFile(shard) as file:
        assert tower in file.tensors
    item = plans_of(open_checkpoint(folder), rules=(Rule("q_proj", "int8"),))[tower]
    assert (item.scheme, item.reason) == ("keep", "a tower is carried through")
