"""The account of every weight: what it became, what it takes, what it lost."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.errors import G4Error
from g4tool.quantize.options import QuantizeOptions
from g4tool.quantize.policy import EMBEDDING, HEAD, TABLE

# No weights that a scale can span reach it, whatever their distribution: rounding a group of 128 to
# nearest costs at most half a step each, sqrt(128 / 450) = 0.53 where two opposite outliers set the
# step, sqrt(0.65 / 1.65) = 0.63 with the zero at code 8.
_WORST_ERROR = 0.65

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorAccount:
    """One tensor of the bundle.

    `nbytes` with scales and zeros; `rel_error` the Frobenius norm of the difference to the source
    over the source's, as stored, 0 where kept; `off_grid` the share of groups that were not on the
    grid the source was trained on, None where there is no such grid.
    """

    name: str
    hf_name: str
    scheme: str
    group_size: int | None
    solver: str | None
    shape: tuple[int, ...]
    nbytes: int
    rel_error: float
    reason: str
    off_grid: float | None = None

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class SchemeTotal:
    """All tensors of one scheme."""

    tensors: int
    weights: int
    nbytes: int


@dataclass(frozen=True)
class AccountRow:
    """Tensors alike but for their layer: same kind, scheme, group, solver and reason."""

    kind: str
    layers: str
    scheme: str
    group_size: int | None
    tensors: int
    nbytes: int
    mean_error: float
    max_error: float
    reason: str


def to_json(accounts: Iterable[TensorAccount]) -> list[dict[str, Any]]:
    """The accounts as JSON values, one table a tensor."""
    return [{**vars(a), "shape": list(a.shape)} for a in accounts]


def from_json(values: Iterable[dict[str, Any]]) -> list[TensorAccount]:
    """The inverse of `to_json`."""
    return [TensorAccount(**{**value, "shape": tuple(value["shape"])}) for value in values]


def check_error(account: TensorAccount) -> None:
    """Raise G4Error for an error that no rounding explains: a scale could not hold the values."""
    # "not below" instead of "above": an error that is no number is the worst.
    if not account.rel_error <= _WORST_ERROR:
        raise G4Error(
            f"{account.name}: {account.scheme} does not hold its values, which are too small or "
            f"too large for a bf16 scale (relative error {account.rel_error:.3g}); "
            f"{keep_instead(account.name)}."
        )


def keep_instead(name: str) -> str:
    """What to do about a tensor that cannot be quantized, for a message."""
    return f"give it the scheme keep with a rule that matches '{re.escape(name)}'"


def check_complete(
    checkpoint: Checkpoint, accounts: Iterable[TensorAccount]
) -> dict[str, TensorAccount]:
    """The accounts by name. Raises G4Error when one of the checkpoint's tensors is missing."""
    by_name = {account.name: account for account in accounts}
    for name in (*checkpoint.names, *checkpoint.extras):
        if name not in by_name:
            raise G4Error(f"{name} is in the checkpoint but not in the bundle.")
    return by_name


def check_account(
    checkpoint: Checkpoint, options: QuantizeOptions, accounts: Iterable[TensorAccount]
) -> None:
    """Raise G4Error when a tensor is missing, or a matrix is in 16 bit that nothing exempts.

    It asks the rules again rather than the plan, so that a fault of the plan shows.
    """
    by_name = check_complete(checkpoint, accounts)
    for name in checkpoint.names:
        if by_name[name].scheme != "keep" or len(checkpoint.info(name).shape) < 2:
            continue
        if not _exempt(name, options):
            raise G4Error(
                f"{name} is left in 16 bit, and no rule exempts it; add a rule with the scheme "
                f"keep if that is meant."
            )


def _exempt(name: str, options: QuantizeOptions) -> bool:
    first = next((rule for rule in options.rules if re.search(rule.match, name)), None)
    if first is not None and first.scheme == "keep":
        return True
    if name in (EMBEDDING, TABLE) or ".router." in name:
        return True
    return options.head == "keep" if name == HEAD else options.scheme == "keep"


def totals(accounts: Iterable[TensorAccount]) -> dict[str, SchemeTotal]:
    """Totals by scheme, in the order of first appearance."""
    sums: dict[str, SchemeTotal] = {}
    for a in accounts:
        old = sums.get(a.scheme, SchemeTotal(0, 0, 0))
        sums[a.scheme] = SchemeTotal(
            old.tensors + 1, old.weights + a.weights, old.nbytes + a.nbytes
        )
    return sums


def bits_per_weight(accounts: Iterable[TensorAccount]) -> float:
    """Stored bits over weights, of all tensors."""
    accounts = list(accounts)
    weights = sum(a.weights for a in accounts)
    return 8 * sum(a.nbytes for a in accounts) / weights if weights else 0.0


def rounded_bits(accounts: Iterable[TensorAccount]) -> float:
    """`bits_per_weight` to six digits, as files state it."""
    return float(f"{bits_per_weight(accounts):.6g}")


def rows(accounts: Iterable[TensorAccount]) -> list[AccountRow]:
    """The accounts with layers folded into one row where nothing but the layer differs."""
    groups: dict[tuple[object, ...], list[TensorAccount]] = defaultdict(list)
    for a in accounts:
        kind = _LAYER.sub("", a.name).removesuffix(".weight")
        groups[kind, a.scheme, a.group_size, a.solver, a.reason].append(a)
    return [
        AccountRow(
            kind=str(kind),
            layers=_ranges(sorted(int(m[1]) for a in alike if (m := _LAYER.match(a.name)))),
            scheme=alike[0].scheme,
            group_size=alike[0].group_size,
            tensors=len(alike),
            nbytes=sum(a.nbytes for a in alike),
            mean_error=sum(a.rel_error for a in alike) / len(alike),
            max_error=max(a.rel_error for a in alike),
            reason=alike[0].reason,
        )
        for (kind, *_), alike in groups.items()
    ]


def lines(accounts: Iterable[TensorAccount]) -> list[str]:
    """The account as plain text: a table of `rows`, then the totals."""
    accounts = list(accounts)
    head = ("tensor", "layers", "scheme", "group", "MB", "mean error", "max error", "why")
    table = [head, *(_cells(row) for row in rows(accounts))]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head) - 1)]
    text = [
        "  ".join([*(c.ljust(w) for c, w in zip(cells, widths, strict=False)), cells[-1]]).rstrip()
        for cells in table
    ]
    for scheme, total in totals(accounts).items():
        text.append(f"{scheme}: {total.tensors} tensors, {total.nbytes / 1e6:,.1f} MB")
    text.append(f"{bits_per_weight(accounts):.2f} bits a weight")
    return text


def grid_notes(accounts: Iterable[TensorAccount]) -> list[str]:
    """A line on the groups that were not on the grid their checkpoint was trained on, if any."""
    off = [a for a in accounts if a.off_grid]
    if not off:
        return []
    worst = max(off, key=lambda a: a.off_grid or 0)
    return [
        f"{len(off)} tensors have groups that are not on the grid they were trained on and were "
        f"fitted instead, at most {100 * (worst.off_grid or 0):.2g} % of a tensor ({worst.name})."
    ]


def _cells(row: AccountRow) -> tuple[str, ...]:
    kept = row.scheme == "keep"
    return (
        row.kind,
        row.layers,
        row.scheme,
        str(row.group_size or ""),
        f"{row.nbytes / 1e6:,.2f}",
        "" if kept else f"{row.mean_error:.4f}",
        "" if kept else f"{row.max_error:.4f}",
        row.reason,
    )


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
