"""The choice of experts for one token in Triton: two launches in place of some twenty."""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(
    x,
    weight,
    scale,
    scores,
    dim,
    eps,
    root,
    BLOCK: tl.constexpr,
):
    """One expert's score; each program normalises the token again."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    kind = x.dtype.element_ty
    w = tl.load(weight + expert * dim + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y = (y * (1.0 / tl.sqrt_rn(tl.sum(y * y, 0) / dim + eps))).to(kind).to(tl.float32)
    y = (y * tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    y = (y * root).to(kind).to(tl.float32)
    tl.store(scores + expert, tl.sum(y * w, 0).to(kind).to(tl.float32))


@triton.jit
def _choice(
    scores, per_expert, weights, index, experts, TOP: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The TOP likeliest experts, best first, and their shares."""
    number = tl.arange(0, EXPERTS)
    score = tl.load(scores + number, mask=number < experts, other=-float("inf"))
    likely = tl.exp(score - tl.max(score, 0))
    likely = likely / tl.sum(likely, 0)
    left = tl.where(number < experts, likely, -1.0)
    rank = tl.full((EXPERTS,), TOP, tl.int32)
    for place in tl.static_range(TOP):
        best = tl.argmax(left, 0)
        rank = tl.where(number == best, place, rank)
        left = tl.where(number == best, -1.0, left)
    picked = rank < TOP
    share = likely / tl.sum(tl.where(picked, likely, 0.0), 0)
    share *= tl.load(per_expert + number, mask=picked, other=0.0).to(tl.float32)
    tl.store(weights + rank, share, mask=picked)
    tl.store(index + rank, number.to(tl.int64), mask=picked)


def route(
    x: Tensor, weight: Tensor, scale: Tensor, per_expert: Tensor, eps: float, root: float, top: int
) -> tuple[Tensor, Tensor]:
    """Shares float32 [k] and experts int64 [k] of a token x [d], as `Router.forward` gives them.

    weight [experts, d], scale [d], per_expert [experts] are the router's.
    """
    experts, dim = weight.shape
    scores = x.new_empty((experts,), dtype=torch.float32)
    _scores[(experts,)](
        x, weight, scale, scores, dim, eps, root, BLOCK=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    weights = x.new_empty((top,), dtype=torch.float32)
    index = x.new_empty((top,), dtype=torch.int64)
    _choice[(1,)](
        scores, per_expert, weights, index, experts, TOP=top,
        EXPERTS=max(2, triton.next_power_of_2(experts)), num_warps=1,
    )  # fmt: skip
    return weights, index
