"""RMS norms of many rows in Triton, and of heads with their rotation: for chunks of a prompt.

Sums are fp32; values are rounded to the activations' dtype after the norm, and at the end.
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows_normed(
    x, scale, out, rows, dim, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (d < dim)[None, :]
    at = row.to(tl.int64)[:, None] * dim + d[None, :]
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y *= (1.0 / tl.sqrt_rn(tl.sum(y * y, 1) / dim + eps))[:, None]
    if SCALED:
        y *= tl.load(scale + d, mask=d < dim, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def normed_rows(x: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of x [..., dim], times scale [dim]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dim = x.shape[-1]
    rows = x.numel() // dim
    block = triton.next_power_of_2(dim)
    tall = max(1, 2048 // block)
    _rows_normed[(triton.cdiv(rows, tall),)](
        x, x if scale is None else scale, out, rows, dim, eps, ROWS=tall, BLOCK=block,
        SCALED=scale is not None, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _rows_turned(
    x, scale, cos, sin, out, rows, eps, HEADS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    known = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * (2 * HALF) + d[None, :]
    angle = (row // HEADS)[:, None] * HALF + d[None, :]
    kind = out.dtype.element_ty
    one = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    two = tl.load(x + at + HALF, mask=known, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
    low = tl.load(scale + d).to(tl.float32)[None, :]
    high = tl.load(scale + HALF + d).to(tl.float32)[None, :]
    mean = (tl.sum(one * one, 1) + tl.sum(two * two, 1)) / (2 * HALF)
    factor = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
    one = (one * factor * low).to(kind).to(tl.float32)
    two = (two * factor * high).to(kind).to(tl.float32)
    tl.store(out + at, (one * c - two * s).to(kind), mask=known)
    tl.store(out + at + HALF, (two * c + one * s).to(kind), mask=known)


def turned_rows(x: Tensor, eps: float, scale: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x [1, S, heads, D], normed and rotated by tables [1, S, 1, D / 2]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    heads, size = x.shape[2:]
    rows = x.numel() // size
    tall = max(1, 2048 // size)
    _rows_turned[(triton.cdiv(rows, tall),)](
        x, scale, cos.contiguous(), sin.contiguous(), out, rows, eps, HEADS=heads,
        HALF=size // 2, ROWS=tall, num_warps=4,
    )  # fmt: skip
    return out
