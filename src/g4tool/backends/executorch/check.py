"""What ExecuTorch gets wrong without a word, refused before it is written.

- Integer remainders truncate towards zero there: -1 mod 8 is -1. Operands must be proved >= 0.
- An operator without a kernel is found out only when the program is loaded.
- Weight-only quantization, and asymmetric weights beside int8 activations, give garbage in XNNPACK.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from g4tool.errors import G4Error

Range = tuple[float, float]
_UNKNOWN: Range = (-torch.inf, torch.inf)


def check_remainders(name: str, program: ExportedProgram, longest: int) -> None:
    """Raise G4Error for an integer remainder whose operand is not proved to be >= 0.

    `longest`: the most tokens a cache holds, which bounds positions and lengths.
    """
    ranges: dict[fx.Node, Range] = {}
    for node in program.graph.nodes:
        ranges[node] = _range(node, ranges, longest)
        if _is_integer(node) and "remainder" in str(node.target):
            operand = node.args[0]
            low = ranges[operand][0] if isinstance(operand, fx.Node) else float(operand)
            if low < 0:
                raise G4Error(
                    f"{name}: {node.name} takes an integer remainder of {operand}, which may be "
                    f"negative; ExecuTorch truncates there and the result would be wrong."
                )


def missing_kernels(operators: Iterable[str], kernels: Collection[str]) -> list[str]:
    """Those of `operators` ("aten::sort.values") that are not among the runtime's `kernels`."""
    # Symbolic sizes and views are the executor's own, not in its list of kernels.
    own = ("executorch_prim::", "aten::sym_")
    return sorted(each for each in {*operators} - {*kernels} if not each.startswith(own))


def check_kernels(name: str, operators: Iterable[str], kernels: Collection[str]) -> None:
    """Raise G4Error naming every operator that the runtime has no kernel for."""
    missing = missing_kernels(operators, kernels)
    if missing:
        raise G4Error(
            f"{name}: the runtime has no kernel for {', '.join(missing)}, so the program could "
            f"not be loaded."
        )


def check_quantized(name: str, program: ExportedProgram) -> None:
    """Raise G4Error for quantized weights in a form that XNNPACK computes wrongly.

    It reads dequantize_affine of a weight as if zero points were absent, and takes it only beside
    activations that are quantized to int8 as the program runs.
    """
    constants = {
        spec.arg.name: program.state_dict.get(spec.target, program.constants.get(spec.target))
        for spec in program.graph_signature.input_specs
        if spec.target is not None and hasattr(spec.arg, "name")
    }
    for node in program.graph.nodes:
        if "dequantize_affine" not in str(node.target):
            continue
        source, zero = node.args[0], node.args[3] if len(node.args) > 3 else None
        if not isinstance(source, fx.Node) or _constant(source, constants) is None:
            continue  # activations
        if isinstance(zero, fx.Node):
            value = _constant(zero, constants)
            if value is None or bool((value != 0).any()):
                raise G4Error(
                    f"{name}: {source.name} is quantized with zero points, which XNNPACK ignores."
                )
        for user in node.users:
            feeds = [_producer(arg) for arg in user.args if isinstance(arg, fx.Node)]
            if not any("dequantize_affine" in target for target in feeds[:1]):
                raise G4Error(
                    f"{name}: {source.name} is quantized but what it is multiplied with is not, "
                    f"which XNNPACK computes wrongly."
                )


def _constant(node: fx.Node, constants: Mapping[str, Any]) -> Tensor | None:
    """The weight or buffer that a node stands for, or the part of a torchao weight; else None."""
    if "access_subclass_inner_tensor" in str(node.target):
        whole, part = node.args
        assert isinstance(whole, fx.Node)
        found = getattr(_constant(whole, constants), str(part), None)
    else:
        found = constants.get(node.name)
    return found if isinstance(found, Tensor) else None


def _producer(node: fx.Node) -> str:
    while node.op == "call_function" and any(
        word in str(node.target) for word in ("view", "reshape", "squeeze", "permute", "transpose")
    ):
        node = node.args[0]  # type: ignore[assignment]
    return str(node.target)


def _is_integer(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return not value.dtype.is_floating_point
    return isinstance(value, int | torch.SymInt)


def _range(node: fx.Node, ranges: dict[fx.Node, Range], longest: int) -> Range:
    """The least and the greatest value an integer node can have, as far as it is known."""
    if not _is_integer(node):
        return _UNKNOWN
    if node.op == "placeholder":
        return (0, longest)
    if node.op != "call_function":
        return _UNKNOWN
    operands: list[Range] = []

    def collect(arg: fx.Node) -> fx.Node:
        operands.append(ranges.get(arg, _UNKNOWN))
        return arg

    map_arg((node.args, node.kwargs), collect)
    target = str(node.target).removeprefix("aten.").partition(".")[0]
    if target == "sym_size":
        return (0, longest)
    if target == "arange":
        ends = [_of(arg, ranges) for arg in node.args if not isinstance(arg, torch.dtype)]
        start, end = ((0.0, 0.0), ends[0]) if len(ends) == 1 else (ends[0], ends[1])
        return (start[0], max(start[0], end[1] - 1))
    if target in ("add", "sub", "mul") or "built-in function" in target:
        return _arithmetic(str(node.target), [_of(arg, ranges) for arg in node.args[:2]])
    if target == "remainder":
        divisor = _of(node.args[1], ranges)
        return (0, divisor[1] - 1) if divisor[0] > 0 else _UNKNOWN
    if target == "clamp":
        low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
        inside = _of(node.args[0], ranges)
        bound = float(low) if isinstance(low, int | float) else -torch.inf
        return (max(inside[0], bound), max(inside[1], bound))
    if target in _SAME_VALUES and operands:
        return (min(low for low, _ in operands), max(high for _, high in operands))
    return _UNKNOWN


_SAME_VALUES = {
    "alias",
    "cat",
    "clone",
    "expand",
    "select",
    "slice",
    "squeeze",
    "_to_copy",
    "to",
    "unsqueeze",
    "view",
}


def _of(arg: object, ranges: dict[fx.Node, Range]) -> Range:
    if isinstance(arg, fx.Node):
        return ranges[arg]
    return (float(arg), float(arg)) if isinstance(arg, int | float) else _UNKNOWN


def _arithmetic(target: str, operands: list[Range]) -> Range:
    (a, b), (c, d) = operands
    if "add" in target:
        return (a + c, b + d)
    if "sub" in target:
        return (a - d, b - c)
    if "mul" in target and not any(abs(value) == torch.inf for value in (a, b, c, d)):
        corners = [a * c, a * d, b * c, b * d]
        return (min(corners), max(corners))
    return _UNKNOWN
