"""int4 matrix products of many rows in Triton, on the layout of `kernels.int4`; for CUDA devices.

Operators as in `triton_int4`, dequantizing tile by tile:

    g4::triton_int4_dequantize  the weight itself [N, K], for a library's matrix product
    g4::triton_int4_grouped     x [M, K] sorted by expert, offsets int32 [E] -> [M, N]
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from g4tool.kernels.triton_int4 import int4_vector, launchable


@triton.jit
def _tile(qdata, scale, zero, rows, at, count, columns, GROUP: tl.constexpr):
    """The weight's rows [R] in the byte columns `at` [B], dequantized: fp32 [R, 2 B]."""
    inside = (rows < count)[:, None] & (at * 2 < columns)[None, :]
    bytes_ = tl.load(
        qdata + rows.to(tl.int64)[:, None] * (columns // 2) + at[None, :], mask=inside, other=0
    ).to(tl.int32)
    group = (at * 2 // GROUP)[None, :] * count + rows[:, None]
    s = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(zero + group, mask=inside, other=0.0).to(tl.float32)
    # 1 + code / 128 by its bits.
    low = (((bytes_ & 0xF) << 16) | 0x3F800000).to(tl.float32, bitcast=True)
    high = (((bytes_ & 0xF0) << 12) | 0x3F800000).to(tl.float32, bitcast=True)
    low = tl.fma(low, 128.0, -128.0)
    high = tl.fma(high, 128.0, -128.0)
    pair = tl.join((low - z) * s, (high - z) * s)
    return pair.reshape(pair.shape[0], pair.shape[1] * 2)


@triton.jit
def _dequantize(
    qdata, scale, zero, out, count, columns, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    w = _tile(qdata, scale, zero, rows, at, count, columns, GROUP)
    wide = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < count)[:, None] & (wide < columns)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * columns + wide[None, :],
        w.to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _product(
    x, qdata, scale, zero, out, first, last, block, count, columns: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x [first:last] times the weight's rows [block * ROWS, ...)."""
    token = first + tl.arange(0, TOKENS)
    rows = block * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, columns, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        there = (token < last)[None, :] & (k < columns)[:, None]
        xs = tl.load(x + token.to(tl.int64)[None, :] * columns + k[:, None], mask=there, other=0.0)
        at = start // 2 + tl.arange(0, COLUMNS // 2)
        w = _tile(qdata, scale, zero, rows, at, count, columns, GROUP)
        total = tl.dot(w.to(xs.dtype), xs, total, input_precision="ieee")
    there = (token < last)[None, :] & (rows < count)[:, None]
    tl.store(out + token.to(tl.int64)[None, :] * count + rows[:, None], total, mask=there)


@triton.jit
def _grouped(
    x, offsets, qdata, scale, zero, out, count, columns: tl.constexpr, experts,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (block, tile): the tiles of all experts' rows are numbered one after the other."""
    tile = tl.program_id(1)
    number = tl.arange(0, EXPERTS)
    known = number < experts
    ends = tl.load(offsets + number, mask=known, other=0)
    begins = tl.load(offsets + number - 1, mask=known & (number > 0), other=0)
    tiles = tl.where(known, tl.cdiv(ends - begins, TOKENS), 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((known & (upto <= tile)).to(tl.int32), 0)
    if expert < experts:
        own = number == expert
        begin = tl.sum(tl.where(own, begins, 0), 0)
        end = tl.sum(tl.where(own, ends, 0), 0)
        before = tl.sum(tl.where(own, upto - tiles, 0), 0)
        wide = expert.to(tl.int64)
        groups = columns // GROUP
        _product(
            x,
            qdata + wide * count * (columns // 2),
            scale + wide * count * groups,
            zero + wide * count * groups,
            out, begin + (tile - before) * TOKENS, end, tl.program_id(0), count, columns,
            GROUP, TOKENS, ROWS, COLUMNS,
        )  # fmt: skip


@triton_op("g4::triton_int4_grouped", mutates_args=())
def int4_grouped(x: Tensor, offsets: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [M, K] sorted by expert, offsets int32 [E] where each one ends -> [M, N]."""
    experts, count, columns = qdata.shape[0], qdata.shape[1], x.shape[1]
    out = x.new_zeros((x.shape[0], count))
    tokens = 64
    tiles = triton.cdiv(x.shape[0], tokens) + experts
    launchable(_grouped)[(triton.cdiv(count, 128), tiles)](
        x.contiguous(), offsets, qdata, scale, zero, out, count, columns, experts,
        EXPERTS=max(2, triton.next_power_of_2(experts)), GROUP=columns // scale.shape[1],
        TOKENS=tokens, ROWS=128, COLUMNS=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _dequantize_into(out: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> None:
    count, columns = out.shape
    launchable(_dequantize)[(triton.cdiv(count, 16), triton.cdiv(columns, 256))](
        qdata, scale, zero, out, count, columns,
        GROUP=columns // scale.shape[0], ROWS=16, COLUMNS=256, num_warps=4,
    )  # fmt: skip


@triton_op("g4::triton_int4_dequantize", mutates_args=())
def int4_dequantize(qdata: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in `dtype`."""
    out = torch.empty((qdata.shape[0], 2 * qdata.shape[1]), dtype=dtype, device=qdata.device)
    _dequantize_into(out, qdata, scale, zero)
    return out


# Up to so many rows are run one by one; for more the weight is dequantized once, whole, and a
# library multiplies.
_FEW_ROWS = 4


def int4_mm(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [..., K] @ w.T -> [..., N] in the dtype of x.

    For more than a few rows the weight exists whole in that dtype while it is used.
    """
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) <= _FEW_ROWS:
        out = torch.cat([int4_vector(row[None], qdata, scale, zero) for row in flat])
        return out.view(*x.shape[:-1], -1)
    return F.linear(x, int4_dequantize(qdata, scale, zero, x.dtype))
