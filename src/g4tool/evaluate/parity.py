"""Whether two implementations are the same model: token ids, logits in fp32, and what is quantized.

Perplexity forgives what parity does not: a window that is off by one token changes a text's loss by
less than its noise.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from g4tool.evaluate.leaves import leaves, scheme

# Largest difference of a logit between two right implementations of one model in fp32. They differ
# by rounding alone, which is some 1e-5 for logits that the softcap keeps within 30.
TOLERANCE = 1e-3

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """One implementation: what makes logits [1, S, V] of ids int64 [1, S], and the ids it feeds."""

    logits: Logits
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Check:
    """One thing that must hold; `detail` is a sentence with the numbers."""

    name: str
    passed: bool
    detail: str


def parity(reference: Subject, candidate: Subject, tolerance: float = TOLERANCE) -> list[Check]:
    """The same ids, and the same logits for them.

    The logits are compared only where the ids are equal. `tolerance` is for models in fp32.
    """
    ids = _check_ids(reference.ids, candidate.ids)
    return [ids, _check_logits(reference, candidate, tolerance)] if ids.passed else [ids]


def quantized_check(model: nn.Module, exempt: Iterable[str] = ()) -> Check:
    """That no matrix of a quantized model is left in 16 bit.

    Embeddings, their tied head and routers may be; so may names in which one of the regular
    expressions `exempt` is found.
    """
    allowed = [re.compile(pattern) for pattern in (r"^embed_tokens", r"\.router\.", *exempt)]
    left = [
        name
        for name, module in leaves(model).items()
        if scheme(module) not in ("int4", "int8")
        and not any(pattern.search(f"{name}.weight") for pattern in allowed)
    ]
    if not left:
        return Check("quantized", True, "Every matrix that no rule exempts is quantized.")
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return Check("quantized", False, f"{left[0]}{more} left in 16 bit, which no rule exempts.")


def passed(checks: Iterable[Check]) -> bool:
    """Whether every check holds."""
    return all(check.passed for check in checks)


def _check_ids(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Check:
    if len(ours) != len(theirs):
        return Check("token ids", False, f"{len(ours)} sequences against {len(theirs)}.")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            where = min(len(a), len(b)) if same is None else same
            return Check("token ids", False, f"Sequence {number} differs from token {where} on.")
    return Check("token ids", True, f"{len(ours)} sequences are the same.")


@torch.inference_mode()
def _check_logits(reference: Subject, candidate: Subject, tolerance: float) -> Check:
    worst, where, agree, total = 0.0, (0, 0), 0, 0
    for number, row in enumerate(reference.ids):
        ids = torch.tensor([list(row)])
        ours, theirs = reference.logits(ids).float(), candidate.logits(ids).float()
        if ours.shape != theirs.shape:
            shapes = f"{list(ours.shape)} against {list(theirs.shape)}"
            return Check("logits", False, f"The logits' shapes differ: {shapes}.")
        far = (ours - theirs).abs().amax(-1)[0].nan_to_num(torch.inf)
        top = int(far.argmax())
        if float(far[top]) > worst:
            worst, where = float(far[top]), (number, top)
        agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        total += ours.shape[1]
    detail = (
        f"Largest difference {worst:.2e} (sequence {where[0]}, token {where[1]}; tolerance "
        f"{tolerance:.0e}); {agree} of {total} most likely tokens agree."
    )
    return Check("logits", worst <= tolerance, detail)
