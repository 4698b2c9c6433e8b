"""The int8 matrix product of one row in Triton, on the layout of `kernels.int8`: the output head.

As in `triton_int4`, integers become floats by their bits. A byte left at bits 0 to 15 of a word is
an fp32 denormal; its sign is gone with an offset of 128, which the sums of the activations undo.

    g4::triton_int8_vector   x [..., K] with one row -> [..., N]
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from g4tool.kernels.triton_int4 import launchable, sum_splits, term
from g4tool.kernels.tuning import vector_tile

CHUNK = 16
"""Weights of one load: groups are multiples of this."""

_UNSCALE = tl.constexpr(2.0**49)


def takes(x: Tensor, qdata: Tensor, scale: Tensor) -> bool:
    """Whether this kernel runs this product: one row, groups of whole chunks."""
    one = x.numel() == x.shape[-1]
    return one and qdata.shape[-1] // scale.shape[-1] % CHUNK == 0 and x.dtype != torch.float64


@triton.jit
def _pack(x, packed, columns, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = at < columns
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    words = columns // 4
    # 2**100 and 2**92: the odd bytes are left eight bits higher.
    factor = ((227 - 8 * (at % 2)) << 23).to(tl.float32, bitcast=True)
    tl.store(packed + at % 4 * words + at // 4, values * factor, mask=inside)
    first = tl.min(at, 1)
    tl.store(packed + 4 * words + first // 4, tl.sum(values, 1), mask=first < columns)


@triton.jit
def _vector(
    packed, out, qdata, scale, count, columns: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    chunks = columns // 16
    words = chunks * 4
    turns: tl.constexpr = ((columns // 16 + ACROSS - 1) // ACROSS + SPLITS - 1) // SPLITS
    y = tl.zeros((ROWS, ACROSS), tl.float32)
    row = tl.minimum(rows, count - 1).to(tl.int64)[:, None]
    for step in tl.range(turns, num_stages=STAGES):
        turn = split * turns + step
        at = turn * (ACROSS * 4) + tl.arange(0, ACROSS * 4)
        inside = at < words
        w = tl.load(
            qdata + row * words + at[None, :],
            mask=inside[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        w = w ^ -2139062144  # 0x80808080: codes + 128, unsigned
        # Beyond the last column nothing may count, so the row's sums are cleared below, and w here.
        w = tl.where(inside[None, :], w, 0)
        sums = tl.load(packed + 4 * words + at, mask=inside, other=0.0)
        total = tl.zeros((ROWS, ACROSS * 4), tl.float32)
        total = term(total, w, packed, at, 0xFF)
        total = term(total, w, packed + words, at, 0xFF00)
        w = w >> 16
        total = term(total, w, packed + 2 * words, at, 0xFF)
        total = term(total, w, packed + 3 * words, at, 0xFF00)
        products = tl.sum(total.reshape(ROWS, ACROSS, 4), 2)
        sums = tl.sum(sums.reshape(ACROSS, 4), 1)
        part = tl.fma(products, _UNSCALE, -128.0 * sums[None, :])
        if columns == GROUP:
            y += part
        else:
            chunk = tl.minimum(turn * ACROSS + tl.arange(0, ACROSS), chunks - 1)
            s = tl.load(scale + row * (columns // GROUP) + (chunk * 16 // GROUP)[None, :])
            y = tl.fma(s.to(tl.float32), part, y)
    result = tl.sum(y, 1)
    if columns == GROUP:
        result *= tl.load(scale + rows, mask=rows < count, other=0.0).to(tl.float32)
    tl.store(out + split * count + rows, result, mask=rows < count)


@triton_op("g4::triton_int8_vector", mutates_args=())
def int8_vector(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] of one row @ w.T -> [..., N] in the dtype of x."""
    count, columns = qdata.shape
    packed = x.new_empty((5 * (columns // 4),), dtype=torch.float32)
    block = 1024
    launchable(_pack)[(triton.cdiv(columns, block),)](
        x.reshape(-1), packed, columns, BLOCK=block, num_warps=4
    )
    tile = vector_tile(count, columns, CHUNK)
    parts = packed.new_empty((tile["SPLITS"], count))
    launchable(_vector)[(triton.cdiv(count, tile["ROWS"]), tile["SPLITS"])](
        packed, parts, qdata.view(torch.int32), scale, count, columns,
        GROUP=columns // scale.shape[1], **tile,
    )  # fmt: skip
    return sum_splits(parts, x.dtype).view(*x.shape[:-1], count)
