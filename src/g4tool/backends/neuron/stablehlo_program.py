"""An exported program as a StableHLO module: a text, and what its arguments and results are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from g4tool.backends.neuron import stablehlo_sums  # enters its operations in LOWERINGS
from g4tool.backends.neuron.stablehlo_ops import LOWERINGS, dtype_of, shape_of
from g4tool.backends.neuron.stablehlo_text import Value, Writer
from g4tool.errors import G4Error

__all__ = ["Graph", "lower", "stablehlo_sums"]

_KINDS = {
    InputKind.PARAMETER: "weight",
    InputKind.BUFFER: "weight",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


@dataclass(frozen=True)
class Graph:
    """A module's text; `arguments` and `results` describe main's, in order.

    An argument has name, kind ("weight", "cache", "constant", "rank", "input"), shape and dtype; a
    result has name, shape and dtype, and where it is a changed cache, the place of the argument
    that it replaces.
    """

    text: str
    arguments: list[dict[str, Any]]
    results: list[dict[str, Any]]


def lower(program: ExportedProgram, ranks: int = 1, rename: Callable[[str], str] = str) -> Graph:
    """The program, decomposed to core ATen first, as one of `ranks` runs it; shapes are static.

    `rename` gives weights and caches the names they are described by. Raises G4Error naming the
    first operation that has no entry in LOWERINGS.
    """
    program = program.run_decompositions()
    signature = program.graph_signature
    changed = signature.buffers_to_mutate
    w = Writer(ranks)
    values: dict[Node, Any] = {}
    arguments: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    kinds = {spec.arg.name: spec for spec in signature.input_specs}
    returned: list[Value] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            name = spec.target or node.name
            kind = "cache" if name in changed.values() else _kind(spec.kind, name)
            value = Value(f"%arg{len(arguments)}", shape_of(node), dtype_of(node))
            values[node] = value
            arguments.append(_described(rename(name), value, kind=kind))
        elif node.op == "output":
            returned = [values[out] for out in node.args[0]]
        else:
            values[node] = _lowered(w, node, values)
    places = {argument["name"]: place for place, argument in enumerate(arguments)}
    for value, spec in zip(returned, signature.output_specs, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            name = rename(str(spec.target))
            results.append(_described(name, value, replaces=places[name]))
        else:
            results.append(_described(spec.arg.name, value))
    return Graph(_module(w, arguments, returned, ranks), arguments, results)


def _lowered(w: Writer, node: Node, values: dict[Node, Any]) -> Any:
    name = str(node.target)
    if name not in LOWERINGS:
        raise G4Error(f"{name} ({node.name}) has no lowering to StableHLO.")
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda x: values[x])
    return LOWERINGS[name](w, node, *arguments[0], **arguments[1])


def _kind(kind: InputKind, name: str) -> str:
    return "rank" if name.endswith(".rank") else _KINDS[kind]


def _described(name: str, value: Value, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(value.shape), "dtype": value.dtype, **more}


def _module(w: Writer, arguments: list[dict[str, Any]], returned: list[Value], ranks: int) -> str:
    given = [
        Value(f"%arg{place}", tuple(argument["shape"]), argument["dtype"])
        for place, argument in enumerate(arguments)
    ]
    taken = ", ".join(f"{value.name}: {value.type}" for value in given)
    types = ", ".join(value.type for value in returned)
    names = [
        f"  // {v.name} {a['kind']} {a['name']}" for v, a in zip(given, arguments, strict=True)
    ]
    return "\n".join(
        [
            "// For inspection: no Neuron compiler has taken this text.",
            "module @main attributes {mhlo.num_partitions = 1 : i32, "
            f"mhlo.num_replicas = {ranks} : i32}} {{",
            *names,
            f"  func.func public @main({taken}) -> ({types}) {{",
            *(f"    {line}" for line in w.lines),
            f"    return {', '.join(value.name for value in returned)} : {types}",
            "  }",
            "}",
            "",
        ]
    )
