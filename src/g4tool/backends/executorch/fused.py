"""Quantized leaves for AOTInductor, on the bundle's layout as it is.

For one token an int4 product is a kernel in Triton, which the compiler takes into its code, or else
a sum over elements that it makes one kernel of: unpacking, dequantizing and summing. Either way no
weight is ever in memory in 16 bit. For more tokens the weight of one layer is computed, multiplied
and forgotten; int4 experts are multiplied tile by tile.

Each weight is rounded to the dtype of the activations as in the eager definition, but not in the
kernels for one token. Sums are in fp32.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear, dequantize_int8
from g4tool.model.moe import Experts


def _int4_halves(
    qdata: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights of even and of odd columns, each [..., N, groups, g/2] in `dtype`."""
    groups = scale.shape[-2]
    shape = (*qdata.shape[:-1], groups, -1)
    s = scale.to(torch.float32).transpose(-1, -2).unsqueeze(-1)
    z = zero.to(torch.float32).transpose(-1, -2).unsqueeze(-1)
    low = torch.bitwise_and(qdata, 15).to(torch.float32).view(shape)
    high = torch.bitwise_right_shift(qdata, 4).to(torch.float32).view(shape)
    return ((low - z) * s).to(dtype), ((high - z) * s).to(dtype)


def _int4_weight(qdata: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., N, K]."""
    return torch.stack(_int4_halves(qdata, scale, zero, dtype), -1).flatten(-3)


def _int4_row(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [..., 1, K] with weights [..., N, K] -> [..., N] in the dtype of x."""
    groups = scale.shape[-2]
    even, odd = _int4_halves(qdata, scale, zero, x.dtype)
    shape = (*x.shape[:-1], groups, -1)
    x_even = x[..., 0::2].to(torch.float32).reshape(shape)
    x_odd = x[..., 1::2].to(torch.float32).reshape(shape)
    parts = even.to(torch.float32) * x_even + odd.to(torch.float32) * x_odd
    return parts.sum((-1, -2)).to(x.dtype)


def _int8_row(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    weight = dequantize_int8(qdata, scale, x.dtype).to(torch.float32)
    return (weight * x.to(torch.float32)).sum(-1).to(x.dtype)


class FusedInt4Linear(Int4Linear):
    """Twin of Int4Linear."""

    triton = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., S, K] -> [..., S, N]."""
        if x.numel() == x.shape[-1]:
            if self.triton:
                from g4tool.backends.executorch.triton_rows import int4_row

                out: Tensor = int4_row(x, self.qdata, self.scale, self.zero)
                return out
            row = _int4_row(x.reshape(1, -1), self.qdata, self.scale, self.zero)
            return row.view(*x.shape[:-1], -1)
        return F.linear(x, _int4_weight(self.qdata, self.scale, self.zero, x.dtype))


class FusedInt8Linear(Int8Linear):
    """Twin of Int8Linear."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., S, K] -> [..., S, N]."""
        return _int8(x, self.qdata, self.scale)


class FusedInt8Embedding(Int8Embedding):
    """Twin of Int8Embedding."""

    def project(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden [..., dim] against every row."""
        return _int8(hidden, self.qdata, self.scale)


def _int8(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    if x.numel() == x.shape[-1]:
        return _int8_row(x.reshape(1, -1), qdata, scale).view(*x.shape[:-1], -1)
    return F.linear(x, dequantize_int8(qdata, scale, x.dtype))


class FusedInt4ExpertLinear(Int4ExpertLinear):
    """Twin of Int4ExpertLinear. A plain one neither sorts nor groups."""

    triton = False

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        if self.triton:
            from g4tool.backends.executorch.triton_rows import int4_chosen

            out: Tensor = int4_chosen(x, index, self.qdata, self.scale, self.zero)
            return out
        picked = [part[index] for part in (self.qdata, self.scale, self.zero)]
        return _int4_row(x.unsqueeze(-2), picked[0], picked[1], picked[2])

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, K] sorted by expert -> [M, N]; offsets int32 [E] is where each one ends."""
        from g4tool.kernels.triton_tiles import int4_grouped

        out: Tensor = int4_grouped(x, offsets, self.qdata, self.scale, self.zero)
        return out

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K] -> [E, rows, N]."""
        weight = _int4_weight(self.qdata, self.scale, self.zero, x.dtype)
        return torch.matmul(x, weight.transpose(1, 2))


class FusedInt8ExpertLinear(Int8ExpertLinear):
    """Twin of Int8ExpertLinear."""

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        return _int8_row(x.unsqueeze(-2), self.qdata[index], self.scale[index])

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K] -> [E, rows, N]."""
        return torch.matmul(x, dequantize_int8(self.qdata, self.scale, x.dtype).transpose(1, 2))


_TWINS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    Int4Linear: FusedInt4Linear,
    Int4ExpertLinear: FusedInt4ExpertLinear,
    Int8Linear: FusedInt8Linear,
    Int8Embedding: FusedInt8Embedding,
    Int8ExpertLinear: FusedInt8ExpertLinear,
}


def make_fused(model: nn.Module, triton: bool = False) -> None:
    """Swap every quantized leaf of `model` for its twin here, in place; it keeps the tensors.

    They become parameters: the compiler copies buffers, all of them, in case code writes to them.
    `triton`: one token, and experts, go through the kernels where they take the shapes.
    """
    for path, leaf in list(model.named_modules()):
        make = _TWINS.get(type(leaf))
        if make is None:
            continue
        parts = dict(leaf.named_buffers(recurse=False))
        twin = make(**parts)
        for name, part in parts.items():
            delattr(twin, name)
            twin.register_parameter(name, nn.Parameter(part, requires_grad=False))
        if triton and _takes(twin):
            twin.triton = True  # type: ignore[assignment]
        model.set_submodule(path, twin)


def groups_experts(experts: Experts) -> bool:
    """Whether both matrices of these experts have a grouped product that compiles."""
    return all(getattr(leaf, "triton", False) for leaf in (experts.gate_up_proj, experts.down_proj))


def _takes(leaf: nn.Module) -> bool:
    """Whether the kernels in Triton run one row of this leaf."""
    if not isinstance(leaf, FusedInt4Linear | FusedInt4ExpertLinear):
        return False
    from g4tool.kernels import triton_int4

    row = leaf.qdata.new_empty((1, 2 * leaf.qdata.shape[-1]), dtype=torch.bfloat16)
    return triton_int4.takes(row, leaf.qdata, leaf.scale)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention in plain products; scores and softmax in fp32 like torch's own
    kernels, whatever the dtype of the inputs.

    ExecuTorch's Triton kernel in its place takes boolean masks only. Raises ValueError for what it
    would compute otherwise than torch: a boolean mask, `is_causal`, dropout.
    """
    if is_causal or dropout_p or (attn_mask is not None and attn_mask.dtype == torch.bool):
        raise ValueError("attention takes an additive mask, neither is_causal nor dropout")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = _scores(query, key)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if scale != 1.0:
        scores = scores * scale
    if attn_mask is not None:
        scores = scores + attn_mask.to(torch.float32)
    return torch.matmul(torch.softmax(scores, -1).to(value.dtype), value)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """query [B, H, S, D] by key [B, H, K, D] -> fp32 [B, H, S, K]."""
    rows = query.shape[-2]
    if isinstance(rows, int) and rows <= _FEW:
        # A sum over elements reads the keys as they are: a product would make a copy in fp32.
        return (query.float().unsqueeze(-2) * key.float().unsqueeze(-3)).sum(-1)
    return torch.matmul(query.float(), key.float().transpose(-1, -2))


_FEW = 16
