"""Quantized leaves in operators that ExecuTorch's runtime has, exact: packed bytes in the file,
weights only inside the program.

An int4 weight is held transposed, qdata uint8 [K/2, N], so that neither its scales nor the product
have to be turned around in every call: seven times faster than rows. Low nibbles are the even
columns and high nibbles the odd ones, so the activations are split alike. `>>` has no kernel in the
runtime, torch.bitwise_right_shift has. A product of two computed matrices goes to XNNPACK as bmm
only.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.backends.executorch.dynamic import DynamicInt4Linear
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear, dequantize_int8


def _nibbles(qdata: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """uint8 [..., K/2, N] -> the codes of even and of odd columns, fp32 [..., groups, g/2, N]."""
    low = torch.bitwise_and(qdata, 15).to(torch.float32)
    high = torch.bitwise_right_shift(qdata, 4).to(torch.float32)
    split = (*qdata.shape[:-2], groups, -1, qdata.shape[-1])
    return low.view(split), high.view(split)


def _product(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [B, M, K] with int4 weights [B, K/2, N] -> [B, M, N]: weights first, then one product."""
    s, z = scale.to(torch.float32).unsqueeze(-2), zero.to(torch.float32).unsqueeze(-2)
    halves = [(codes - z) * s for codes in _nibbles(qdata, scale.shape[-2])]
    weight = torch.cat([half.flatten(-3, -2) for half in halves], -2)
    return torch.bmm(torch.cat((x[..., 0::2], x[..., 1::2]), -1), weight)


def _product_of_row(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The same for x [B, 1, K]: s (q x - z sum x) a group, which makes no weight at all."""
    batch, groups, count = scale.shape
    codes = [half.flatten(0, 1) for half in _nibbles(qdata, groups)]
    parts = [part.reshape(batch * groups, 1, -1) for part in (x[..., 0::2], x[..., 1::2])]
    sums = (parts[0].sum(-1) + parts[1].sum(-1)).view(batch, groups, 1)
    dots = torch.bmm(parts[0], codes[0]) + torch.bmm(parts[1], codes[1])
    dots = dots.view(batch, groups, count) - zero.to(torch.float32) * sums
    return (dots * scale.to(torch.float32)).sum(1, keepdim=True)


def _int4(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    function = _product_of_row if x.shape[-2] == 1 else _product
    return function(x.to(torch.float32), qdata, scale, zero).to(x.dtype)


def _int8(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] with int8 weights [N, K] -> [..., N]."""
    if scale.shape[-1] == 1:  # one scale a row comes after the product
        product = F.linear(x.to(torch.float32), qdata.to(torch.float32))
        return (product * scale[:, 0].to(torch.float32)).to(x.dtype)
    return F.linear(x, dequantize_int8(qdata, scale, x.dtype))


class _Transposed(nn.Module):
    """An int4 weight, its bytes transposed; the buffers keep their names."""

    qdata: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, leaf: Int4Linear | Int4ExpertLinear) -> None:
        super().__init__()
        self.register_buffer("qdata", leaf.qdata.transpose(-1, -2).contiguous())
        self.register_buffer("scale", leaf.scale)
        self.register_buffer("zero", leaf.zero)


class PlainInt4Linear(_Transposed):
    """Twin of Int4Linear."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, K] or [S, K] -> the same with N for K, in the dtype of x."""
        # A batch of one throughout, so rows may stand for it.
        rows = x.reshape(1, -1, x.shape[-1])
        out = _int4(rows, self.qdata[None], self.scale[None], self.zero[None])
        return out.view(*x.shape[:-1], out.shape[-1])


class PlainInt4ExpertLinear(_Transposed):
    """Twin of Int4ExpertLinear, for programs that neither sort nor group."""

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        picked = [
            part.index_select(0, index.flatten()) for part in (self.qdata, self.scale, self.zero)
        ]
        out = _int4(x.flatten(0, 1).unsqueeze(1), picked[0], picked[1], picked[2])
        return out.view(*index.shape, out.shape[-1])

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K] -> [E, rows, N]."""
        wide = x.expand(self.qdata.shape[0], -1, -1)
        return _int4(wide, self.qdata, self.scale, self.zero)


class PlainInt8Linear(Int8Linear):
    """Int8Linear without its own operator."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        return _int8(x, self.qdata, self.scale)


class PlainInt8Embedding(Int8Embedding):
    """Int8Embedding without its own operator."""

    def project(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden [..., dim] against every row."""
        return _int8(hidden, self.qdata, self.scale)


class PlainInt8ExpertLinear(Int8ExpertLinear):
    """Int8ExpertLinear without its own operators."""

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        picked = [part.index_select(0, index.flatten()) for part in (self.qdata, self.scale)]
        weight = dequantize_int8(picked[0], picked[1], x.dtype)
        out = torch.bmm(weight, x.flatten(0, 1).unsqueeze(-1))
        return out.view(*index.shape, weight.shape[1])

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K] -> [E, rows, N]."""
        weight = dequantize_int8(self.qdata, self.scale, x.dtype)
        return torch.bmm(x.expand(weight.shape[0], -1, -1), weight.transpose(1, 2))


_INT8: dict[type[nn.Module], Callable[..., nn.Module]] = {
    Int8Linear: PlainInt8Linear,
    Int8Embedding: PlainInt8Embedding,
    Int8ExpertLinear: PlainInt8ExpertLinear,
}
PLAIN = (
    PlainInt4Linear,
    PlainInt4ExpertLinear,
    PlainInt8Linear,
    PlainInt8Embedding,
    PlainInt8ExpertLinear,
)


def make_plain(model: nn.Module, int8_activations: bool = False) -> None:
    """Swap every quantized leaf of `model` for its twin here, one at a time, in place.

    `int8_activations`: int4 linear layers become those of g4tool.backends.executorch.dynamic;
    experts and int8 weights stay exact.
    """
    for path, leaf in list(model.named_modules()):
        if isinstance(leaf, Int4Linear):
            linear = DynamicInt4Linear if int8_activations else PlainInt4Linear
            model.set_submodule(path, linear(leaf))
        elif isinstance(leaf, Int4ExpertLinear):
            model.set_submodule(path, PlainInt4ExpertLinear(leaf))
        elif twin := _INT8.get(type(leaf)):
            model.set_submodule(path, twin(**dict(leaf.named_buffers(recurse=False))))
    if int8_activations:
        from torchao.utils import unwrap_tensor_subclass

        unwrap_tensor_subclass(model)
