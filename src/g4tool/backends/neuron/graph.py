"""A program as the checker sees it: operations with their types, read from StableHLO text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OP = re.compile(
    r'(?P<results>%[\w#:]+(?:, ?%[\w#:]+)*) = "?(?P<name>(?:stablehlo|chlo|mhlo)\.\w+)"?'
)
_TENSOR = re.compile(r"tensor<([^<>]*(?:<[^<>]*>)?[^<>]*)>")
_NAME = re.compile(r"%[\w]+")


@dataclass(frozen=True)
class TensorType:
    """Element type as StableHLO spells it (bf16, i32, f8E4M3FN); a dimension of None is dynamic."""

    dtype: str
    shape: tuple[int | None, ...] = ()

    @property
    def is_integer(self) -> bool:
        """Signed, unsigned or boolean."""
        return re.fullmatch(r"(u?i|si)\d+", self.dtype) is not None


@dataclass(frozen=True)
class Op:
    """One operation. `name` without its dialect; `operands` name the operations they come from.

    `text` has the attributes and nested regions.
    """

    name: str
    result: str
    operands: tuple[str, ...] = ()
    inputs: tuple[TensorType, ...] = ()
    outputs: tuple[TensorType, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Graph:
    """A program's operations in order; `by_result` finds the one that made a value."""

    name: str
    ops: tuple[Op, ...]
    by_result: dict[str, Op] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_result", {op.result: op for op in self.ops})

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)


def parse_tensor(text: str) -> TensorType:
    """`1x?x128xbf16`, the inside of tensor<…>, as a type."""
    *dims, dtype = (
        text.split(",")[0].strip().split("x") if "complex" not in text else _complex(text)
    )
    return TensorType(dtype, tuple(None if dim == "?" else int(dim) for dim in dims))


def read_stablehlo(name: str, text: str) -> Graph:
    """The operations of StableHLO text, jax's or g4's, one operation a line or over several.

    Operations of nested regions are not separate ones; they are in the `text` of their owner.
    """
    return Graph(name, tuple(_op(statement) for statement in _statements(text)))


def _complex(text: str) -> list[str]:
    before, _, _ = text.partition("complex<")
    return [*(dim for dim in before.split("x") if dim), text[text.index("complex<") :]]


def _statements(text: str) -> Iterator[str]:
    """Text of each operation outside regions: from its result to the end of its braces."""
    held: list[str] = []
    depth = 0
    for line in text.splitlines():
        if not held and not _OP.match(line.strip()):
            continue
        held.append(line.strip())
        depth += line.count("{") + line.count("(") - line.count("}") - line.count(")")
        if depth <= 0:
            yield " ".join(held)
            held, depth = [], 0


def _op(statement: str) -> Op:
    head = _OP.match(statement)
    assert head is not None
    _, _, types = statement.rpartition(" : ")
    given, arrow, made = types.partition("->")
    inputs = tuple(parse_tensor(each) for each in _TENSOR.findall(given))
    outputs = tuple(parse_tensor(each) for each in _TENSOR.findall(made)) if arrow else inputs
    body = statement[head.end() :]
    # The operands end where attributes, a region or the types begin.
    listed = re.split(r"[{<:]|dense|applies| dims | contracting", body.split("({")[0])[0]
    operands = tuple(_NAME.findall(listed))
    short = head["name"].rpartition(".")[2]
    result = _NAME.findall(head["results"])[0]
    if not arrow and inputs:
        inputs = inputs[:1] * max(1, len(operands))
        outputs = outputs[:1]
    return Op(short, result, operands, inputs, outputs, body)
