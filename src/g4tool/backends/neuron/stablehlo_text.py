"""Writes StableHLO text: values, one operation a line, and the few compound ones used again.

64-bit integers become 32-bit: Neuron takes none, and ids and positions need none.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from g4tool.errors import G4Error

Number = int | float | bool

_DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i32",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "ui8",
    torch.bool: "i1",
}
# What a reduction starts from, by its operation.
_STARTS = {"add": 0.0, "maximum": -math.inf, "or": False}


@dataclass(frozen=True)
class Value:
    """An operand: its name in the text, shape and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> str:
        """As StableHLO spells it: tensor<2x3xf32>."""
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{self.dtype}>"


class Writer:
    """The body of a function, as it grows; `ranks` run it together."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.lines: list[str] = []
        self._count = 0

    def emit(
        self,
        operation: str,
        operands: Sequence[Value],
        shape: Sequence[int],
        dtype: str,
        attributes: str = "",
        region: str = "",
    ) -> Value:
        """One operation of the dialect with one result, in MLIR's generic form."""
        return self.emit_many(operation, operands, [(shape, dtype)], attributes, region)[0]

    def emit_many(
        self,
        operation: str,
        operands: Sequence[Value],
        results: Sequence[tuple[Sequence[int], str]],
        attributes: str = "",
        region: str = "",
    ) -> list[Value]:
        """One operation with several results."""
        made = [Value(self._name(), tuple(shape), dtype) for shape, dtype in results]
        self.lines.append(
            f'{", ".join(x.name for x in made)} = "stablehlo.{operation}"'
            f"({', '.join(x.name for x in operands)})"
            + (f" ({region})" if region else "")
            + (f" {{{attributes}}}" if attributes else "")
            + f" : ({', '.join(x.type for x in operands)})"
            + f" -> ({', '.join(x.type for x in made)})"
        )
        return made

    def constant(self, number: Number, dtype: str, shape: Sequence[int] = ()) -> Value:
        """`number` everywhere in a tensor of `shape`."""
        kind = Value("", tuple(shape), dtype).type
        return self.emit(
            "constant", (), shape, dtype, f"value = dense<{_literal(number, dtype)}> : {kind}"
        )

    def convert(self, x: Value, dtype: str) -> Value:
        """The same numbers as `dtype`."""
        return x if x.dtype == dtype else self.emit("convert", (x,), x.shape, dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """The same numbers in another shape of the same size."""
        return x if x.shape == tuple(shape) else self.emit("reshape", (x,), shape, x.dtype)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """`x` repeated to `shape`, dimensions aligned at the right."""
        if x.shape == tuple(shape):
            return x
        first = len(shape) - len(x.shape)
        return self.broadcast_in(x, shape, range(first, len(shape)))

    def broadcast_in(self, x: Value, shape: Sequence[int], dimensions: Sequence[int]) -> Value:
        """`x` repeated to `shape`, where its own dimensions are those at `dimensions`."""
        attributes = f"broadcast_dimensions = {array(dimensions)}"
        return self.emit("broadcast_in_dim", (x,), shape, x.dtype, attributes)

    def binary(self, operation: str, left: Value, right: Value) -> Value:
        """An elementwise operation on operands of one shape and type."""
        return self.emit(operation, (left, right), left.shape, left.dtype)

    def unary(self, operation: str, x: Value) -> Value:
        """An elementwise operation."""
        return self.emit(operation, (x,), x.shape, x.dtype)

    def reduce(self, operation: str, x: Value, dims: Sequence[int], keep: bool) -> Value:
        """Sum ("add"), largest ("maximum") or any ("or") over `dims`; floats are summed in f32."""
        wide = self.convert(x, "f32") if x.dtype in ("bf16", "f16") else x
        places = sorted(dim % len(x.shape) for dim in dims)
        kept = [size for place, size in enumerate(x.shape) if place not in places]
        start = self.constant(_STARTS[operation], wide.dtype)
        attributes = f"dimensions = {array(places)}"
        region = self.region(operation, wide.dtype)
        made = self.emit("reduce", (wide, start), kept, wide.dtype, attributes, region)
        if keep:
            made = self.reshape(
                made, [1 if i in places else size for i, size in enumerate(x.shape)]
            )
        return self.convert(made, x.dtype)

    def region(self, operation: str, dtype: str) -> str:
        """The block that combines two scalars with `operation`."""
        a, b, c = self._name(), self._name(), self._name()
        kind = f"tensor<{dtype}>"
        return (
            f"{{ ^bb0({a}: {kind}, {b}: {kind}): "
            f'{c} = "stablehlo.{operation}"({a}, {b}) : ({kind}, {kind}) -> {kind} '
            f'"stablehlo.return"({c}) : ({kind}) -> () }}'
        )

    def _name(self) -> str:
        self._count += 1
        return f"%v{self._count}"


def element_type(dtype: torch.dtype) -> str:
    """StableHLO's name of a dtype. Raises G4Error for one that is not lowered."""
    if dtype not in _DTYPES:
        raise G4Error(f"{dtype} has no StableHLO type here.")
    return _DTYPES[dtype]


def array(numbers: Sequence[int]) -> str:
    """An attribute that is a list of integers."""
    return f"array<i64{': ' if numbers else ''}{', '.join(str(n) for n in numbers)}>"


def _literal(number: Number, dtype: str) -> str:
    if dtype == "i1":
        return "true" if number else "false"
    if dtype.startswith(("i", "ui")):
        return str(int(number))
    if math.isfinite(number):
        return f"{float(number):.17e}"
    bits = struct.unpack(">I", struct.pack(">f", number))[0]
    if dtype == "f16":
        return f"0x{struct.unpack('>H', struct.pack('>e', number))[0]:04X}"
    # Non-finite numbers are spelled as bits; those of bf16 are the upper half of f32's.
    return {"f32": f"0x{bits:08X}", "bf16": f"0x{bits >> 16:04X}"}[dtype]
