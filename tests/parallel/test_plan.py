"""The plan: what is cut where, and cut and joined again bit for bit, at every variant's widths."""

import math
import os
from dataclasses import replace
from itertools import product

import pytest
import torch

from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error, UsageError
from g4tool.formats.torchao import Kind, Stored, part_specs
from g4tool.model.config import TextConfig
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS
from g4tool.parallel.cut import cut, join, rank_part_shape
from g4tool.parallel.plan import Layout, even_runs, kv_heads, make_plan

_NOISE = torch.randint(
    0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
_DEGREES = (1, 2, 4, 8, 16)


def _one_of_each(config: TextConfig) -> TextConfig:
    """A real-width model of one layer of each sort, with few rows in the tables and few experts."""
    sorts = {(x.attention, x.kv_source is None): x for x in config.layers if x.kv_source is None}
    layers = list(sorts.values())
    shared = [x for x in config.layers if x.kv_source is not None][:1]
    kinds = [x.attention for x in layers]
    layers += [replace(x, kv_source=kinds.index(x.attention)) for x in shared]
    moe = config.moe and replace(config.moe, num_experts=2, top_k=1)
    # The residual stream is never cut. G4_REAL_WIDTH=1 keeps its width, and takes five minutes.
    hidden = config.hidden_size if os.environ.get("G4_REAL_WIDTH") == "1" else 128
    return replace(
        config,
        hidden_size=hidden,
        layers=tuple(layers),
        vocab_size=331,
        per_layer_vocab_size=331 if config.per_layer_dim else 0,
        moe=moe,
    )


def _cases() -> list[tuple[str, TextConfig, int]]:
    configs = {**TINY, **{name: _one_of_each(config) for name, config in VARIANTS.items()}}
    return [
        (name, config, degree)
        for (name, config), degree in product(configs.items(), _DEGREES)
        if config.num_heads % degree == 0
    ]


def _fill(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Noise: of one long run of it, another stretch for each seed."""
    count = math.prod(shape) * dtype.itemsize
    noise = _NOISE.repeat(-(-(count + 64 * seed) // _NOISE.numel()))
    return noise[64 * seed : 64 * seed + count].view(dtype).view(shape)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes: random bfloat16 has NaNs, which are not equal to themselves.
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("name", "config", "degree"), _cases())
@pytest.mark.parametrize("stored", ["bf16", "int4 g32", "int4 g128"])
def test_shard_then_unshard_is_bit_identical(
    name: str, config: TextConfig, degree: int, stored: str
) -> None:
    group = None if stored == "bf16" else int(stored.rpartition("g")[2])
    shapes = text_tensors(config)
    layouts = {}
    for weight, shape in shapes.items():
        if group and len(shape) > 1 and shape[-1] % group == 0 and "embed" not in weight:
            layouts[weight] = Layout("int4", group)
        elif group and "embed" in weight:
            layouts[weight] = Layout("int8", shape[-1])
    plan = make_plan(config, degree, layouts)
    for seed, (weight, shape) in enumerate(shapes.items()):
        layout = layouts.get(weight, Layout())
        kind: Kind = layout.kind
        specs = part_specs(Stored(weight, kind, shape, torch.bfloat16, layout.group))
        for part, (dtype, whole_shape) in specs.items():
            if kind == "int8" and part == "zero":
                continue
            whole = _fill(whole_shape, dtype, seed)
            split = plan.splits[weight]
            pieces = [cut(split, layout, part, whole, rank) for rank in range(degree)]
            for rank, piece in enumerate(pieces):
                assert piece.shape == rank_part_shape(split, layout, part, whole_shape, rank)
            views = [p.view(torch.int16) if dtype == torch.bfloat16 else p for p in pieces]
            assert _same(join(split, layout, part, views), whole), (weight, part)


@pytest.mark.parametrize(("name", "config", "degree"), _cases())
def test_a_ranks_model_has_the_shapes_of_the_plan(
    name: str, config: TextConfig, degree: int
) -> None:
    plan = make_plan(config, degree)
    for rank in {0, degree - 1}:
        with torch.device("meta"):
            shapes = {
                k: tuple(v.shape) for k, v in TextModel(plan.rank_config(rank)).state_dict().items()
            }
        for weight, split in plan.splits.items():
            if split.kind not in ("vocabulary",) and "per_layer_model" not in weight:
                assert shapes[weight] == split.rank_shape(rank), weight


@pytest.mark.parametrize(
    ("variant", "weight", "group", "degree", "sizes"),
    [
        # 2112 columns in groups of 32 are 66 groups; 704 are 22; 21504 in groups of 128 are 168.
        ("26b-a4b", "mlp.down_proj", 32, 4, [544, 544, 512, 512]),
        ("26b-a4b", "experts.down_proj", 32, 4, [192, 192, 160, 160]),
        ("31b", "mlp.down_proj", 128, 16, [1408] * 8 + [1280] * 8),
    ],
)
def test_cuts_move_to_the_borders_of_groups(
    variant: str, weight: str, group: int, degree: int, sizes: list[int]
) -> None:
    name = f"layers.0.{weight}.weight"
    plan = make_plan(VARIANTS[variant], degree, {name: Layout("int4", group)})
    assert [plan.splits[name].rank_shape(rank)[-1] for rank in range(degree)] == sizes
    assert str(sum(sizes)) in plan.notes()[name]
    gate = name.replace("down_proj", "gate_up_proj" if "experts" in weight else "gate_proj")
    factor = 2 if "experts" in weight else 1
    assert [plan.splits[gate].rank_shape(r)[-2] for r in range(degree)] == [
        factor * s for s in sizes
    ]
    assert not plan.splits[name].is_even


def test_too_few_groups_leave_the_feed_forward_whole() -> None:
    config = TINY["tiny-26b-a4b"]
    name = "layers.0.experts.down_proj.weight"
    plan = make_plan(config, 4, {name: Layout("int4", 128)})
    assert plan.splits[name].kind == "replicated"
    assert plan.splits[name].after == "nothing"
    assert "whole on every rank" in plan.notes()[name]
    assert plan.splits["layers.0.experts.gate_up_proj.weight"].kind == "replicated"


def test_reductions_of_each_variant() -> None:
    """Two sums a layer, one for the embedding; logits gathered: nothing else crosses ranks."""
    plan = make_plan(VARIANTS["31b"], 4)
    after = {name: split.after for name, split in plan.splits.items() if split.after != "nothing"}
    assert sum(how == "sum" for how in after.values()) == 2 * 60
    assert {name for name, how in after.items() if how == "gather"} == {"embed_tokens.weight"}
    assert {name.split(".")[-2] for name, how in after.items() if how == "sum"} == {
        "o_proj",
        "down_proj",
    }


@pytest.mark.parametrize(
    ("variant", "degree", "words"),
    [
        (
            "e2b",
            16,
            "is more than the model's 8 query heads; the largest that works below it is 8.",
        ),
        (
            "31b",
            64,
            "is more than the model's 32 query heads; the largest that works below it is 32",
        ),
        (
            "12b",
            6,
            "does not divide the model's 16 query heads; the largest that works below it is 4",
        ),
        ("12b", 0, "give at least 1"),
    ],
)
def test_degrees_that_do_not_work(variant: str, degree: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(VARIANTS[variant], degree)


def test_key_value_heads_of_ranks() -> None:
    layer = VARIANTS["31b"].layers[5]
    assert layer.num_kv_heads == 4
    assert [kv_heads(layer, 32, 2, rank) for rank in range(2)] == [(0, 1), (2, 3)]
    assert [kv_heads(layer, 32, 8, rank) for rank in range(8)] == [
        (h,) for h in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    # Three heads over two ranks: each of a rank's query heads has its own copy.
    odd = replace(layer, num_kv_heads=3)
    assert [kv_heads(odd, 6, 2, rank) for rank in range(2)] == [(0, 0, 1), (1, 2, 2)]


def test_even_runs() -> None:
    assert even_runs(10, 4) == (((0, 3),), ((3, 6),), ((6, 8),), ((8, 10),))
    assert even_runs(64, 3, 32) is None
    assert even_runs(65, 2, 32) is None


def test_copies_that_differ_are_an_error() -> None:
    plan = make_plan(VARIANTS["31b"], 8)
    split = plan.splits["layers.5.self_attn.k_proj.weight"]
    pieces = [torch.zeros(512, 3) for _ in range(8)]
    join(split, Layout(), "weight", pieces)
    pieces[1][0, 0] = 1
    with pytest.raises(G4Error, match="rank 1's copy of weight differs"):
        join(split, Layout(), "weight", pieces)
