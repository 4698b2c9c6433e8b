"""Bits for each matrix: the least total KL that a size allows, as rules that anyone can rerun."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.errors import UsageError
from g4tool.evaluate.inmemory import stored_bytes
from g4tool.evaluate.sensitivity import Choice, Matrix
from g4tool.quantize.options import QuantizeOptions, Rule, Scheme
from g4tool.quantize.policy import plan

_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")

Key = tuple[Scheme, int | None]


@dataclass(frozen=True)
class Assignment:
    """The choice for each matrix; `nbytes` and `weights` are of the whole text model.

    `kl` is what the single measurements add up to, in nats a token.
    """

    options: QuantizeOptions
    chosen: tuple[Choice, ...]
    nbytes: int
    weights: int
    kl: float

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights of the text model."""
        return 8 * self.nbytes / self.weights


def assign(
    checkpoint: Checkpoint,
    matrices: Sequence[Matrix],
    *,
    bits_per_weight: float | None = None,
    nbytes: int | None = None,
) -> Assignment:
    """The assignment for a size of the text model, in bits a weight or bytes: give one of the two.

    Each matrix starts at its smallest choice; then the step that saves most KL a byte is taken, as
    long as one fits. Steps lead along the lower convex hull of a matrix's choices, so that no
    cheap small step hides a worthwhile large one. Raises UsageError for a size that cannot be
    reached.
    """
    by_name = {matrix.name: matrix for matrix in matrices}
    kept = [
        p for p in plan(checkpoint, QuantizeOptions(scheme="keep")) if p.name in checkpoint.names
    ]
    fixed = sum(stored_bytes(item) for item in kept if item.name not in by_name)
    weights = sum(math.prod(item.shape) for item in kept)
    if (bits_per_weight is None) == (nbytes is None):
        raise UsageError("give a target in bits a weight or in bytes, and not both.")
    budget = nbytes if nbytes is not None else int((bits_per_weight or 0.0) * weights / 8)
    hulls = {matrix.name: hull(matrix.choices) for matrix in matrices}
    place = dict.fromkeys(hulls, 0)
    size = fixed + sum(steps[0].nbytes for steps in hulls.values())
    if size > budget:
        raise UsageError(
            f"the target is {8 * budget / weights:.3f} bits a weight ({budget:,} bytes), but the "
            f"smallest this model can be is {8 * size / weights:.3f} ({size:,} bytes): embeddings "
            f"are never below 8 bit."
        )
    while True:
        open_steps = [
            (_slope(steps[place[name]], steps[place[name] + 1]), name)
            for name, steps in hulls.items()
            if place[name] + 1 < len(steps)
            and size + steps[place[name] + 1].nbytes - steps[place[name]].nbytes <= budget
        ]
        if not open_steps:
            break
        _, name = max(open_steps)
        steps = hulls[name]
        size += steps[place[name] + 1].nbytes - steps[place[name]].nbytes
        place[name] += 1
    chosen = tuple(hulls[matrix.name][place[matrix.name]] for matrix in matrices)
    kl = sum(choice.kl for choice in chosen)
    return Assignment(options_for(chosen), chosen, size, weights, kl)


def hull(choices: Iterable[Choice]) -> list[Choice]:
    """The choices on the lower convex hull of KL over size, from the smallest on."""
    result: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.nbytes, c.kl)):
        if result and choice.kl >= result[-1].kl:
            continue
        while len(result) > 1 and _slope(result[-2], result[-1]) <= _slope(result[-1], choice):
            result.pop()
        result.append(choice)
    return result


def options_for(chosen: Sequence[Choice]) -> QuantizeOptions:
    """Options whose rules give each matrix its choice: the commonest 4 bit one is the default."""
    keys = [_key(choice) for choice in chosen]
    fours = Counter(key for key in keys if key[0].startswith("int4"))
    (scheme, group), _ = fours.most_common(1)[0] if fours else (("int4-hqq", 32), 0)
    kinds: dict[tuple[str, Key], list[str]] = defaultdict(list)
    for choice, key in zip(chosen, keys, strict=True):
        if key != (scheme, group):
            found = _LAYER.match(choice.plan.name)
            number, kind = found.groups() if found else ("", choice.plan.name)
            kinds[kind, key].append(number)
    rules = tuple(
        Rule(_pattern(kind, numbers), scheme, group)
        for (kind, (scheme, group)), numbers in kinds.items()
    )
    return QuantizeOptions(scheme=scheme, group_size=group or 32, rules=rules)


def _key(choice: Choice) -> Key:
    # int8 is one group a row here, which a rule says by naming none.
    item = choice.plan
    return item.scheme, item.group_size if item.scheme.startswith("int4") else None


def _pattern(kind: str, numbers: list[str]) -> str:
    if numbers == [""]:
        return f"^{re.escape(kind)}$"
    some = numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"
    return rf"^layers\.{some}\.{re.escape(kind)}$"


def _slope(a: Choice, b: Choice) -> float:
    return (a.kl - b.kl) / (b.nbytes - a.nbytes)
