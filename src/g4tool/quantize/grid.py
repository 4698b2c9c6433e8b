"""4 bit for weights that were trained on a grid: recovers the grid instead of fitting a new one.

Quantization-aware training for Q4_0 leaves weights d * k with whole k in -8..7 for every 32
columns, rounded to bf16, d being the group's largest weight (with its sign) over -8. Any other fit
moves the weights off the values they were trained at.
"""

import torch
from torch import Tensor

from g4tool.quantize.pack import (
    Codes,
    by_group,
    fold,
    from_groups,
    stored_scale,
    unit_of,
)
from g4tool.quantize.symmetric import best_scale

GROUP = 32
# A weight and the largest one are each within half a unit of bf16's last place of d * k, which is
# up to 2**-8 of it.
_TOLERANCE = 2.0**-7 * 1.01


def is_grid(solver: str | None) -> bool:
    """Whether a plan's solver is this one."""
    return solver in ("grid", "grid-symmetric")


def solve(rows: Tensor, group: int, zero_at_8: bool = False) -> Codes:
    """The trained codes of rows [R, K]; a group that is on no grid is fitted with zero at code 8.

    The stored scale is |d|, and the zero is 8, or 7 with mirrored codes where d is negative: the
    same values, and no reader meets a negative scale. With `zero_at_8` scale is d itself.
    """
    x = by_group(rows, group)
    low, high = x.amin(0), x.amax(0)
    unit = unit_of(low, high)
    x.mul_(1 / unit)
    largest = torch.maximum(high, -low) / unit
    # The sign of d: the largest weight is code -8 of it.
    sign = torch.where(high > -low, -1.0, 1.0)
    step, found = _grid_step(x, largest, sign)
    fitted = best_scale(x, largest, unit)
    scale = torch.where(found, stored_scale(step, unit), fitted)
    sign = torch.where(found, sign, 1.0)
    levels = (x / (scale / unit * sign)).round_().clamp_(-8, 7)
    off_grid = int((~found).sum())
    if zero_at_8:
        return from_groups(
            levels + 8, scale * sign, torch.full_like(scale, 8.0), rows.shape[0], off_grid
        )
    zero = torch.where(sign > 0, 8.0, 7.0)
    return from_groups(levels.mul_(sign).add_(zero), scale, zero, rows.shape[0], off_grid)


def _grid_step(x: Tensor, largest: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
    """|d| for each group of x [g, n], and whether every weight is a multiple of it."""
    step = torch.ones_like(largest)
    # All zeros are on any grid.
    found = largest == 0
    for top in range(8, 0, -1):
        d = largest.clamp_min(1e-30) * sign / top
        levels = (x / d).round_()
        near = ((levels * d - x).abs() <= _TOLERANCE * x.abs()) & (levels >= -8) & (levels <= 7)
        new = near.all(0) & ~found
        if new.any():
            step = torch.where(new, _refined(x, levels, d).abs(), step)
            found = found | new
    return step, found


def _refined(x: Tensor, levels: Tensor, d: Tensor) -> Tensor:
    """d, or the least squares one if that is closer to the weights, each rounded to bf16."""
    along, across = fold(levels * x), fold(levels * levels)
    first = d.bfloat16().float()
    second = (along / across.clamp_min(1)).bfloat16().float()
    errors = [fold((levels * step - x).square_()) for step in (first, second)]
    return torch.where(errors[1] < errors[0], second, first)
