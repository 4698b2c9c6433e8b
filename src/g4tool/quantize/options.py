"""What a caller can ask of quantization."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from g4tool.errors import UsageError

Scheme = Literal["int4-hqq", "int4-rtn", "int4-sym", "int8", "keep"]
Solver = Literal["hqq", "rtn", "reference"]

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
SOLVERS: tuple[Solver, ...] = get_args(Solver)
GROUP_SIZES = (32, 64, 128, 256)

_QAT_SUFFIX = "qat-q4_0-unquantized"


@dataclass(frozen=True)
class Rule:
    """Tensors in whose canonical name the regular expression `match` is found get `scheme`.

    `group_size` in columns; None is the options' for 4 bit and the whole row for int8.
    """

    match: str
    scheme: Scheme
    group_size: int | None = None
    solver: Solver | None = None


@dataclass(frozen=True)
class QuantizeOptions:
    """The scheme of all matrices, and the rules for some; the first rule that matches wins.

    `head`: "tied" leaves a tied output head to the embedding as it is stored, a scheme stores the
    head as a tensor of its own. `layerwise`: one file for each decoder layer, else one in all.
    """

    scheme: Scheme = "int4-hqq"
    group_size: int = 32
    solver: Solver | None = None
    layerwise: bool = True
    head: Scheme | Literal["tied"] = "tied"
    rules: tuple[Rule, ...] = ()


def is_qat_source(model: str) -> bool:
    """Whether a Hub id or folder says by its name that the weights were trained for Q4_0."""
    return model.rstrip("/").lower().endswith(_QAT_SUFFIX)


def check_options(options: QuantizeOptions) -> None:
    """Raise UsageError for a value that does not exist or contradicts another one."""
    _check_choice("the options", options.scheme, options.group_size, options.solver)
    if options.head != "tied" and options.head not in SCHEMES:
        raise UsageError(f"head is {options.head!r}; give tied or one of {', '.join(SCHEMES)}.")
    for number, rule in enumerate(options.rules, start=1):
        where = f"rule {number} ({rule.match!r})"
        _check_choice(where, rule.scheme, rule.group_size, rule.solver)
        if rule.scheme == "keep" and rule.group_size:
            raise UsageError(f"{where} keeps tensors as they are, so it takes no group_size.")
        try:
            re.compile(rule.match)
        except re.error as error:
            raise UsageError(f"{where} is not a valid regular expression: {error}.") from None


def _check_choice(where: str, scheme: str, group: int | None, solver: str | None) -> None:
    if scheme not in SCHEMES:
        raise UsageError(f"{where} asks for the scheme {scheme!r}; give one of {SCHEMES}.")
    if group is not None and group not in GROUP_SIZES:
        raise UsageError(f"{where} asks for groups of {group}; give one of {GROUP_SIZES}.")
    if group == 256 and scheme.startswith("int4"):
        raise UsageError(f"{where} asks for 4 bit in groups of 256; give 32, 64 or 128.")
    if solver is None:
        return
    if solver not in SOLVERS:
        raise UsageError(f"{where} asks for the solver {solver!r}; give one of {SOLVERS}.")
    if scheme == "int4-rtn" and solver != "rtn":
        raise UsageError(f"{where} asks for int4-rtn, which is the solver rtn, not {solver}.")
    if not scheme.startswith(("int4-hqq", "int4-rtn")):
        raise UsageError(f"{where} asks for {scheme}, which takes no solver.")
