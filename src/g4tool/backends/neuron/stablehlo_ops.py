"""How each ATen operation of an exported text model is said in StableHLO.

An entry takes the writer, the node (for its result's shape and dtype) and the operands, with the
values already written in place of nodes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from g4tool.backends.neuron.stablehlo_text import Number, Value, Writer, array, element_type
from g4tool.errors import G4Error

Lowering = Callable[..., Any]
LOWERINGS: dict[str, Lowering] = {}

_BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "pow": "power",
    "remainder": "remainder",
    "maximum": "maximum",
    "minimum": "minimum",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "logical_and": "and",
    "logical_or": "or",
}
_COMPARE = ("eq", "ne", "ge", "gt", "le", "lt")
_UNARY = {
    "cos": "cosine",
    "sin": "sine",
    "tanh": "tanh",
    "exp": "exponential",
    "rsqrt": "rsqrt",
    "sqrt": "sqrt",
    "neg": "negate",
    "logical_not": "not",
    "bitwise_not": "not",
}
_SAME = ("clone", "alias", "detach", "lift_fresh_copy")


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Enters a function under the names of the operations it lowers."""

    def enter(function: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    return enter


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a node's result, which is static."""
    return tuple(int(size) for size in node.meta["val"].shape)


def dtype_of(node: Node) -> str:
    """The element type of a node's result."""
    return element_type(node.meta["val"].dtype)


def operand(w: Writer, x: Value | Number, shape: Sequence[int], dtype: str) -> Value:
    """A tensor or a number as a tensor of `shape` and `dtype`."""
    if isinstance(x, Value):
        return w.broadcast(w.convert(x, dtype), shape)
    return w.constant(x, dtype, shape)


def _binary(operation: str) -> Lowering:
    def lower(w: Writer, node: Node, left: Any, right: Any, alpha: Number = 1) -> Value:
        if alpha != 1:
            raise G4Error(f"{node.name} has a factor, which is not lowered to StableHLO.")
        shape, dtype = shape_of(node), dtype_of(node)
        return w.binary(operation, operand(w, left, shape, dtype), operand(w, right, shape, dtype))

    return lower


def _compare(direction: str) -> Lowering:
    def lower(w: Writer, node: Node, left: Value, right: Any) -> Value:
        shape = shape_of(node)
        given: Any = [x.meta["val"] if isinstance(x, Node) else x for x in node.args]
        dtype = element_type(torch.result_type(*given))
        a, b = operand(w, left, shape, dtype), operand(w, right, shape, dtype)
        attributes = f"comparison_direction = #stablehlo<comparison_direction {direction.upper()}>"
        return w.emit("compare", (a, b), shape, "i1", attributes)

    return lower


def _unary(operation: str) -> Lowering:
    def lower(w: Writer, node: Node, x: Value) -> Value:
        return w.unary(operation, w.convert(x, dtype_of(node)))

    return lower


for _name, _operation in _BINARY.items():
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", f"aten.{_name}.default")(
        _binary(_operation)
    )
for _name in _COMPARE:
    lowers(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")(_compare(_name))
for _name, _operation in _UNARY.items():
    lowers(f"aten.{_name}.default")(_unary(_operation))


@lowers(*(f"aten.{name}.default" for name in _SAME))
def _same(w: Writer, node: Node, x: Value, **_: Any) -> Value:
    return x


@lowers("aten._assert_tensor_metadata.default")
def _nothing(w: Writer, node: Node, *_: Any, **__: Any) -> None:
    return None


@lowers("aten._to_copy.default")
def _convert(w: Writer, node: Node, x: Value, **_: Any) -> Value:
    return w.convert(x, dtype_of(node))


@lowers("aten.reciprocal.default")
def _reciprocal(w: Writer, node: Node, x: Value) -> Value:
    return w.binary("divide", w.constant(1.0, x.dtype, x.shape), x)


@lowers("aten.pow.Tensor_Scalar")
def _power(w: Writer, node: Node, x: Value, exponent: Number) -> Value:
    if exponent == 2:
        return w.binary("multiply", x, x)
    return w.binary("power", x, w.constant(exponent, x.dtype, x.shape))


@lowers("aten.gelu.default")
def _gelu(w: Writer, node: Node, x: Value, approximate: str = "none") -> Value:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), in f32."""
    if approximate != "tanh":
        raise G4Error(f"{node.name}: only GELU's tanh form is lowered to StableHLO.")

    def number(value: float) -> Value:
        return w.constant(value, "f32", x.shape)

    wide = w.convert(x, "f32")
    cube = w.binary("multiply", w.binary("multiply", wide, wide), wide)
    inner = w.binary("add", wide, w.binary("multiply", cube, number(0.044715)))
    root = w.unary("tanh", w.binary("multiply", inner, number(math.sqrt(2 / math.pi))))
    half = w.binary("multiply", wide, number(0.5))
    return w.convert(w.binary("multiply", half, w.binary("add", root, number(1.0))), x.dtype)


@lowers("aten.clamp.default")
def _clamp(
    w: Writer, node: Node, x: Value, low: Number | None = None, high: Number | None = None
) -> Value:
    for operation, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            x = w.binary(operation, x, w.constant(bound, x.dtype, x.shape))
    return x


@lowers("aten.where.self")
def _where(w: Writer, node: Node, mask: Value, left: Any, right: Any) -> Value:
    shape, dtype = shape_of(node), dtype_of(node)
    operands = (
        w.broadcast(mask, shape),
        operand(w, left, shape, dtype),
        operand(w, right, shape, dtype),
    )
    return w.emit("select", operands, shape, dtype)


@lowers("aten.full.default", "aten.full_like.default")
def _full(w: Writer, node: Node, _: Any, number: Number, **__: Any) -> Value:
    return w.constant(number, dtype_of(node), shape_of(node))


@lowers("aten.scalar_tensor.default")
def _scalar(w: Writer, node: Node, number: Number, **_: Any) -> Value:
    return w.constant(number, dtype_of(node))


@lowers("aten.arange.start_step")
def _arange(w: Writer, node: Node, start: Number, end: Number, step: Number = 1, **_: Any) -> Value:
    shape, dtype = shape_of(node), dtype_of(node)
    counted = w.emit("iota", (), shape, dtype, "iota_dimension = 0 : i64")
    if step != 1:
        counted = w.binary("multiply", counted, w.constant(step, dtype, shape))
    if start != 0:
        counted = w.binary("add", counted, w.constant(start, dtype, shape))
    return counted


@lowers(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dims",
    "aten.squeeze.dim",
)
def _reshape(w: Writer, node: Node, x: Value, *_: Any) -> Value:
    return w.reshape(x, shape_of(node))


@lowers("aten.permute.default")
def _transpose(w: Writer, node: Node, x: Value, order: Sequence[int]) -> Value:
    places = [place % len(x.shape) for place in order]
    return w.emit("transpose", (x,), shape_of(node), x.dtype, f"permutation = {array(places)}")


@lowers("aten.expand.default")
def _expand(w: Writer, node: Node, x: Value, *_: Any) -> Value:
    return w.broadcast(x, shape_of(node))


@lowers("aten.cat.default")
def _cat(w: Writer, node: Node, parts: Sequence[Value], dim: int = 0) -> Value:
    shape = shape_of(node)
    attributes = f"dimension = {dim % len(shape)} : i64"
    return w.emit("concatenate", tuple(parts), shape, parts[0].dtype, attributes)


def cut(w: Writer, x: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    """x[..., start:stop:step, ...] along one dimension."""
    place = dim % len(x.shape)
    starts, stops, steps = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    starts[place], stops[place], steps[place] = start, stop, step
    shape = list(x.shape)
    shape[place] = -(-(stop - start) // step)
    attributes = (
        f"start_indices = {array(starts)}, limit_indices = {array(stops)}, strides = {array(steps)}"
    )
    return w.emit("slice", (x,), shape, x.dtype, attributes)


@lowers("aten.split_with_sizes.default")
def _split(w: Writer, node: Node, x: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [cut(w, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


@lowers("<built-in function getitem>")
def _item(w: Writer, node: Node, values: Sequence[Value], index: int) -> Value:
    return values[index]


@lowers("aten.select.int")
def _select(w: Writer, node: Node, x: Value, dim: int, index: int) -> Value:
    place = index % x.shape[dim % len(x.shape)]
    return w.reshape(cut(w, x, dim, place, place + 1), shape_of(node))


@lowers("aten.slice.Tensor")
def _slice(
    w: Writer,
    node: Node,
    x: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    size = x.shape[dim % len(x.shape)]
    first, last, _ = slice(start, end).indices(size)
    return cut(w, x, dim, first, last, step)
