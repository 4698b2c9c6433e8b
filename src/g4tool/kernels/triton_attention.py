"""Attention of one new token over a cache, split over the sequence, in Triton.

A first kernel lets each program run a share of the tokens that are present for one key-value head
and all its query heads; a second one joins the shares. How many tokens there are is read on the
device, so that one recorded launch serves every position.
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from g4tool.kernels.triton_int4 import store_packed

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _shares(
    q,
    keys,
    values,
    position,
    parts,
    highest,
    sums,
    slots,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """HEADS query heads of one key-value head against a share of its tokens."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    present = tl.minimum(tl.load(position).to(tl.int32) + 1, slots)
    share = tl.cdiv(tl.cdiv(present, SPLITS), TOKENS) * TOKENS
    first = split * share
    last = tl.minimum(first + share, present)

    own = tl.arange(0, PADDED)
    d = tl.arange(0, HEAD_DIM)
    query = tl.load(
        q + (head * HEADS + own)[:, None] * HEAD_DIM + d[None, :],
        mask=(own < HEADS)[:, None],
        other=0.0,
    )
    start = head.to(tl.int64) * slots * HEAD_DIM
    high = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, HEAD_DIM), tl.float32)
    for begin in tl.range(first, last, TOKENS, num_stages=STAGES):
        token = begin + tl.arange(0, TOKENS)
        there = token < last
        at = start + token.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(keys + at, mask=there[:, None], other=0.0)
        v = tl.load(values + at, mask=there[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * _LOG2_E
        scores = tl.where(there[None, :], scores, -float("inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rest = tl.exp2(high - higher)
        total = total * rest + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * rest[:, None], input_precision="ieee")
        high = higher
    row = (head * HEADS + own) * SPLITS + split
    tl.store(highest + row, high, mask=own < HEADS)
    tl.store(sums + row, total, mask=own < HEADS)
    tl.store(
        parts + row[:, None] * HEAD_DIM + d[None, :],
        mixed,
        mask=(own < HEADS)[:, None] & (first < last),
    )


@triton.jit
def _joined(
    parts, highest, sums, out, packed, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one query head, from all its shares."""
    head = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    total = tl.load(sums + head * SPLITS + split)
    high = tl.load(highest + head * SPLITS + split)
    weight = tl.where(total > 0, tl.exp2(high - tl.max(high, 0)), 0.0)
    whole = tl.sum(weight * total, 0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    each = tl.load(
        parts + (head * SPLITS + split)[:, None] * HEAD_DIM + d[None, :],
        mask=(total > 0)[:, None],
        other=0.0,
    )
    mixed = (tl.sum(each * weight[:, None], 0) / whole).to(out.dtype.element_ty)
    at = head * HEAD_DIM + d
    tl.store(out + at, mixed)
    if PACK:
        store_packed(
            packed,
            mixed.to(tl.float32).reshape(BLOCK // 8, 8),
            at.reshape(BLOCK // 8, 8),
            HEAD_DIM * tl.num_programs(0),
        )


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    packed: Tensor | None = None,
) -> Tensor:
    """One token's query heads q [H, D] over keys and values [1, kv heads, slots, D] -> [H, D].

    `position`, a 0-dim integer on the device, is the token's own: slots 0 to `position` count, or
    all of them once it has passed the last. D is a power of two of at least 16. With `packed`
    [9 * H * D / 8] the result is also packed for the one-row kernels. The scale is one.
    """
    heads, size = q.shape
    kv_heads, slots = keys.shape[1:3]
    share = heads // kv_heads
    tokens = 64 if size <= 256 else 32
    splits = min(64, triton.next_power_of_2(triton.cdiv(slots, 128)))
    parts = q.new_empty((heads, splits, size), dtype=torch.float32)
    highest, sums = (q.new_empty((heads, splits), dtype=torch.float32) for _ in range(2))
    _shares[(kv_heads, splits)](
        q, keys, values, position, parts, highest, sums, slots,
        HEAD_DIM=size, HEADS=share, PADDED=max(16, triton.next_power_of_2(share)),
        TOKENS=tokens, SPLITS=splits, STAGES=2, num_warps=4,
    )  # fmt: skip
    out = torch.empty_like(q)
    block = min(size, 64)
    _joined[(heads, size // block)](
        parts, highest, sums, out, out if packed is None else packed,
        HEAD_DIM=size, SPLITS=splits, BLOCK=block, PACK=packed is not None, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _seen(mask, seen, queries, tokens, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Whether any query of a block sees any key of a tile."""
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (row < queries)[:, None] & (column < tokens)[None, :]
    at = row.to(tl.int64)[:, None] * tokens + column[None, :]
    tile = tl.load(mask + at, mask=inside, other=-float("inf")).to(tl.float32)
    best = tl.max(tl.max(tile, 1), 0)
    tl.store(seen + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), (best > -1e30) * 1)


@triton.jit
def _chunk(
    q, keys, values, mask, seen, out, queries, tokens, tiles, q_row, q_head,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head, over the tiles between the first and the last one it sees."""
    block = tl.program_id(1)
    head = tl.program_id(0)
    number = tl.arange(0, TILES)
    any_ = tl.load(seen + block * tiles + number, mask=number < tiles, other=0) > 0
    first = tl.min(tl.where(any_, number, TILES), 0)
    last = tl.max(tl.where(any_, number + 1, 0), 0)

    row = block * TALL + tl.arange(0, TALL)
    d = tl.arange(0, HEAD_DIM)
    known = (row < queries)[:, None]
    at = row.to(tl.int64)[:, None] * q_row + head * q_head + d[None, :]
    query = tl.load(q + at, mask=known, other=0.0)
    start = (head // SHARE).to(tl.int64) * tokens * HEAD_DIM
    high = tl.full((TALL,), -1e30, tl.float32)
    total = tl.zeros((TALL,), tl.float32)
    mixed = tl.zeros((TALL, HEAD_DIM), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        token = tile * WIDE + tl.arange(0, WIDE)
        there = token < tokens
        place = start + token.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(keys + place, mask=there[:, None], other=0.0)
        v = tl.load(values + place, mask=there[:, None], other=0.0)
        added = tl.load(
            mask + row.to(tl.int64)[:, None] * tokens + token[None, :],
            mask=known & there[None, :],
            other=-float("inf"),
        )
        scores = tl.dot(query, tl.trans(k), input_precision="ieee")
        scores = (scores + added.to(tl.float32)) * _LOG2_E
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rest = tl.exp2(high - higher)
        total = total * rest + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * rest[:, None], input_precision="ieee")
        high = higher
    mixed = mixed / total[:, None]
    into = (row.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + d[None, :]
    tl.store(out + into, mixed.to(out.dtype.element_ty), mask=known)


def chunk_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """A chunk's queries q [1, H, S, D] over keys and values [1, kv heads, K, D] -> [1, H, S, D].

    `mask` [1, 1, S, K] is added to the scores; tiles of keys that no query of a block sees at the
    ends are not read. D is a power of two of at least 16. The scale is one; every query sees a key.
    """
    heads, queries, size = q.shape[1:]
    tokens = keys.shape[2]
    if q.stride(3) != 1:
        q = q.contiguous()
    tall, wide = (128, 64) if size <= 256 else (64, 32)
    blocks, tiles = triton.cdiv(queries, tall), triton.cdiv(tokens, wide)
    mask = mask.contiguous()
    seen = torch.empty((blocks, tiles), dtype=torch.int32, device=q.device)
    _seen[(blocks, tiles)](mask, seen, queries, tokens, TALL=tall, WIDE=wide)
    out = q.new_empty((1, queries, heads, size))
    _chunk[(heads, blocks)](
        q, keys.contiguous(), values.contiguous(), mask, seen, out, queries, tokens, tiles,
        q.stride(2), q.stride(1), HEAD_DIM=size, HEADS=heads, SHARE=heads // keys.shape[1],
        TALL=tall, WIDE=wide, TILES=triton.next_power_of_2(tiles), STAGES=2, num_warps=8,
    )  # fmt: skip
    return out.transpose(1, 2)
