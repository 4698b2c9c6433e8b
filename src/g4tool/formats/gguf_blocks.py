"""Quantized rows as the blocks of 32 values that ggml computes with: Q4_0, Q4_1, Q8_0.

A block is its scale d in half precision, in Q4_1 then the minimum m, then the codes q: the value is
(q - 8) * d in Q4_0, q * d + m in Q4_1, q * d in Q8_0. Of 4-bit codes, the first 16 of a block are
the low halves of 16 bytes and the other 16 the high ones.
"""

import torch
from torch import Tensor

BLOCK = 32
_CODES = {"Q4_0": 16, "Q4_1": 16, "Q8_0": 128}


def pack_int4(qdata: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Rows of an int4 weight (see g4tool.kernels.int4) as Q4_1, without `zero` as Q4_0.

    qdata uint8 [N, K/2], scale and zero [K/g, N], g a multiple of 32; gives uint8 [N, bytes].
    """
    rows, columns = qdata.shape[0], 2 * qdata.shape[1]
    codes = torch.stack((qdata & 15, qdata >> 4), dim=-1).view(
        rows, columns // BLOCK, 2, BLOCK // 2
    )
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    parts = [_by_block(scale.T.half(), columns)]
    if zero is not None:
        parts.append(_by_block(_minimum(scale, zero).T.half(), columns))
    return torch.cat((*parts, packed), dim=-1).view(rows, -1)


def pack_int8(qdata: Tensor, scale: Tensor) -> Tensor:
    """Rows of an int8 weight as Q8_0: qdata int8 [N, K], scale [N, K/g]; gives uint8 [N, bytes]."""
    rows, columns = qdata.shape
    codes = qdata.contiguous().view(torch.uint8).view(rows, columns // BLOCK, BLOCK)
    return torch.cat((_by_block(scale.half(), columns), codes), dim=-1).view(rows, -1)


def rounding(kind: str, scale: Tensor, zero: Tensor | None) -> float:
    """How far half precision moves a weight at most, in steps of the coarsest group.

    `kind` is one of the three types; infinity where a scale or a minimum does not fit at all.
    """
    off = scale.half().float() - scale.float()
    if zero is None:
        worst = (_CODES[kind] / 2 if kind == "Q4_0" else _CODES[kind]) * off.abs().max()
    else:
        minimum = _minimum(scale, zero)
        least = minimum.half().float() - minimum
        worst = torch.maximum(least.abs(), (least + (_CODES[kind] - 1) * off).abs()).max()
    coarsest = float(scale.abs().max())
    moved = float(worst)
    if moved == 0.0:
        return 0.0
    return moved / coarsest if torch.isfinite(worst) and coarsest > 0 else float("inf")


def _minimum(scale: Tensor, zero: Tensor) -> Tensor:
    return -(zero.float() * scale.float())


def _by_block(values: Tensor, columns: int) -> Tensor:
    """One a group [N, K/g], float16, as the two bytes of each block: uint8 [N, K/32, 2]."""
    each = values.repeat_interleave(columns // BLOCK // values.shape[1], dim=1)
    return each.contiguous().view(torch.uint8).view(*each.shape, 2)
