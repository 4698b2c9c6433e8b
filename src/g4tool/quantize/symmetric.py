"""4 bit with the zero at code 8: least squares over the scale of each group alone."""

import torch
from torch import Tensor

from g4tool.quantize.pack import (
    Codes,
    by_group,
    fold,
    from_groups,
    round_codes,
    stored_scale,
    unit_of,
)

ZERO = 8.0
# Parts of max |x| / 7 to start from. 7/8 is max / -8, which clips nothing where the largest
# weight is negative.
STARTS = (1.0, 0.94, 7 / 8, 0.82, 0.76)
TURNS = 2


def solve(rows: Tensor, group: int) -> Codes:
    """Quantize rows [R, K] in groups of `group` columns, w = (code - 8) * scale, scale positive.

    Each start is followed by turns of rounding and s = <x, q> / <q, q>; the scale with the least
    error as stored wins.
    """
    x = by_group(rows, group)
    low, high = x.amin(0), x.amax(0)
    unit = unit_of(low, high)
    x.mul_(1 / unit)
    scale = best_scale(x, torch.maximum(high, -low) / unit, unit)
    codes = torch.empty_like(x)
    round_codes(x, scale / unit, ZERO, codes)
    return from_groups(codes, scale, torch.full_like(scale, ZERO), rows.shape[0])


def best_scale(x: Tensor, largest: Tensor, unit: Tensor) -> Tensor:
    """The stored scale of groups x [g, n] with largest magnitude `largest`, both over `unit`."""
    codes, spare = torch.empty_like(x), torch.empty_like(x)
    best_error = torch.full_like(unit, torch.inf)
    best = stored_scale(largest / 7, unit)
    for start in STARTS:
        step = (largest * (start / 7)).clamp_(min=1e-30)
        for _ in range(TURNS):
            round_codes(x, step, ZERO, codes)
            codes.sub_(ZERO)
            along = fold(torch.mul(codes, x, out=spare)).clone()
            across = fold(torch.mul(codes, codes, out=spare))
            step = (along / across.clamp_min(1)).clamp_(min=1e-30)
        scale = stored_scale(step, unit)
        step = scale / unit
        round_codes(x, step, ZERO, codes)
        error = fold(codes.sub_(ZERO).mul_(step).sub_(x).square_())
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, scale, best)
    return best
