"""What every solver shares: what it returns, how groups lie while it works, how they are stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from g4tool.kernels.int4 import pack_int4

LEVELS = 15.0  # the highest 4 bit code

_SMALLEST = 2.0**-133  # the first bf16 above zero
LARGEST = float(torch.finfo(torch.bfloat16).max)


@dataclass(frozen=True)
class Codes:
    """Some rows of a weight [R, K] as codes.

    4 bit: `codes` uint8 [R, K] in 0..15, `scale` and `zero` bf16 [K/g, R],
    w = (code - zero) * scale.
    8 bit: `codes` int8 [R, K] in -127..127, `scale` bf16 [R, K/g], no zero, w = code * scale.
    `off_grid` counts the groups of a trained grid that were not on it.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    off_grid: int = 0


@dataclass(frozen=True)
class Packed:
    """Rows of a weight as they are stored, and per row what was lost.

    `qdata` is `packed` of the codes. `error` and `energy`, fp64 [R]: the sums of (w' - w)^2 and of
    w^2.
    """

    qdata: Tensor
    scale: Tensor
    zero: Tensor | None
    error: Tensor
    energy: Tensor
    off_grid: int


def by_group(rows: Tensor, group: int) -> Tensor:
    """Rows [R, K] of any float dtype -> fp32 [group, R * K/group], one group in each column.

    With the groups side by side every sum over a group is a few additions of whole vectors, in an
    order that depends neither on the number of rows nor on the number of threads.
    """
    count = rows.numel() // group
    return torch.empty(group, count, device=rows.device).copy_(rows.reshape(count, group).t())


def fold(values: Tensor) -> Tensor:
    """Sum over dimension 0 of [g, n], g a power of two, by halves; overwrites `values`."""
    size = values.shape[0]
    while size > 1:
        size //= 2
        values[:size].add_(values[size : 2 * size])
    return values[0]


def unit_of(low: Tensor, high: Tensor) -> Tensor:
    """For each group a power of two near its largest magnitude, fp32.

    Dividing by it is exact; after it, squares neither overflow nor vanish, however large or small
    the weights are.
    """
    exponent = torch.maximum(high, -low).view(torch.int32) & 0x7F800000
    # Bounds 2**-100 and 2**126, so that the inverse is an ordinary number too.
    return exponent.clamp_(27 << 23, 253 << 23).view(torch.float32)


def round_codes(x: Tensor, step: Tensor, zero: Tensor | float, out: Tensor) -> None:
    """The codes nearest to groups x [g, n] on the lines (code - zero) * step."""
    torch.mul(x, 1 / step, out=out)
    out.add_(zero).round_().clamp_(0, LEVELS)


def stored_scale(step: Tensor, unit: Tensor, most: float = 2.0**124) -> Tensor:
    """step * unit as bf16 holds it, in fp32: never zero, and at most `most`.

    The default keeps 15 steps finite in fp32.
    """
    return (step * unit).clamp_(_SMALLEST, most).bfloat16().float()


def from_groups(codes: Tensor, scale: Tensor, zero: Tensor, rows: int, off_grid: int = 0) -> Codes:
    """Codes [g, n] with scale and zero [n], as `by_group` orders them, in the stored layout."""
    return Codes(
        codes.to(torch.uint8).t().reshape(rows, -1),
        scale.to(torch.bfloat16).reshape(rows, -1).t().contiguous(),
        zero.to(torch.bfloat16).reshape(rows, -1).t().contiguous(),
        off_grid,
    )


def packed(result: Codes) -> Tensor:
    """The bytes of the codes: uint8 [R, K/2], the even column in the low nibble; 8 bit as it is."""
    return result.codes if result.zero is None else pack_int4(result.codes)


def dequantize(result: Codes) -> Tensor:
    """The fp32 rows [R, K] that the stored values mean."""
    rows, columns = result.codes.shape
    codes = result.codes.to(torch.float32)
    if result.zero is None:
        groups = codes.reshape(rows, result.scale.shape[1], -1)
        return groups.mul_(result.scale.float().unsqueeze(-1)).reshape(rows, columns)
    groups = codes.reshape(rows, result.scale.shape[0], -1)
    groups.sub_(result.zero.float().t().unsqueeze(-1))
    return groups.mul_(result.scale.float().t().unsqueeze(-1)).reshape(rows, columns)
