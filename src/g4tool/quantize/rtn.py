"""4 bit by rounding to nearest between the minimum and the maximum of each group, asymmetric."""

import torch
from torch import Tensor

from g4tool.quantize.pack import (
    LARGEST,
    LEVELS,
    Codes,
    by_group,
    from_groups,
    round_codes,
    stored_scale,
    unit_of,
)


def solve(rows: Tensor, group: int) -> Codes:
    """Quantize rows [R, K] in groups of `group` columns; zero is not rounded to a whole code.

    The range includes zero, so that the stored zero lies in 0..15, where bf16 is fine enough.
    """
    x = by_group(rows, group)
    low, high = x.amin(0), x.amax(0)
    unit = unit_of(low, high)
    scale, zero = minmax_line(low / unit, high / unit, unit)
    x.mul_(1 / unit)
    codes = torch.empty_like(x)
    round_codes(x, scale / unit, zero, codes)
    return from_groups(codes, scale, zero, rows.shape[0])


def minmax_line(low: Tensor, high: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Stored scale and zero for groups of the range low..high, both in units of `unit`.

    A constant group gets its own magnitude as scale, so that code 0 or 1 is exactly its value.
    """
    least, most = low.clamp(max=0), high.clamp(min=0)
    scale = torch.where(
        low == high,
        stored_scale(most - least, unit, LARGEST),
        stored_scale((most - least) / LEVELS, unit),
    )
    return scale, (-least / (scale / unit)).bfloat16().float().clamp_(0, LEVELS)
