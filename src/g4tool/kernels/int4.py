"""The int4 weight layout, the matrix products on it, and the modules that hold it.

A weight w [N, K] in groups of g columns is three tensors, in memory and on disk alike:

    qdata  uint8 [N, K/2]   unsigned codes 0..15, the even column in the low nibble
    scale  bf16  [K/g, N]   transposed, contiguous
    zero   bf16  [K/g, N]   in units of the code
    w[n, k] = (code[n, k] - zero[k // g, n]) * scale[k // g, n]

Experts put a leading [E] before every shape. This is ExecuTorch's convention; torchao's own kernels
read signed codes and a zero in units of the weight from the same fields.

The products are defined as: the weight is computed in fp32, rounded to the dtype of the
activations, then multiplied. `kernels.triton_int4` and `triton_tiles`, which run them on a CUDA
device, leave out the rounding where they can.
"""

import torch
from torch import Tensor, nn

from g4tool.kernels.blocks import (
    Rows,
    chosen_product,
    every_product,
    grouped_product,
    product,
)
from g4tool.kernels.register import register, runs_triton


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0..15 [..., K] of any integer or float dtype, K even -> uint8 [..., K/2]."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_int4(qdata: Tensor) -> Tensor:
    """uint8 [..., K/2] -> codes 0..15, uint8 [..., K]."""
    # One 16-bit word a byte, its two bytes being the two codes: cheaper than interleaving two
    # halves. Little-endian, as every machine torch is built for.
    pair = qdata.to(torch.int16)
    return pair.bitwise_or(pair << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def dequantize_int4(qdata: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., N, K] in `dtype`, computed in fp32."""
    groups, count = scale.shape[-2:]
    s = scale.float().transpose(-1, -2).contiguous().unsqueeze(-1)
    z = zero.float().transpose(-1, -2).contiguous().unsqueeze(-1)
    codes = unpack_int4(qdata).to(torch.float32)
    codes = codes.view(*qdata.shape[:-2], count, groups, -1)
    return codes.sub_(z).mul_(s).flatten(-2).to(dtype)


def _rows(qdata: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Rows:
    return lambda start, stop: dequantize_int4(
        qdata[start:stop], scale[:, start:stop], zero[:, start:stop], dtype
    )


def _has_kernels(x: Tensor, qdata: Tensor, scale: Tensor) -> bool:
    """Whether `triton_int4` runs this product."""
    if not runs_triton(x.device) or not x.numel():
        return False
    from g4tool.kernels import triton_int4

    return triton_int4.takes(x, qdata, scale)


@register("g4::int4_mm", lambda x, qdata, *_: x.new_empty((*x.shape[:-1], qdata.shape[0])))
def int4_mm(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [..., K] @ w.T -> [..., N] in the dtype of x."""
    if _has_kernels(x, qdata, scale):
        from g4tool.kernels import triton_tiles

        out: Tensor = triton_tiles.int4_mm(x, qdata, scale, zero)
        return out
    return product(x, qdata.shape[0], _rows(qdata, scale, zero, x.dtype))


@register(
    "g4::int4_grouped_mm", lambda x, offsets, qdata, *_: x.new_empty((x.shape[0], qdata.shape[1]))
)
def int4_grouped_mm(
    x: Tensor, offsets: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor
) -> Tensor:
    """x [M, K] sorted by expert, offsets int32 [E] where each one ends -> [M, N]."""
    if _has_kernels(x, qdata, scale):
        from g4tool.kernels import triton_tiles

        out: Tensor = triton_tiles.int4_grouped(x, offsets, qdata, scale, zero)
        return out
    return grouped_product(
        x, offsets, qdata.shape[1], lambda e: _rows(qdata[e], scale[e], zero[e], x.dtype)
    )


@register(
    "g4::int4_chosen_mm", lambda x, index, qdata, *_: x.new_empty((*index.shape, qdata.shape[1]))
)
def int4_chosen_mm(x: Tensor, index: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [N, k, K] through expert index [N, k] of each row -> [N, k, out]."""
    if _has_kernels(x, qdata, scale):
        from g4tool.kernels import triton_int4

        out: Tensor = triton_int4.int4_chosen(x, index, qdata, scale, zero)
        return out

    def expert(number: Tensor) -> Rows:
        picked = [part.index_select(0, number)[0] for part in (qdata, scale, zero)]
        return _rows(picked[0], picked[1], picked[2], x.dtype)

    return chosen_product(x, index, qdata.shape[1], expert)


@register(
    "g4::int4_every_mm",
    lambda x, qdata, *_: x.new_empty((qdata.shape[0], x.shape[1], qdata.shape[1])),
)
def int4_every_mm(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [E or 1, N, K] through every expert -> [E, N, out]."""
    experts, count = qdata.shape[:2]
    return every_product(x, experts, count, lambda e: _rows(qdata[e], scale[e], zero[e], x.dtype))


class _Int4(nn.Module):
    """Holds one int4 weight as the buffers qdata, scale and zero."""

    qdata: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, qdata: Tensor, scale: Tensor, zero: Tensor) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)


class Int4Linear(_Int4):
    """A linear layer without bias on an int4 weight [N, K]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        return int4_mm(x, self.qdata, self.scale, self.zero)


class Int4ExpertLinear(_Int4):
    """One int4 matrix an expert: weight [E, N, K]."""

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        return int4_chosen_mm(x, index, self.qdata, self.scale, self.zero)

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, K] sorted by expert -> [M, N]; offsets int32 [E] is where each one ends."""
        return int4_grouped_mm(x, offsets, self.qdata, self.scale, self.zero)

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K], each expert's own or common to all -> [E, rows, N]."""
        return int4_every_mm(x, self.qdata, self.scale, self.zero)
