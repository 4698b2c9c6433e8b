"""`als.solve` as one Triton kernel: every group is solved in registers, read once, written packed.

The bytes are those of `als.solve` on any device. The sums of the fit are of whole numbers below
2**24, so exact in any order; products and sums are not contracted (enable_fp_fusion=False), and
divisions are rounded as IEEE 754 says. The few groups that `als` looks at a second time are only
marked here, and solved again there.
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from g4tool.kernels.int4 import pack_int4
from g4tool.quantize import als
from g4tool.quantize.pack import LEVELS, Packed, dequantize

# Added and taken away again it rounds |x| < 2**22 to the nearest whole number, halves to even.
_ROUND = tl.constexpr(12582912.0)
# Rows and groups of a row that one program solves, by the columns of a group; the scales of a
# block's rows lie side by side.
_ROWS = {16: 32, 32: 32, 64: 32, 128: 16, 256: 8}
_ACROSS = {16: 8, 32: 4, 64: 2, 128: 2, 256: 2}


def solve(rows: Tensor, group: int) -> Packed:
    """Quantize rows [R, K] on a CUDA device, bf16, fp16 or fp32, in groups of 16 to 256.

    Everything of the result stays on the device.
    """
    count, across = rows.shape[0], rows.shape[1] // group
    rows = rows.contiguous()
    qdata = rows.new_empty((count, rows.shape[1] // 2), dtype=torch.uint8)
    scale, zero = (rows.new_empty((across, count), dtype=torch.bfloat16) for _ in range(2))
    odd = rows.new_empty((count, across), dtype=torch.bool)
    lost, energy = (rows.new_empty((count, across), dtype=torch.float64) for _ in range(2))
    if not rows.numel():
        return Packed(qdata, scale, zero, lost.sum(1), energy.sum(1), 0)
    high, wide = _ROWS[group], _ACROSS[group]
    _solve_groups[(triton.cdiv(count, high) * triton.cdiv(across, wide),)](
        rows,
        qdata,
        scale.view(torch.int16),
        zero.view(torch.int16),
        odd,
        lost,
        energy,
        _first_steps(group, rows.device),
        count,
        across,
        GROUP=group,
        ROWS=high,
        ACROSS=wide,
        STARTS=len(als.STARTS),
        TURNS=als.TURNS,
        MORE_TURNS=als.MORE_TURNS,
        FAR_ZERO=als.FAR_ZERO,
        HUGE=als.HUGE,
        LEVELS=LEVELS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    row, column = odd.nonzero(as_tuple=True)
    if len(row):
        groups = rows.view(count, across, group)[row, column]
        plain = als.solve(groups, group)
        assert plain.zero is not None
        qdata.view(count, across, -1)[row, column] = pack_int4(plain.codes)
        scale[column, row] = plain.scale[0]
        zero[column, row] = plain.zero[0]
        lost[row, column] = (dequantize(plain).double() - groups.double()).square().sum(1)
    return Packed(qdata, scale, zero, lost.sum(1), energy.sum(1), 0)


@lru_cache
def _first_steps(group: int, device: torch.device) -> Tensor:
    grid = 2**20 // group
    return torch.tensor([2 * grid * start / LEVELS for start in als.STARTS], device=device)


@triton.jit
def _rounded(x):
    """x, fp32, as bf16 holds it; by its bits, since Triton's interpreter truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _codes(points, step, zero, LEVELS: tl.constexpr):
    codes = points * tl.div_rn(1.0, step)[:, None] + zero[:, None]
    # Clamped first, which is the same for bounds that are whole, so that the trick holds.
    codes = tl.minimum(tl.maximum(codes, 0.0), LEVELS)
    return (codes + _ROUND) - _ROUND


@triton.jit
def _turn(points, mean, step, zero, GROUP: tl.constexpr, LEVELS: tl.constexpr):
    codes = _codes(points, step, zero, LEVELS)
    middle = tl.sum(codes, 1) * (1.0 / GROUP)
    along = tl.sum(codes * points, 1) - (mean * GROUP) * middle
    across = tl.sum(codes * codes, 1) - (middle * GROUP) * middle
    step = tl.maximum(tl.div_rn(along, tl.maximum(across, 1e-30)), 1e-30)
    return step, middle - tl.div_rn(mean, step), along * step


@triton.jit
def _solve_groups(
    rows,
    qdata,
    scales,
    zeros,
    odds,
    losts,
    energies,
    first_steps,
    count,
    across,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ACROSS: tl.constexpr,
    STARTS: tl.constexpr,
    TURNS: tl.constexpr,
    MORE_TURNS: tl.constexpr,
    FAR_ZERO: tl.constexpr,
    HUGE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    blocks = tl.cdiv(across, ACROSS)
    member = tl.arange(0, ROWS * ACROSS)
    row = (tl.program_id(0) // blocks) * ROWS + member // ACROSS
    column = (tl.program_id(0) % blocks) * ACROSS + member % ACROSS
    inside = (row < count) & (column < across)
    place = row.to(tl.int64) * across + column
    whole = inside[:, None]
    at = place[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    weights = tl.load(rows + at, mask=whole, other=0.0).to(tl.float32)

    # unit_of: a power of two, whose inverse has the mirrored exponent.
    low, high = tl.min(weights, 1), tl.max(weights, 1)
    exponent = tl.maximum(high, -low).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 27 << 23), 253 << 23)
    unit = exponent.to(tl.float32, bitcast=True)
    per_unit = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    x = weights * per_unit[:, None]
    low, high = low * per_unit, high * per_unit

    # als._best_line
    GRID: tl.constexpr = 1048576 // GROUP
    cell = tl.maximum(high - low, 1e-30) * (0.5 / GRID)
    centre = (high + low) * 0.5
    points = (x - centre[:, None]) * tl.div_rn(1.0, cell)[:, None]
    points = (points + _ROUND) - _ROUND
    points = tl.minimum(tl.maximum(points, -1.0 * GRID), 1.0 * GRID)
    mean = tl.sum(points, 1) * (1.0 / GROUP)
    best_gain = mean * 0.0 - 1.0
    best_step = mean * 0.0 + 1.0
    best_zero = mean * 0.0
    for start in range(STARTS):
        step = mean * 0.0 + tl.load(first_steps + start)
        zero = mean * 0.0 + 0.5 * LEVELS
        gain = best_gain
        for _ in range(TURNS):
            step, zero, gain = _turn(points, mean, step, zero, GROUP, LEVELS)
        better = gain > best_gain
        best_gain = tl.where(better, gain, best_gain)
        best_step = tl.where(better, step, best_step)
        best_zero = tl.where(better, zero, best_zero)
    for _ in range(MORE_TURNS):
        best_step, best_zero, best_gain = _turn(points, mean, best_step, best_zero, GROUP, LEVELS)
    step = best_step * cell
    origin = centre - best_step * best_zero * cell

    # From here on as als.solve, in the stored values.
    # 2**-133 to 2**124, by the bits: Triton takes the former, no normal fp32, for fp64.
    bits = (step * unit).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, 1 << 16), 251 << 23)
    scale = _rounded(bits.to(tl.float32, bitcast=True))
    zero = _rounded(tl.div_rn(-origin, scale * per_unit))
    odd = (tl.abs(zero) > FAR_ZERO) | (low == high) | (unit >= HUGE)
    codes = _codes(x, scale * per_unit, zero, LEVELS)
    wide = weights.to(tl.float64)
    lost = ((codes - zero[:, None]) * scale[:, None]).to(tl.float64) - wide
    tl.store(losts + place, tl.sum(lost * lost, 1), mask=inside)
    tl.store(energies + place, tl.sum(wide * wide, 1), mask=inside)
    tl.store(odds + place, odd, mask=inside)
    lying = column.to(tl.int64) * count + row
    tl.store(scales + lying, scale.to(tl.int32, bitcast=True) >> 16, mask=inside)
    tl.store(zeros + lying, zero.to(tl.int32, bitcast=True) >> 16, mask=inside)
    pairs = tl.reshape(codes.to(tl.int32), (ROWS * ACROSS, GROUP // 2, 2))
    even, uneven = tl.split(pairs)
    half = place[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    tl.store(qdata + half, (even | (uneven << 4)).to(tl.uint8), mask=whole)
