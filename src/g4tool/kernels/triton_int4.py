"""int4 matrix products of one row in Triton, on the layout of `kernels.int4`; for CUDA devices.

Operators for compilers and exporters, made of Triton kernels that they can see into:

    g4::triton_int4_vector   x [..., K] with one row -> [..., N]: reads every weight once
    g4::triton_int4_chosen   x [rows, k, K] through expert index [rows, k] -> [rows, k, N]

`triton_tiles` has those for many rows.

The kernels here are bound by instructions: a conversion of integers to floats has a quarter of the
rate of a multiplication. None is needed: nibble i < 5 of a word, all other bits cleared, is as an
fp32 number the denormal code * 2**(4i - 149), exactly; the upper three come down with one shift. So
a weight costs one AND and one multiply-add, on activations that were scaled by 2**(100 - 4i)
beforehand and lie so that those of one nibble position follow each other (`pack_rows`). Sums are
fp32 and the weight is not rounded; |x| must stay below 2**27.
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from g4tool.kernels.tuning import vector_tile

CHUNK = 32
"""Weights of one load: groups are multiples of this."""

_UNSCALE = tl.constexpr(2.0**49)  # what 2**(100 - 4i) leaves of 2**(4i - 149)

Weight = tuple[Tensor, Tensor, Tensor]
"""qdata, scale, zero of one weight or of all experts."""


def launchable(kernel: Any) -> Any:
    """The kernel as tracers see it; itself under Triton's interpreter, which they do not know."""
    return wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def takes(x: Tensor, qdata: Tensor, scale: Tensor) -> bool:
    """Whether these kernels run this product: groups of whole chunks, fp32 or less."""
    group = 2 * qdata.shape[-1] // scale.shape[-2]
    return group % CHUNK == 0 and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def store_packed(packed, values, at, columns):
    """Values fp32 [B / 8, 8] of the columns `at` [B / 8, 8], as `_times` wants them."""
    words = columns // 8
    inside = at < columns
    nibble = at % 8
    # 2**(100 - 4i) by its exponent bits.
    factor = ((227 - 4 * (nibble % 5)) << 23).to(tl.float32, bitcast=True)
    tl.store(packed + nibble * words + at // 8, values * factor, mask=inside)
    sums = tl.sum(tl.where(inside, values, 0.0), 1)
    first = tl.min(at, 1)
    tl.store(packed + 8 * words + first // 8, sums, mask=first < columns)


@triton.jit
def _pack(x, packed, columns, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    row = tl.program_id(1)
    values = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    store_packed(packed + row * stride, values, at, columns)


@triton.jit
def term(total, words, packed, at, MASK: tl.constexpr):
    x = tl.load(packed + at)
    return tl.fma(x[None, :], (words & MASK).to(tl.float32, bitcast=True), total)


@triton.jit
def _times(
    packed,
    qdata,
    scale,
    zero,
    out,
    block,
    split,
    count,
    columns: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows [block * ROWS, ...) of the weight, the share `split` of the columns, times the row."""
    rows = block * ROWS + tl.arange(0, ROWS)
    chunks = columns // 32
    words = chunks * 4
    turns: tl.constexpr = ((columns // 32 + ACROSS - 1) // ACROSS + SPLITS - 1) // SPLITS
    y = tl.zeros((ROWS, ACROSS), tl.float32)
    base = qdata + tl.minimum(rows, count - 1).to(tl.int64)[:, None] * words
    known = (rows < count)[:, None]
    for step in tl.range(turns, num_stages=STAGES):
        turn = split * turns + step
        at = turn * (ACROSS * 4) + tl.arange(0, ACROSS * 4)
        inside = at < words
        w = tl.load(
            base + at[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first"
        )
        chunk = tl.minimum(turn * ACROSS + tl.arange(0, ACROSS), chunks - 1)
        group = (chunk * 32 // GROUP)[None, :] * count + rows[:, None]
        s = tl.load(scale + group, mask=known, other=0.0).to(tl.float32)
        z = tl.load(zero + group, mask=known, other=0.0).to(tl.float32)
        sums = tl.load(packed + 8 * words + at, mask=inside, other=0.0)
        total = tl.zeros((ROWS, ACROSS * 4), tl.float32)
        total = term(total, w, packed, at, 0xF)
        total = term(total, w, packed + words, at, 0xF0)
        total = term(total, w, packed + 2 * words, at, 0xF00)
        total = term(total, w, packed + 3 * words, at, 0xF000)
        total = term(total, w, packed + 4 * words, at, 0xF0000)
        w = w >> 20  # the upper nibbles would be exponents
        total = term(total, w, packed + 5 * words, at, 0xF)
        total = term(total, w, packed + 6 * words, at, 0xF0)
        total = term(total, w, packed + 7 * words, at, 0xF00)
        products = tl.sum(total.reshape(ROWS, ACROSS, 4), 2)
        sums = tl.sum(sums.reshape(ACROSS, 4), 1)
        y = tl.fma(s, tl.fma(products, _UNSCALE, -z * sums[None, :]), y)
    tl.store(out + rows, tl.sum(y, 1), mask=rows < count)


@triton.jit
def _vector(
    packed,
    out,
    qdata_0,
    scale_0,
    zero_0,
    count_0,
    qdata_1,
    scale_1,
    zero_1,
    count_1,
    qdata_2,
    scale_2,
    zero_2,
    count_2,
    columns: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Up to three weights of the same columns in one launch, their results side by side."""
    block = tl.program_id(0)
    split = tl.program_id(1)
    out += split * (count_0 + count_1 + count_2)
    first = tl.cdiv(count_0, ROWS)
    second = first + tl.cdiv(count_1, ROWS)
    if block < first:
        _times(
            packed, qdata_0, scale_0, zero_0, out, block, split, count_0, columns,
            GROUP, ROWS, ACROSS, SPLITS, STAGES,
        )  # fmt: skip
    elif block < second:
        _times(
            packed, qdata_1, scale_1, zero_1, out + count_0, block - first, split, count_1,
            columns, GROUP, ROWS, ACROSS, SPLITS, STAGES,
        )  # fmt: skip
    else:
        _times(
            packed, qdata_2, scale_2, zero_2, out + count_0 + count_1, block - second, split,
            count_2, columns, GROUP, ROWS, ACROSS, SPLITS, STAGES,
        )  # fmt: skip


@triton.jit
def _vector_chosen(
    packed,
    out,
    index,
    qdata,
    scale,
    zero,
    count,
    columns: tl.constexpr,
    stride,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each slot's row through its expert; SHARE slots in a row have one packed row."""
    split = tl.program_id(1)
    slot = tl.program_id(2)
    expert = tl.load(index + slot).to(tl.int64)
    groups = columns // GROUP
    _times(
        packed + (slot // SHARE) * stride,
        qdata + expert * count * (columns // 8),
        scale + expert * count * groups,
        zero + expert * count * groups,
        out + (split * tl.num_programs(2) + slot) * count,
        tl.program_id(0), split, count, columns, GROUP, ROWS, ACROSS, SPLITS, STAGES,
    )  # fmt: skip


@triton.jit
def _sum_splits(parts, out, count, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total, mask=at < count)


def packed_stride(columns: int) -> int:
    """Floats that one packed row takes: eight nibble positions and the sums of eight columns."""
    return 9 * (columns // 8)


def empty_packed(rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for `rows` packed rows: fp32 [rows, 9 * K / 8]."""
    return torch.empty((rows, packed_stride(columns)), dtype=torch.float32, device=device)


def pack_rows(x: Tensor) -> Tensor:
    """Rows x [M, K], K a multiple of 32, as the kernels for one row want them."""
    rows, columns = x.shape
    packed = empty_packed(rows, columns, x.device)
    block = 1024
    launchable(_pack)[(triton.cdiv(columns, block), rows)](
        x.contiguous(), packed, columns, packed_stride(columns), BLOCK=block, num_warps=4
    )
    return packed


def vector_parts(packed: Tensor, weights: Sequence[Weight]) -> Tensor:
    """One packed row times one to three weights [N_i, K] of one group size: fp32 [splits, sum N_i].

    The sum over the splits is left to whoever reads it.
    """
    columns = 2 * weights[0][0].shape[1]
    counts = [w[0].shape[0] for w in weights]
    tile = dict(vector_tile(sum(counts), columns))
    out = packed.new_empty((tile["SPLITS"], sum(counts)))
    blocks = sum(triton.cdiv(count, tile["ROWS"]) for count in counts)
    every = [*weights, *[weights[0]] * (3 - len(weights))]
    counts += [0] * (3 - len(weights))
    arguments: list[Any] = []
    for (qdata, scale, zero), count in zip(every, counts, strict=True):
        arguments += [qdata.view(torch.int32), scale, zero, count]
    launchable(_vector)[(blocks, tile["SPLITS"])](
        packed, out, *arguments, columns, GROUP=columns // weights[0][1].shape[0], **tile
    )
    return out


def chosen_parts(packed: Tensor, index: Tensor, weight: Weight, share: int) -> Tensor:
    """Packed rows through experts index [slots] of a weight [E, N, K]: fp32 [splits, slots, N]."""
    qdata, scale, zero = weight
    count, columns = qdata.shape[1], 2 * qdata.shape[2]
    slots = index.numel()
    tile = dict(vector_tile(count * slots, columns))
    out = packed.new_empty((tile["SPLITS"], slots, count))
    launchable(_vector_chosen)[(triton.cdiv(count, tile["ROWS"]), tile["SPLITS"], slots)](
        packed,
        out,
        index,
        qdata.view(torch.int32),
        scale,
        zero,
        count,
        columns,
        packed_stride(columns),
        SHARE=share,
        GROUP=columns // scale.shape[1],
        **tile,
    )
    return out


def sum_splits(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [splits, ...] -> its sum over the splits, [...] in `dtype`; in one order, always."""
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    block = 1024
    launchable(_sum_splits)[(triton.cdiv(out.numel(), block),)](
        parts, out, out.numel(), SPLITS=parts.shape[0], BLOCK=block
    )
    return out


@triton_op("g4::triton_int4_vector", mutates_args=())
def int4_vector(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [..., K] of one row @ w.T -> [..., N] in the dtype of x."""
    packed = pack_rows(x.reshape(1, -1))
    y = sum_splits(vector_parts(packed, [(qdata, scale, zero)]), x.dtype)
    return y.view(*x.shape[:-1], qdata.shape[0])


@triton_op("g4::triton_int4_chosen", mutates_args=())
def int4_chosen(x: Tensor, index: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
    packed = pack_rows(x.reshape(-1, x.shape[-1]))
    parts = chosen_parts(packed, index.reshape(-1), (qdata, scale, zero), 1)
    return sum_splits(parts, x.dtype).view(*index.shape, qdata.shape[1])
