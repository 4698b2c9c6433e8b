"""What lies between the matrix products of one decode step, in Triton: one launch each.

Every kernel takes the unsummed parts of the product before it (`triton_int4.vector_parts`, fp32
[splits, n], or a plain result as one part) and leaves its result both plain and packed for the
product after it. Sums are fp32; values are rounded to the activations' dtype where the plain model
rounds them.
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from g4tool.kernels.triton_int4 import empty_packed, store_packed


@triton.jit
def _summed(parts, at, mask, stride, SPLITS: tl.constexpr):
    total = tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * stride + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _normed(x, scale, dim, eps):
    """RMS norm of x [A, B] as a whole, zero beyond `dim`, with a learned scale [A, B]."""
    mean = tl.sum(tl.sum(x * x, 1), 0) / dim
    return x * (1.0 / tl.sqrt_rn(mean + eps)) * scale


@triton.jit
def _loaded(pointer, at, inside):
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _joined(
    parts, stream, after, layer_scale, out, before, normed, packed, dim, eps,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr,
    PACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * dim
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < dim
    kind = out.dtype.element_ty
    # All loads come first: none may wait behind a sum over the row.
    x = _loaded(stream + row, at, inside)
    if NORMED:
        before_scale = _loaded(before, at, inside)
    if SPLITS > 0:
        after_scale = _loaded(after, at, inside)
        branch = _summed(parts + row, at, inside, dim, SPLITS).to(kind).to(tl.float32)
        branch = _normed(branch, after_scale, dim, eps).to(kind).to(tl.float32)
        x = (x + branch).to(kind).to(tl.float32)
    if SCALED:
        x = (x * tl.load(layer_scale).to(tl.float32)).to(kind).to(tl.float32)
    if SPLITS > 0 or SCALED:
        tl.store(out + row + at, x.to(kind), mask=inside)
    if NORMED:
        x = _normed(x, before_scale, dim, eps).to(kind).to(tl.float32)
        tl.store(normed + row + at, x.to(kind), mask=inside)
    if PACK:
        store_packed(packed, x, at, dim)


def join(
    stream: Tensor,
    eps: float,
    parts: Tensor | None = None,
    after: Tensor | None = None,
    layer_scale: Tensor | None = None,
    before: Tensor | None = None,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(stream [rows, d] + norm(branch) * after) * layer_scale, and its norm * before.

    Whatever is None is left out. The branch is the sum of parts [splits, d] for one row, or parts
    [rows, d] for several. Returns the new stream and its norm, or the stream twice; the second is
    also written to `packed`, for one row.
    """
    rows, dim = stream.shape
    changed = parts is not None or layer_scale is not None
    out = torch.empty_like(stream) if changed else stream
    normed = out if before is None else torch.empty_like(stream)
    splits = 0 if parts is None else parts.shape[0] if rows == 1 else 1
    _joined[(rows,)](
        stream if parts is None else parts,
        stream,
        stream if after is None else after,
        stream if layer_scale is None else layer_scale,
        out,
        stream if before is None else before,
        normed,
        stream if packed is None else packed,
        dim,
        eps,
        SPLITS=splits,
        BLOCK=max(8, triton.next_power_of_2(dim)),
        SCALED=layer_scale is not None,
        NORMED=before is not None,
        PACK=packed is not None,
        num_warps=16 if rows == 1 else 8,
    )
    return out, normed


@triton.jit
def _gated(
    gate, other, out, packed, width, stride, other_stride, gate_step, other_step,
    SPLITS: tl.constexpr, OTHERS: tl.constexpr, BLOCK: tl.constexpr,
    PACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < width
    kind = out.dtype.element_ty
    g = _summed(gate + row * gate_step, at, inside, stride, SPLITS).to(kind).to(tl.float32)
    u = _summed(other + row * other_step, at, inside, other_stride, OTHERS).to(kind).to(tl.float32)
    # tanh(t) = 1 - 2 / (exp(2 t) + 1)
    inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    g = (g * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))).to(kind).to(tl.float32)
    y = (g * u).to(kind)
    tl.store(out + row * width + at, y, mask=inside)
    if PACK:
        store_packed(packed + row * 9 * (width // 8), y.to(tl.float32), at, width)


def gated(parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gelu(gate) * up of parts [splits, rows, 2 f], gate first -> [rows, f], plain and packed."""
    splits, rows, double = parts.shape
    width = double // 2
    out = parts.new_empty((rows, width), dtype=dtype)
    packed = empty_packed(rows, width, parts.device)
    block = 256
    _gated[(triton.cdiv(width, block), rows)](
        parts, parts.view(-1)[width:], out, packed, width, rows * double, rows * double, double,
        double, SPLITS=splits, OTHERS=splits, BLOCK=block, PACK=True, num_warps=2,
    )  # fmt: skip
    return out, packed


def gated_by(parts: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(sum of parts [splits, P]) * other [P] -> [P], plain and packed."""
    splits, width = parts.shape
    out = torch.empty_like(other)
    packed = empty_packed(1, width, parts.device)
    block = 256
    _gated[(triton.cdiv(width, block), 1)](
        parts, other, out, packed, width, width, width, 0, 0,
        SPLITS=splits, OTHERS=1, BLOCK=block, PACK=True, num_warps=2,
    )  # fmt: skip
    return out, packed


def gate_into(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up of any equal shape, written over `gate`, which it returns."""
    block = 1024
    count = gate.numel()
    _gated[(triton.cdiv(count, block), 1)](
        gate, up, gate, gate, count, 0, 0, 0, 0, SPLITS=1, OTHERS=1, BLOCK=block, PACK=False,
        num_warps=4,
    )  # fmt: skip
    return gate


@triton.jit
def _heads(
    parts, q_scale, k_scale, cos, sin, position, q, keys, values, slots, total, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SPLITS: tl.constexpr,
    VALUE_FROM_KEY: tl.constexpr,
):  # fmt: skip
    """One head: the query heads, then key heads, then value heads."""
    head = tl.program_id(0)
    kind = q.dtype.element_ty
    source = head
    scale = q_scale
    if head >= HEADS:
        scale = k_scale
    if VALUE_FROM_KEY and head >= HEADS + KV_HEADS:
        source = head - KV_HEADS
    d = tl.arange(0, HALF)
    # All loads come first: none may wait behind the sum over the head.
    low = tl.load(scale + d).to(tl.float32)
    high = tl.load(scale + HALF + d).to(tl.float32)
    c = tl.load(cos + d).to(tl.float32)
    s = tl.load(sin + d).to(tl.float32)
    slot = tl.load(position) % slots
    at = source * (2 * HALF) + d
    one = _summed(parts, at, d < HALF, total, SPLITS).to(kind).to(tl.float32)
    two = _summed(parts, at + HALF, d < HALF, total, SPLITS).to(kind).to(tl.float32)
    mean = (tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * HALF)
    factor = 1.0 / tl.sqrt_rn(mean + eps)
    one *= factor
    two *= factor
    if head < HEADS + KV_HEADS:
        one = (one * low).to(kind).to(tl.float32)
        two = (two * high).to(kind).to(tl.float32)
        turned = one * c - two * s
        two = two * c + one * s
        one = turned
    into = q + head * (2 * HALF)
    if head >= HEADS + KV_HEADS:
        into = values + ((head - HEADS - KV_HEADS) * slots + slot) * (2 * HALF)
    elif head >= HEADS:
        into = keys + ((head - HEADS) * slots + slot) * (2 * HALF)
    tl.store(into + d, one.to(kind))
    tl.store(into + HALF + d, two.to(kind))


def heads(
    parts: Tensor,
    q_scale: Tensor,
    k_scale: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    cache: tuple[Tensor, Tensor] | None,
    count: int,
    eps: float,
    dtype: torch.dtype,
    value_from_key: bool,
) -> Tensor:
    """Query heads [count, D], normed and rotated; new keys and values go into the cache.

    parts [splits, n] are the products q, k, v (or q, k where `value_from_key`, or only q without
    a cache to write to) side by side; cos, sin [D / 2]; cache [1, kv heads, slots, D] each, of
    `dtype`, written at slot `position` modulo slots.
    """
    size = 2 * cos.numel()
    q = parts.new_empty((count, size), dtype=dtype)
    kv_heads = 0 if cache is None else cache[0].shape[1]
    keys, values = (q, q) if cache is None else cache
    _heads[(count + 2 * kv_heads,)](
        parts, q_scale, q_scale if k_scale is None else k_scale, cos, sin, position, q, keys,
        values, keys.shape[-2], parts.shape[-1], eps,
        HEADS=count, KV_HEADS=kv_heads, HALF=size // 2, SPLITS=parts.shape[0],
        VALUE_FROM_KEY=value_from_key, num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _mixture(
    dense, mixed, weights, dense_after, mixed_after, out, dim, eps, DENSE: tl.constexpr,
    SPLITS: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < dim
    kind = out.dtype.element_ty
    dense_scale = _loaded(dense_after, at, inside)
    mixed_scale = _loaded(mixed_after, at, inside)
    total = tl.zeros((BLOCK // 8, 8), tl.float32)
    for expert in tl.static_range(TOP):
        one = _summed(mixed + expert * dim, at, inside, TOP * dim, SPLITS)
        total += one.to(kind).to(tl.float32) * tl.load(weights + expert)
    x = _summed(dense, at, inside, dim, DENSE).to(kind).to(tl.float32)
    x = _normed(x, dense_scale, dim, eps).to(kind).to(tl.float32)
    total = total.to(kind).to(tl.float32)
    total = _normed(total, mixed_scale, dim, eps).to(kind).to(tl.float32)
    tl.store(out + at, (x + total).to(kind), mask=inside)


def mixture(
    dense: Tensor,
    mixed: Tensor,
    weights: Tensor,
    dense_after: Tensor,
    mixed_after: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """norm(dense) + norm(weighted sum of the chosen experts' results): [1, d], one part.

    dense [splits, d], mixed [splits, k, d], weights fp32 [k].
    """
    dim = dense.shape[-1]
    out = dense.new_empty((1, dim), dtype=dtype)
    _mixture[(1,)](
        dense, mixed, weights, dense_after, mixed_after, out, dim, eps, DENSE=dense.shape[0],
        SPLITS=mixed.shape[0], TOP=mixed.shape[1], BLOCK=triton.next_power_of_2(dim), num_warps=16,
    )  # fmt: skip
    return out
