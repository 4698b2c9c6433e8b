"""Bits by sensitivity: within the size, never worse for more room, near the best there is."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from g4tool.errors import UsageError
from g4tool.evaluate.assign import assign, hull, options_for
from g4tool.evaluate.evaluation import select
from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.scores import compare
from g4tool.evaluate.sensitivity import Choice, Matrix, sensitivities
from g4tool.evaluate.summary import interval
from g4tool.evaluate.sweep import DEFAULT
from g4tool.quantize.options import QuantizeOptions
from g4tool.quantize.policy import TensorPlan, plan

from .conftest import GetTiny, Tiny

SIZES = (5.01, 5.1, 5.5, 6.0, 8.0, 12.0, 16.0)


@pytest.fixture(scope="module")
def measured(tiny: GetTiny) -> dict[str, list[Matrix]]:
    made = {}
    for name in ("tiny-31b", "tiny-26b-a4b"):
        found = tiny(name)
        short = select(found.reference, found.windows[:1])
        made[name] = sensitivities(short, found.checkpoint)
    return made


def choice(name: str, scheme: str, group: int | None, nbytes: int, kl: float) -> Choice:
    fixed = ("reason", (4, 4), torch.bfloat16, name)
    return Choice(TensorPlan(name, name, scheme, group, "x", *fixed), nbytes, kl)  # type: ignore[arg-type]


def test_choices_of_each_matrix(tiny: GetTiny, measured: dict[str, list[Matrix]]) -> None:
    by_name = {matrix.name: matrix for matrix in measured["tiny-26b-a4b"]}
    found = tiny("tiny-26b-a4b")
    assert not any("router" in name or "norm" in name for name in by_name)
    embedding = [c.plan.scheme for c in by_name["embed_tokens.weight"].choices]
    assert embedding == ["int8", "keep"]
    experts = by_name["layers.0.experts.down_proj.weight"].choices
    assert [(c.plan.scheme, c.plan.group_size) for c in experts] == [
        ("int4-hqq", 128), ("int4-hqq", 64), ("int4-hqq", 32), ("int8", 256), ("keep", None),
    ]  # fmt: skip
    assert [c.nbytes for c in experts] == sorted(c.nbytes for c in experts)
    assert [c.kl for c in experts] == sorted((c.kl for c in experts), reverse=True)
    assert experts[-1].kl == 0
    assert experts[-1].nbytes == found.checkpoint.info("layers.0.experts.down_proj.weight").nbytes


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-26b-a4b"])
def test_size_is_kept_and_more_room_is_never_worse(
    tiny: GetTiny, measured: dict[str, list[Matrix]], name: str
) -> None:
    found = tiny(name)
    results = []
    for bits in SIZES:
        result = assign(found.checkpoint, measured[name], bits_per_weight=bits)
        assert result.bits_per_weight <= bits
        # The size it states is that of the plan its own rules lead to.
        row = plan(found.checkpoint, result.options)
        chosen = {c.plan.name: (c.plan.scheme, c.plan.group_size) for c in result.chosen}
        assert {p.name: (p.scheme, p.group_size) for p in row if p.name in chosen} == chosen
        results.append(result.kl)
    assert results == sorted(results, reverse=True)
    assert results[-1] == 0


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-26b-a4b"])
@pytest.mark.parametrize("group", [32, 64])
def test_beats_uniform_int4_of_its_size(
    tiny: GetTiny, measured: dict[str, list[Matrix]], name: str, group: int
) -> None:
    found = tiny(name)
    uniform = replace(DEFAULT, group_size=group)

    def kl(options: QuantizeOptions) -> tuple[int, tuple[torch.Tensor, ...]]:
        plans = plan(found.checkpoint, options)
        model, accounts = quantized(found.model, found.checkpoint, plans)
        return sum(a.nbytes for a in accounts), compare(found.reference, model).kl

    room, plain = kl(uniform)
    result = assign(found.checkpoint, measured[name], nbytes=room)
    size, mixed = kl(result.options)
    assert size == result.nbytes <= room
    low, _ = interval([a - b for a, b in zip(plain, mixed, strict=True)])  # type: ignore[misc]
    assert low > 0


def test_greedy_is_near_the_best_of_all_assignments(tiny: GetTiny) -> None:
    found: Tiny = tiny("tiny-31b")
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{n}.mlp.up_proj.weight" for n in range(5)]
    matrices = []
    for name in names:
        weight = float(torch.rand((), generator=generator)) * 3
        table = [("int4-hqq", 128, 34, 9.0), ("int4-hqq", 32, 41, 4.0), ("int8", None, 67, 0.05)]
        matrices.append(
            Matrix(name, tuple(choice(name, s, g, n * 1000, k * weight) for s, g, n, k in table))
        )
    fixed = assign(found.checkpoint, matrices, nbytes=10**9).nbytes - 5 * 67_000
    for room in range(175, 340, 10):
        result = assign(found.checkpoint, matrices, nbytes=fixed + room * 1000)
        fitting = [
            sum(c.kl for c in some)
            for some in product(*(m.choices for m in matrices))
            if sum(c.nbytes for c in some) <= room * 1000
        ]
        assert min(fitting) <= result.kl <= 1.35 * min(fitting) + 0.01


def test_hull_leaves_out_what_a_line_between_others_beats() -> None:
    points = [(10, 10.0), (20, 9.9), (30, 4.0), (40, 3.9), (50, 0.0), (60, 0.5)]
    found = hull([choice("x", "int8", None, n, kl) for n, kl in points])
    assert [c.nbytes for c in found] == [10, 30, 50]


def test_rules_name_exactly_their_tensors(tiny: GetTiny) -> None:
    chosen = [
        choice("embed_tokens.weight", "int8", 128, 1, 0),
        choice("layers.0.mlp.up_proj.weight", "int4-hqq", 32, 1, 0),
        choice("layers.1.mlp.up_proj.weight", "int8", 128, 1, 0),
        choice("layers.2.mlp.up_proj.weight", "int8", 128, 1, 0),
        choice("layers.2.mlp.down_proj.weight", "keep", None, 1, 0),
    ]
    options = options_for(chosen)
    assert (options.scheme, options.group_size) == ("int4-hqq", 32)
    assert [(rule.match, rule.scheme, rule.group_size) for rule in options.rules] == [
        (r"^embed_tokens\.weight$", "int8", None),
        (r"^layers\.(1|2)\.mlp\.up_proj\.weight$", "int8", None),
        (r"^layers\.2\.mlp\.down_proj\.weight$", "keep", None),
    ]


def test_targets_that_cannot_be(tiny: GetTiny, measured: dict[str, list[Matrix]]) -> None:
    found = tiny("tiny-31b")
    with pytest.raises(UsageError, match=r"target is 4\.000 bits a weight .* can be is 5\.001"):
        assign(found.checkpoint, measured["tiny-31b"], bits_per_weight=4.0)
    with pytest.raises(UsageError, match="and not both"):
        assign(found.checkpoint, measured["tiny-31b"])
