"""The int8 weight layout, the matrix products on it, and the modules that hold it.

A weight w [N, K] in groups of g columns (g = K: one scale a row) is two tensors:

    qdata  int8 [N, K]
    scale  bf16 [N, K/g]
    w[n, k] = qdata[n, k] * scale[n, k // g]

Experts put a leading [E] before every shape.

The products are defined as: the weight is computed in fp32, rounded to the dtype of the
activations, then multiplied. `kernels.triton_int8`, which runs one row on a CUDA device, does not
round.
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

# Rows of bf16 up to which torch's own CPU kernel is used.
_FEW_ROWS = 16


def dequantize_int8(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., N, K] in `dtype`, computed in fp32."""
    codes = qdata.to(torch.float32).view(*scale.shape, -1)
    return codes.mul_(scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _rows(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Rows:
    return lambda start, stop: dequantize_int8(qdata[start:stop], scale[start:stop], dtype)


@register("g4::int8_mm", lambda x, qdata, *_: x.new_empty((*x.shape[:-1], qdata.shape[0])))
def int8_mm(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] @ w.T -> [..., N] in the dtype of x."""
    if runs_triton(x.device):
        from g4tool.kernels import triton_int8

        if triton_int8.takes(x, qdata, scale):
            out: Tensor = triton_int8.int8_vector(x, qdata, scale)
            return out
    if _few_on_cpu(x, qdata, scale):
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch._weight_int8pack_mm(flat, qdata, scale[:, 0])
        return out.view(*x.shape[:-1], -1)
    return product(x, qdata.shape[0], _rows(qdata, scale, x.dtype))


def _few_on_cpu(x: Tensor, qdata: Tensor, scale: Tensor) -> bool:
    """Whether torch's own kernel takes the product, and is faster than dequantizing.

    It rounds the result once, where the definition rounds each weight too.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == scale.dtype == torch.bfloat16
        and scale.shape[1] == 1
        and qdata.is_contiguous()
        and qdata.shape[0] % 16 == 0
        and qdata.shape[1] % 32 == 0
        and 0 < x.numel() // x.shape[-1] <= _FEW_ROWS
    )


@register(
    "g4::int8_grouped_mm", lambda x, offsets, qdata, *_: x.new_empty((x.shape[0], qdata.shape[1]))
)
def int8_grouped_mm(x: Tensor, offsets: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """x [M, K] sorted by expert, offsets int32 [E] where each one ends -> [M, N]."""
    return grouped_product(x, offsets, qdata.shape[1], lambda e: _rows(qdata[e], scale[e], x.dtype))


@register(
    "g4::int8_chosen_mm", lambda x, index, qdata, *_: x.new_empty((*index.shape, qdata.shape[1]))
)
def int8_chosen_mm(x: Tensor, index: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """x [N, k, K] through expert index [N, k] of each row -> [N, k, out]."""

    def expert(number: Tensor) -> Rows:
        return _rows(qdata.index_select(0, number)[0], scale.index_select(0, number)[0], x.dtype)

    return chosen_product(x, index, qdata.shape[1], expert)


@register(
    "g4::int8_every_mm",
    lambda x, qdata, *_: x.new_empty((qdata.shape[0], x.shape[1], qdata.shape[1])),
)
def int8_every_mm(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """x [E or 1, N, K] through every expert -> [E, N, out]."""
    experts, count = qdata.shape[:2]
    return every_product(x, experts, count, lambda e: _rows(qdata[e], scale[e], x.dtype))


class _Int8(nn.Module):
    """Holds one int8 weight as the buffers qdata and scale."""

    qdata: Tensor
    scale: Tensor

    def __init__(self, qdata: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)


class Int8Linear(_Int8):
    """A linear layer without bias on an int8 weight [N, K]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        return int8_mm(x, self.qdata, self.scale)


class Int8Embedding(_Int8):
    """An embedding on an int8 table [vocab, dim], and the same table as the tied output head.

    No activation tells what dtype rows should have, so they have that of `like`, an empty tensor,
    or without one that of `scale`.
    """

    like: Tensor | None

    def __init__(self, qdata: Tensor, scale: Tensor, like: Tensor | None = None) -> None:
        super().__init__(qdata, scale)
        self.register_buffer("like", like)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., dim], unscaled, for ids int64 [...]; only those rows are dequantized."""
        dtype = (self.scale if self.like is None else self.like).dtype
        return dequantize_int8(self.qdata[ids], self.scale[ids], dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden [..., dim] against every row."""
        return int8_mm(hidden, self.qdata, self.scale)


class Int8ExpertLinear(_Int8):
    """One int8 matrix an expert: weight [E, N, K]."""

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        return int8_chosen_mm(x, index, self.qdata, self.scale)

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, K] sorted by expert -> [M, N]; offsets int32 [E] is where each one ends."""
        return int8_grouped_mm(x, offsets, self.qdata, self.scale)

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K], each expert's own or common to all -> [E, rows, N]."""
        return int8_every_mm(x, self.qdata, self.scale)
