"""The Neuron compiler's published rules on programs: one function a rule, each with its codes.

https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/index.html, read at
2026-07. Only what the program shows is checked; `neuronx-cc list-operators --framework XLA` is the
authority on operations.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from g4tool.backends.neuron.findings import Finding, Level
from g4tool.backends.neuron.graph import Graph, Op

_CUSTOM_CALLS = {
    *("AwsNeuronErf", "AwsNeuronGelu", "AwsNeuronGeluApprxTanh", "AwsNeuronGeluBackward"),
    *("AwsNeuronSilu", "AwsNeuronSiluBackward", "AwsNeuronRmsNorm", "AwsNeuronSoftmax"),
    *("AwsNeuronSoftmaxBackward", "AwsNeuronCollectiveMatmul", "AwsNeuronIntMatmult"),
    *("AwsNeuronArgMax", "AwsNeuronArgMin", "AwsNeuronTopK", "AwsNeuronDropoutMaskV1"),
    *("AwsNeuronCustomNativeKernel", "AwsNeuronCustomOp", "AwsNeuronDevicePrint"),
    *("ResizeNearest", "ResizeBilinear", "ResizeNearestGrad", "AwsNeuronTransferWithStaticRing"),
    *("AwsNeuronModuleMarkerStart-Forward", "AwsNeuronModuleMarkerStart-Backward"),
    *("AwsNeuronModuleMarkerEnd-Forward", "AwsNeuronModuleMarkerEnd-Backward"),
    *("AwsNeuronLNCShardingConstraint", "NeuronBoundaryMarker-Start", "NeuronBoundaryMarker-End"),
}
# The one that the published text names; the list of those supported comes with the compiler.
_UNSUPPORTED = {"triangular_solve"}
_REDUCING = re.compile(r"\.(add|maximum|minimum|multiply|and|or)\b")
_WIDE = {"i32", "i64", "ui32", "ui64", "si32", "si64"}
# The limit on instructions is not published, nor how many an operation becomes: a rough guess.
_MANY_OPS = 100_000
_KERNEL_WIDTH = 4096


@dataclass(frozen=True)
class Rule:
    """`finds` gives each offending place, with what is wrong there. `targets`: None is all."""

    code: str
    level: Level
    finds: Callable[[Graph], Iterator[tuple[str, str]]]
    targets: frozenset[str] | None = None


def check_graph(graph: Graph, target: str) -> list[Finding]:
    """What the compiler would say of a program, each code once a program."""
    found = []
    for rule in RULES:
        if rule.targets is not None and target not in rule.targets:
            continue
        places = list(rule.finds(graph))
        if places:
            where, message = places[0]
            more = f" (and at {len(places) - 1} more places)" if len(places) > 1 else ""
            found.append(
                Finding(f"NCC_{rule.code}", rule.level, f"{graph.name}: {where}", message + more)
            )
    return found


def _ops(
    wanted: Callable[[Op], bool], message: str
) -> Callable[[Graph], Iterator[tuple[str, str]]]:
    def finds(graph: Graph) -> Iterator[tuple[str, str]]:
        for op in graph:
            if wanted(op):
                yield f"{op.result} = {op.name}", message

    return finds


def _types(
    wanted: Callable[[str], bool], message: str
) -> Callable[[Graph], Iterator[tuple[str, str]]]:
    return _ops(lambda op: any(wanted(t.dtype) for t in (*op.inputs, *op.outputs)), message)


def _is_dynamic(op: Op) -> bool:
    return any(None in each.shape for each in (*op.inputs, *op.outputs))


def _is_unknown_call(op: Op) -> bool:
    if op.name != "custom_call":
        return False
    named = re.search(r'call_target_name = "([^"]+)"|@([\w.$-]+)', op.text)
    target = (named[1] or named[2]) if named else ""
    return target not in _CUSTOM_CALLS


def _integer(name: str, *, wide: bool = True) -> Callable[[Op], bool]:
    def wanted(op: Op) -> bool:
        types = op.inputs[:1] or op.outputs[:1]
        return op.name == name and any(
            each.dtype in _WIDE if wide else each.is_integer for each in types
        )

    return wanted


def _dots_64(op: Op) -> bool:
    return op.name in ("dot", "dot_general") and any(t.dtype in ("i64", "ui64") for t in op.inputs)


def _dots_32(op: Op) -> bool:
    return op.name in ("dot", "dot_general") and any(t.dtype in ("i32", "ui32") for t in op.inputs)


def _integer_scatter(op: Op) -> bool:
    return _integer("scatter", wide=False)(op) and _REDUCING.search(op.text) is not None


def _bad_rng(op: Op) -> bool:
    return op.name == "rng_bit_generator" and "DEFAULT" not in op.text


def _numbers(op: Op, attribute: str) -> list[int]:
    """The numbers of `lhs_dilation = array<i64: 2, 2>`, or of `lhs_dilate = [2, 2]`."""
    found = re.search(rf"\b{attribute}\s*=\s*(?:array<i64:?([^>]*)>|\[([^\]]*)\])", op.text)
    return [int(n) for n in re.findall(r"-?\d+", found[1] or found[2] or "")] if found else []


def _above_one(op: Op, *attributes: str) -> bool:
    return any(n > 1 for attribute in attributes for n in _numbers(op, attribute))


def _dilated_twice(op: Op) -> bool:
    return (
        op.name == "convolution"
        and _above_one(op, "lhs_dilation", "lhs_dilate")
        and _above_one(op, "rhs_dilation", "rhs_dilate")
    )


def _dilated_and_strided(op: Op) -> bool:
    return (
        op.name == "convolution"
        and _above_one(op, "lhs_dilation", "lhs_dilate")
        and _above_one(op, "window_strides", "stride")
    )


def _large_u64(op: Op) -> bool:
    if op.name != "constant" or not any(t.dtype == "ui64" for t in op.outputs):
        return False
    values = op.text.partition("dense<")[2].partition(">")[0]
    return any(int(number) >= 2**32 for number in re.findall(r"\d+", values))


def _outside(kind: str) -> Callable[[Graph], Iterator[tuple[str, str]]]:
    """Indices made by an iota that is longer than what they point into."""

    def finds(graph: Graph) -> Iterator[tuple[str, str]]:
        for op in graph:
            if op.name != kind or len(op.operands) < 2 or not op.inputs:
                continue
            axes = _numbers(
                op, "start_index_map" if kind == "gather" else "scatter_dims_to_operand_dims"
            )
            source = _behind_reshapes(graph, op.operands[1])
            if source is None or source.name != "iota" or len(axes) != 1:
                continue
            size, count = (
                op.inputs[0].shape[axes[0]],
                max((n for n in source.outputs[0].shape if n is not None), default=0),
            )
            if size is not None and count > size:
                yield (
                    f"{op.result} = {op.name}",
                    f"indices run to {count - 1}, but the dimension has {size} entries; check "
                    "that positions fit the tables",
                )

    return finds


def _behind_reshapes(graph: Graph, name: str) -> Op | None:
    op = graph.by_result.get(name)
    while op is not None and op.name in ("reshape", "broadcast_in_dim", "convert"):
        op = graph.by_result.get(op.operands[0]) if op.operands else None
    return op


def _too_many(graph: Graph) -> Iterator[tuple[str, str]]:
    if len(graph.ops) > _MANY_OPS:
        yield (
            f"{len(graph.ops)} operations",
            "the compiler may generate more instructions than it allows; use more ranks",
        )


def _wide_kernel(op: Op) -> bool:
    return (
        op.name == "custom_call"
        and "AwsNeuronCustomNativeKernel" in op.text
        and "mlp" in op.text.lower()
        and any((t.shape[-1] or 0) > _KERNEL_WIDTH for t in op.inputs[1:] if t.shape)
    )


_FLOAT = "cast to a floating-point type before it"
RULES: tuple[Rule, ...] = (
    Rule("EMOD025", "error", _ops(_is_dynamic, "a dimension is dynamic; give fixed lengths")),
    Rule("EVRF004", "error", _types(lambda d: "complex" in d, "complex numbers are not supported")),
    Rule(
        "EVRF005",
        "error",
        _types(lambda d: d.startswith("f8") and "FNUZ" in d, "this 8-bit float is not supported"),
    ),
    Rule(
        "EVRF051",
        "error",
        _types(lambda d: d == "f8E4M3FN", "f8E4M3FN is native from Trainium3 on only"),
        frozenset({"inf2", "trn1", "trn2"}),
    ),
    Rule("EVRF006", "error", _ops(_bad_rng, "only the default random algorithm is supported")),
    Rule("EVRF013", "error", _ops(_integer("top_k"), f"top-k of integers: {_FLOAT}")),
    Rule("EHCA005", "error", _ops(_is_unknown_call, "the compiler does not know this call")),
    Rule(
        "EVRF016",
        "error",
        _ops(_integer_scatter, f"a scatter that combines integers or booleans: {_FLOAT}"),
    ),
    Rule(
        "EVRF017",
        "error",
        _ops(
            lambda op: op.name == "reduce_window" and _above_one(op, "base_dilations"),
            "base dilation above 1",
        ),
    ),
    Rule(
        "EVRF018",
        "error",
        _ops(
            lambda op: op.name == "reduce_window" and _above_one(op, "window_dilations"),
            "window dilation above 1",
        ),
    ),
    Rule(
        "EVRF019",
        "error",
        _ops(
            lambda op: op.name == "reduce_window" and len(op.inputs) != 2,
            "it takes one input and one initial value",
        ),
    ),
    Rule(
        "EVRF035",
        "error",
        _ops(lambda op: _dots_64(op) or _dots_32(op), f"a product of integers: {_FLOAT}"),
        frozenset({"trn2", "trn3"}),
    ),
    Rule(
        "EVRF035",
        "error",
        _ops(_dots_64, f"a product of 64-bit integers: {_FLOAT}"),
        frozenset({"inf2", "trn1"}),
    ),
    Rule(
        "EVRF061", "error", _ops(_integer("all_reduce"), f"a sum of integers over ranks: {_FLOAT}")
    ),
    Rule(
        "EVRF063",
        "error",
        _ops(_integer("reduce_scatter"), f"a sum of integers over ranks: {_FLOAT}"),
    ),
    Rule(
        "EVRF062",
        "error",
        _ops(
            lambda op: op.name == "power" and any(t.dtype == "i64" for t in op.inputs),
            "a power of 64-bit integers; use 32 bits",
        ),
    ),
    Rule("ESFH002", "error", _ops(_large_u64, "an unsigned constant of more than 32 bits")),
    Rule("EVRF056", "error", _outside("gather")),
    Rule("EVRF031", "error", _outside("scatter")),
    Rule("EVRF010", "error", _ops(_dilated_twice, "dilation of both input and kernel")),
    Rule("EVRF011", "error", _ops(_dilated_and_strided, "stride with a dilated input")),
    Rule("EBIR023", "error", _ops(_wide_kernel, "an MLP kernel wider than 4096; use more ranks")),
    Rule(
        "EUOC002",
        "error",
        _ops(lambda op: op.name in _UNSUPPORTED, "the operation is not supported"),
    ),
    Rule("EBVF030", "warning", _too_many),
)
