"""The operations that mix positions: reductions, products, look-ups, sorting, and collectives."""

from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any

from torch.fx import Node

from g4tool.backends.neuron.stablehlo_ops import cut, dtype_of, lowers, shape_of
from g4tool.backends.neuron.stablehlo_text import Value, Writer, array
from g4tool.errors import G4Error


@lowers("aten.sum.dim_IntList")
def _sum(
    w: Writer, node: Node, x: Value, dims: Sequence[int], keep: bool = False, **_: Any
) -> Value:
    return w.reduce("add", w.convert(x, dtype_of(node)), dims or range(len(x.shape)), keep)


@lowers("aten.mean.dim")
def _mean(
    w: Writer, node: Node, x: Value, dims: Sequence[int], keep: bool = False, **_: Any
) -> Value:
    total = w.reduce("add", w.convert(x, dtype_of(node)), dims, keep)
    count = reduce(mul, (x.shape[dim] for dim in dims))
    return w.binary("divide", total, w.constant(float(count), total.dtype, total.shape))


@lowers("aten.amax.default")
def _amax(w: Writer, node: Node, x: Value, dims: Sequence[int], keep: bool = False) -> Value:
    return w.reduce("maximum", x, dims, keep)


@lowers("aten.any.dim")
def _any(w: Writer, node: Node, x: Value, dim: int, keep: bool = False) -> Value:
    return w.reduce("or", x, (dim,), keep)


@lowers("aten._softmax.default")
def _softmax(w: Writer, node: Node, x: Value, dim: int, half_to_float: bool) -> Value:
    x = w.convert(x, dtype_of(node))
    highest = w.broadcast(w.reduce("maximum", x, (dim,), True), x.shape)
    weights = w.unary("exponential", w.binary("subtract", x, highest))
    total = w.broadcast(w.reduce("add", weights, (dim,), True), x.shape)
    return w.binary("divide", weights, total)


@lowers("aten.mm.default", "aten.bmm.default")
def _matmul(w: Writer, node: Node, left: Value, right: Value) -> Value:
    batch = list(range(len(left.shape) - 2))
    last = len(batch)
    numbers = (
        f"lhs_batching_dimensions = {batch}, rhs_batching_dimensions = {batch}, "
        f"lhs_contracting_dimensions = [{last + 1}], rhs_contracting_dimensions = [{last}]"
    )
    attributes = f"dot_dimension_numbers = #stablehlo.dot<{numbers}>"
    return w.emit("dot_general", (left, right), shape_of(node), left.dtype, attributes)


def take(w: Writer, x: Value, index: Value, dim: int) -> Value:
    """Slices of x at `index` (any shape) along `dim`: index's shape stands where `dim` was."""
    place = dim % len(x.shape)
    count = len(index.shape)
    shape = [*x.shape[:place], *index.shape, *x.shape[place + 1 :]]
    offsets = [i for i in range(len(shape)) if not place <= i < place + count]
    sizes = [1 if i == place else size for i, size in enumerate(x.shape)]
    numbers = (
        f"offset_dims = {offsets}, collapsed_slice_dims = [{place}], "
        f"start_index_map = [{place}], index_vector_dim = {count}"
    )
    attributes = (
        f"dimension_numbers = #stablehlo.gather<{numbers}>, "
        f"slice_sizes = {array(sizes)}, indices_are_sorted = false"
    )
    return w.emit("gather", (x, index), shape, x.dtype, attributes)


@lowers("aten.embedding.default")
def _embedding(w: Writer, node: Node, table: Value, ids: Value, *_: Any) -> Value:
    return take(w, table, ids, 0)


@lowers("aten.index_select.default")
def _index_select(w: Writer, node: Node, x: Value, dim: int, index: Value) -> Value:
    return take(w, x, index, dim)


@lowers("aten.index.Tensor")
def _index(w: Writer, node: Node, x: Value, indices: Sequence[Value | None]) -> Value:
    place, index = _only(node, indices)
    return take(w, x, index, place)


@lowers("aten.index_put.default")
def _index_put(
    w: Writer,
    node: Node,
    x: Value,
    indices: Sequence[Value | None],
    new: Value,
    accumulate: bool = False,
) -> Value:
    """Slices of x at distinct places of one dimension replaced by `new`."""
    place, index = _only(node, indices)
    if accumulate or len(index.shape) != 1:
        raise G4Error(f"{node.name} adds to what it writes, which is not lowered to StableHLO.")
    windows = [i for i in range(len(x.shape)) if i != place]
    numbers = (
        f"update_window_dims = {windows}, inserted_window_dims = [{place}], "
        f"scatter_dims_to_operand_dims = [{place}], index_vector_dim = 1"
    )
    attributes = (
        f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, "
        "indices_are_sorted = false, unique_indices = true"
    )
    kind = f"tensor<{x.dtype}>"
    region = f'{{ ^bb0(%old: {kind}, %new: {kind}): "stablehlo.return"(%new) : ({kind}) -> () }}'
    updates = w.convert(new, x.dtype)
    return w.emit("scatter", (x, index, updates), x.shape, x.dtype, attributes, region)


@lowers("aten.topk.default")
def _topk(w: Writer, node: Node, x: Value, count: int, dim: int = -1, *_: Any) -> list[Value]:
    """A stable descending sort, cut: of equal values the one with the smaller index comes first."""
    place = dim % len(x.shape)
    numbers = w.emit("iota", (), x.shape, "i32", f"iota_dimension = {place} : i64")
    value, index = f"tensor<{x.dtype}>", "tensor<i32>"
    region = (
        f"{{ ^bb0(%a: {value}, %b: {value}, %i: {index}, %j: {index}): "
        f'%greater = "stablehlo.compare"(%a, %b) '
        "{comparison_direction = #stablehlo<comparison_direction GT>} "
        f": ({value}, {value}) -> tensor<i1> "
        f'"stablehlo.return"(%greater) : (tensor<i1>) -> () }}'
    )
    attributes = f"dimension = {place} : i64, is_stable = true"
    results = [(x.shape, x.dtype), (x.shape, "i32")]
    both = w.emit_many("sort", (x, numbers), results, attributes, region)
    return [cut(w, part, place, 0, count) for part in both]


def _groups(ranks: int) -> str:
    row = ", ".join(str(rank) for rank in range(ranks))
    return f"replica_groups = dense<[[{row}]]> : tensor<1x{ranks}xi64>"


@lowers("_c10d_functional.all_reduce.default")
def _all_reduce(w: Writer, node: Node, x: Value, operation: str, group: str) -> Value:
    if operation != "sum":
        raise G4Error(f"{node.name}: all_reduce of {operation!r} is not lowered to StableHLO.")
    region = w.region("add", x.dtype)
    return w.emit("all_reduce", (x,), x.shape, x.dtype, _groups(w.ranks), region)


@lowers("_c10d_functional.all_gather_into_tensor.default")
def _all_gather(w: Writer, node: Node, x: Value, ranks: int, group: str) -> Value:
    attributes = f"all_gather_dim = 0 : i64, {_groups(ranks)}"
    return w.emit("all_gather", (x,), shape_of(node), x.dtype, attributes)


@lowers("_c10d_functional.wait_tensor.default")
def _wait(w: Writer, node: Node, x: Value) -> Value:
    return x


def _only(node: Node, indices: Sequence[Value | None]) -> tuple[int, Value]:
    given = [(place, index) for place, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise G4Error(f"{node.name} has {len(given)} index tensors; one is lowered to StableHLO.")
    return given[0]
