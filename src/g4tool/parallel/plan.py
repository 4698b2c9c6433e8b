"""How a text model's weights are divided over ranks: one plan for every runtime and compiler.

Megatron's scheme: the matrices that read the residual stream are cut by output rows, those that
write to it by input columns, and one sum follows each of the latter. Attention is cut by whole
heads, the embedding and the head by vocabulary, experts within each expert's width. What is small
(norms, router, per-layer gates) every rank has whole.

A quantized weight's columns are cut only between groups, so that no group loses its scale.
https://arxiv.org/abs/1909.08053
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from g4tool.checkpoint.inventory import Shape, text_tensors
from g4tool.errors import UsageError
from g4tool.model.config import LayerConfig, TextConfig

Kind = Literal["column", "row", "head", "vocabulary", "replicated"]
After = Literal["nothing", "sum", "gather"]
Run = tuple[int, int]
"""Start and stop along the axis that is cut."""
Runs = tuple[Run, ...]

EXPERT_BLOCK = 8
"""An expert's width comes in blocks of this many, which grouped matrix products want."""


@dataclass(frozen=True)
class Layout:
    """How a weight is stored: `group` columns share a scale (None where kind is "plain")."""

    kind: Literal["plain", "int4", "int8"] = "plain"
    group: int | None = None


@dataclass(frozen=True)
class Split:
    """One weight's cut. `axis` is -2 (output rows), -1 (input columns) or None (whole).

    `runs[rank]` are what a rank holds of the axis, side by side. `after` is what follows the
    matrix product: ranks' results are added, put side by side, or neither. `note` says why a cut
    is not the even one.
    """

    name: str
    shape: Shape
    kind: Kind
    axis: int | None
    runs: tuple[Runs, ...]
    after: After = "nothing"
    note: str = ""

    def rank_shape(self, rank: int) -> Shape:
        """Shape of what `rank` holds."""
        if self.axis is None:
            return self.shape
        sizes = list(self.shape)
        sizes[self.axis] = sum(stop - start for start, stop in self.runs[rank])
        return tuple(sizes)

    @property
    def is_even(self) -> bool:
        """Whether all ranks' shapes are alike, as one program for all ranks needs."""
        return len({self.rank_shape(rank) for rank in range(len(self.runs))}) == 1


@dataclass(frozen=True)
class Plan:
    """The division of one model over `degree` ranks. `splits` by canonical name, in model order."""

    config: TextConfig
    degree: int
    splits: Mapping[str, Split]
    layouts: Mapping[str, Layout]

    def rank_config(self, rank: int) -> TextConfig:
        """The canonical config whose model has the shapes that `rank` holds.

        Only the vocabulary's size is the whole model's: ranks take any token id.
        """
        layers = tuple(self._rank_layer(n, x, rank) for n, x in enumerate(self.config.layers))
        moe = self.config.moe
        if moe is not None:
            width = self.splits["layers.0.experts.down_proj.weight"].rank_shape(rank)[-1]
            moe = replace(moe, intermediate_size=width)
        heads = self.config.num_heads // self.degree
        return replace(self.config, num_heads=heads, layers=layers, moe=moe)

    def notes(self) -> dict[str, str]:
        """Why a weight is not cut evenly, by name, where it is not."""
        return {split.name: split.note for split in self.splits.values() if split.note}

    def _rank_layer(self, number: int, layer: LayerConfig, rank: int) -> LayerConfig:
        width = self.splits[f"layers.{number}.mlp.down_proj.weight"].rank_shape(rank)[-1]
        heads = len(kv_heads(layer, self.config.num_heads, self.degree, rank))
        return replace(layer, intermediate_size=width, num_kv_heads=heads)


def make_plan(
    config: TextConfig,
    degree: int,
    layouts: Mapping[str, Layout] | None = None,
    expert_block: int = EXPERT_BLOCK,
) -> Plan:
    """The plan for `degree` ranks. `layouts` has the quantized weights by canonical name.

    Experts' widths are cut at multiples of `expert_block`. Raises UsageError, naming the largest
    degree that works, where the query heads cannot be divided.
    """
    check_degree(config, degree)
    layouts = layouts or {}
    shapes = text_tensors(config)
    if degree == 1:
        whole = {name: _whole(name, shape, 1) for name, shape in shapes.items()}
        return Plan(config, 1, whole, layouts)
    splits: dict[str, Split] = {}
    for name, shape in shapes.items():
        splits[name] = _split(name, shape, config, degree, layouts, expert_block)
    return Plan(config, degree, splits, layouts)


def check_degree(config: TextConfig, degree: int) -> None:
    """Raises UsageError where `degree` ranks cannot each have the same number of query heads."""
    heads = config.num_heads
    if degree < 1:
        raise UsageError(f"tensor parallelism {degree}: give at least 1.")
    if heads % degree:
        best = max(n for n in range(1, min(degree, heads) + 1) if heads % n == 0)
        why = "is more than" if degree > heads else "does not divide"
        raise UsageError(
            f"tensor parallelism {degree} {why} the model's {heads} query heads; "
            f"the largest that works below it is {best}."
        )


def kv_heads(layer: LayerConfig, num_heads: int, degree: int, rank: int) -> tuple[int, ...]:
    """Which key-value heads a rank holds, in the order its query heads use them.

    Fewer heads than ranks: a head is on several ranks. Where neither number divides the other, a
    rank's query heads would use its heads unequally often, so each query head gets its own copy.
    """
    queries, each = num_heads // degree, num_heads // layer.num_kv_heads
    used = [query // each for query in range(rank * queries, (rank + 1) * queries)]
    if layer.num_kv_heads % degree and degree % layer.num_kv_heads:
        return tuple(used)
    return tuple(dict.fromkeys(used))


def even_runs(size: int, degree: int, unit: int = 1) -> tuple[Runs, ...] | None:
    """`size` over ranks in whole units, the first ranks one more; None if there are too few."""
    units, rest = divmod(size, unit)
    if rest or units < degree:
        return None
    each, more = divmod(units, degree)
    ends = [(rank * each + min(rank, more)) * unit for rank in range(degree + 1)]
    return tuple(((ends[rank], ends[rank + 1]),) for rank in range(degree))


def column_unit(layout: Layout, columns: int) -> int:
    """Fewest columns at whose multiples a weight can be cut."""
    if layout.group is None:
        return 1
    if layout.group >= columns:  # one scale a row serves every part of it
        return 2 if layout.kind == "int4" else 1
    return layout.group


def _whole(name: str, shape: Shape, degree: int, note: str = "") -> Split:
    return Split(name, shape, "replicated", None, ((),) * degree, note=note)


def _split(
    name: str,
    shape: Shape,
    config: TextConfig,
    degree: int,
    layouts: Mapping[str, Layout],
    expert_block: int,
) -> Split:
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if name in ("embed_tokens.weight", "embed_tokens_per_layer.weight", "lm_head.weight"):
        runs = even_runs(shape[0], degree)
        if runs is None:
            return _whole(name, shape, degree, f"{shape[0]} rows are fewer than {degree} ranks")
        return Split(name, shape, "vocabulary", -2, runs, "gather", _unequal("rows", runs))
    if leaf == "per_layer_model_projection":
        runs = even_runs(shape[0], degree)
        assert runs is not None, "as many rows as layers times their width"
        return Split(name, shape, "column", -2, runs, "gather", _unequal("rows", runs))
    if ".self_attn." in name and leaf.endswith("_proj"):
        return _attention(name, leaf, shape, config, degree, layouts)
    if ".mlp." in name or ".experts." in name:
        block = expert_block if ".experts." in name else 1
        return _feed_forward(name, leaf, shape, degree, layouts, block)
    return _whole(name, shape, degree)


def _unequal(what: str, runs: Iterable[Runs]) -> str:
    """How many of `what` ranks hold, where not all hold as many; the first ones hold more."""
    most, *_, fewest = (stop - start for ((start, stop),) in runs)
    return f"{most} {what} on the first ranks, {fewest} on the last" if most != fewest else ""


def _attention(
    name: str,
    leaf: str,
    shape: Shape,
    config: TextConfig,
    degree: int,
    layouts: Mapping[str, Layout],
) -> Split:
    layer = config.layers[int(name.split(".")[1])]
    size = layer.head_dim
    queries = config.num_heads // degree
    mine = tuple(((r * queries * size, (r + 1) * queries * size),) for r in range(degree))
    if leaf == "q_proj":
        return Split(name, shape, "head", -2, mine)
    if leaf == "o_proj":
        unit = column_unit(layouts.get(name, Layout()), shape[-1])
        if queries * size % unit:
            note = (
                f"{queries * size} columns a rank would cut groups of {unit}: whole on every rank, "
                "which gathers the heads before it"
            )
            return _whole(name, shape, degree, note)
        return Split(name, shape, "head", -1, mine, "sum")
    runs = []
    for rank in range(degree):
        heads = kv_heads(layer, config.num_heads, degree, rank)
        runs.append(merged((head * size, (head + 1) * size) for head in heads))
    note = ""
    if layer.num_kv_heads % degree:
        note = f"{layer.num_kv_heads} key-value heads are repeated over {degree} ranks"
    return Split(name, shape, "head", -2, tuple(runs), note=note)


def merged(runs: Iterable[Run]) -> Runs:
    """Runs in the same order, those that follow on each other joined."""
    out: list[Run] = []
    for start, stop in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def _feed_forward(
    name: str, leaf: str, shape: Shape, degree: int, layouts: Mapping[str, Layout], block: int
) -> Split:
    """gate, up and down share one division of the width: down's groups decide it."""
    experts = ".experts." in name
    down = f"{name.rsplit('.', 2)[0]}.down_proj.weight"
    width = shape[-1] if leaf == "down_proj" else shape[-2] // (2 if experts else 1)
    layout = layouts.get(down, Layout())
    unit = lcm(column_unit(layout, width), block)
    runs = even_runs(width, degree, unit)
    if runs is None:
        note = f"width {width} gives {degree} ranks no blocks of {unit}: whole on every rank"
        return _whole(name, shape, degree, note)
    note = _unequal("columns", runs)
    if note:
        note = f"width {width} in blocks of {unit}: {note}"
    if leaf == "down_proj":
        return Split(name, shape, "row", -1, runs, "sum", note)
    if not experts:
        return Split(name, shape, "column", -2, runs, note=note)
    both = tuple((run, (run[0] + width, run[1] + width)) for (run,) in runs)
    return Split(name, shape, "column", -2, both, note=note)
