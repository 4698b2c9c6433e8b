"""The default 4 bit solver: alternating least squares over scale and zero of each group.

For a group x of g weights it looks for codes q in 0..15 and the line s * q + b closest to x in the
sum of squares, by turns: the best codes for a line (rounding), the best line for the codes (linear
regression). The hqq package moves only the zero and leaves the scale at range / 15; a free scale,
started from several clips of the range, ends 3.5 to 5 % lower at the same format.

The regression is s = cov(x, q) / var(q), through the point of the means, and takes s * cov(x, q)
off the variance of x, so the best start is known without measuring its error.
"""

import torch
from torch import Tensor

from g4tool.quantize.pack import (
    LEVELS,
    Codes,
    by_group,
    fold,
    from_groups,
    round_codes,
    stored_scale,
    unit_of,
)
from g4tool.quantize.rtn import minmax_line

# Ranges to start from, in parts of max - min: 1 finds weights that lie on a grid already, the
# smaller ones give up the extremes of a group for a finer step.
STARTS = (1.05, 1.0, 0.93, 0.86, 0.79, 0.72)
# Turns of each start, then of the best one.
TURNS = 2
MORE_TURNS = 3

# Beyond it a bf16 zero is so coarse (1/8 of a code from 16 on) that another line may be better.
FAR_ZERO = 16.0
# From this magnitude on a line with its zero outside 0..15 could leave fp32.
HUGE = 2.0**126


def solve(rows: Tensor, group: int) -> Codes:
    """Quantize rows [R, K], bf16, fp16 or fp32 and finite, in groups of `group` columns.

    Equal rows give equal bytes whatever else is in the block. Every group is finite and at least
    as close as rounding on the range that includes zero, where its zero is far away; a constant
    group is exact to bf16.
    """
    x = by_group(rows, group)
    low, high = x.amin(0), x.amax(0)
    unit = unit_of(low, high)
    x.mul_(1 / unit)
    low, high = low / unit, high / unit
    codes = torch.empty_like(x)
    step, origin = _best_line(x, low, high, codes)
    # From here on in the stored values: the zero belongs to the rounded scale, the codes to both.
    scale = stored_scale(step, unit)
    zero = (-origin / (scale / unit)).bfloat16().float()
    odd = (zero.abs() > FAR_ZERO) | (low == high) | (unit >= HUGE)
    odd = odd.nonzero().flatten()
    if odd.numel():
        pick = _nearer_line(x[:, odd], low[odd], high[odd], scale[odd], zero[odd], unit[odd])
        scale[odd], zero[odd] = pick
    round_codes(x, scale / unit, zero, codes)
    return from_groups(codes, scale, zero, rows.shape[0])


def _best_line(x: Tensor, low: Tensor, high: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Step s and value b of code 0 of the best line for groups x [g, n]; `codes` is scratch.

    The fit sees the group as whole numbers from -grid to grid. That is much finer than a code, and
    every sum is of whole numbers below 2**24: exact in fp32, in whatever order a device, a thread
    or a block size takes it.
    """
    group = x.shape[0]
    grid = 2**20 // group
    # A constant group has no range; any line will do, it is replaced at the end.
    cell = (high - low).clamp_min_(1e-30) / (2 * grid)
    centre = (high + low) / 2
    points = torch.sub(x, centre).mul_(1 / cell).round_().clamp_(-grid, grid)
    spare = torch.empty_like(x)
    mean = points.sum(0) / group
    total = mean * group

    def turn(step: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        round_codes(points, step, zero, codes)
        middle = codes.sum(0) / group
        along = torch.mul(codes, points, out=spare).sum(0) - total * middle
        across = torch.mul(codes, codes, out=spare).sum(0) - group * middle * middle
        step = (along / across.clamp_min_(1e-30)).clamp_min_(1e-30)
        return step, middle - mean / step, along * step

    best_gain = torch.full_like(mean, -1.0)
    best_step, best_zero = torch.ones_like(mean), torch.zeros_like(mean)
    for start in STARTS:
        step = torch.full_like(mean, 2 * grid * start / LEVELS)
        zero = torch.full_like(mean, LEVELS / 2)
        for _ in range(TURNS):
            step, zero, gain = turn(step, zero)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_step = torch.where(better, step, best_step)
        best_zero = torch.where(better, zero, best_zero)
    for _ in range(MORE_TURNS):
        best_step, best_zero, _ = turn(best_step, best_zero)
    return best_step * cell, centre - best_step * best_zero * cell


def _nearer_line(
    x: Tensor, low: Tensor, high: Tensor, scale: Tensor, zero: Tensor, unit: Tensor
) -> tuple[Tensor, Tensor]:
    """For each group the given stored line, or min/max over the range with zero if that is nearer.

    The second one's zero lies in 0..15 where bf16 is fine, and a constant group takes code 0 and 1
    with its own magnitude as scale.
    """
    other_scale, other_zero = minmax_line(low, high, unit)
    errors = [_error(x, s / unit, z) for s, z in ((scale, zero), (other_scale, other_zero))]
    # "not nearer" instead of "farther": an error that is no number loses.
    other = ~(errors[0] < errors[1]) | (unit >= HUGE)
    return torch.where(other, other_scale, scale), torch.where(other, other_zero, zero)


def _error(x: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    codes = torch.empty_like(x)
    round_codes(x, step, zero, codes)
    return fold(codes.sub_(zero).mul_(step).sub_(x).square_())
