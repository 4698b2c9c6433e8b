"""int4 on a CPU at decode: torch's own kernel for a few rows of bf16, on its own weight layout.

`prepare` replaces a model's int4 modules by twins that hold, in as many bytes,

    packed      uint8 [N, K/2]      in torch's order, see below
    scale_zero  bf16 [K/g, N, 2]    scale, and the value of code 8: w = (code - 8) * scale + value

Rounding that value to bf16 moves a weight about as rounding the weight itself would, but the exact
zero is gone; so this is for running in bf16, and a model that is evaluated, exported or run in fp32
keeps the layout of `kernels.int4`.

torch packs rows in blocks of 64 (AVX-512) or 32 (AVX2), each block column by column: byte b of a
column has row b in the low nibble and row b + half a block in the high one. That is no documented
layout, so it is tried out before it is relied on.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from g4tool.kernels import blocks
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear, unpack_int4

# Up to so many rows torch's kernel is faster than dequantizing for a matrix product.
_FEW_ROWS = 64
_GROUPS = (32, 64, 128, 256)


def prepare(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace the int4 modules on the CPU that torch's kernel takes; return how many.

    `dtype` is that of the activations; for any but bf16 nothing is done, nor where a scale is no
    bf16 number and would be rounded. The weights are repacked in place: the modules that were
    there are not to be used again.
    """
    count = 0
    block = block_rows() if dtype == torch.bfloat16 else None
    for path, module in list(model.named_modules()):
        if isinstance(module, (Int4Linear, Int4ExpertLinear)) and block and _fits(module, block):
            twin = CpuInt4Linear if isinstance(module, Int4Linear) else CpuInt4ExpertLinear
            model.set_submodule(path, twin(*_repacked(module, block)))
            count += 1
    return count


@lru_cache
def block_rows() -> int | None:
    """Rows of a block in torch's layout here; None where it has no such kernel or another order."""
    rows, columns = 128, 32
    codes = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) * 7919 % 16
    try:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    for block in (64, 32):
        if torch.equal(_codes(packed.view(-1, columns, block // 2)), _by_block(codes, block)):
            return block
    return None


def _by_block(codes: Tensor, block: int) -> Tensor:
    return codes.view(-1, block, codes.shape[1]).transpose(1, 2).to(torch.uint8)


def _codes(packed: Tensor) -> Tensor:
    """Blocks [n, K, B/2] of packed bytes -> codes [n, K, B]."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fits(module: Int4Linear | Int4ExpertLinear, block: int) -> bool:
    count, half = module.qdata.shape[-2:]
    groups = module.scale.shape[-2]
    return (
        module.qdata.device.type == "cpu"
        and count % block == 0
        and 2 * half // groups in _GROUPS
        and module.qdata.is_contiguous()
        and bool((module.scale.bfloat16() == module.scale).all())
    )


def _repacked(module: Int4Linear | Int4ExpertLinear, block: int) -> tuple[Tensor, Tensor]:
    qdata = module.qdata
    # A block takes the same bytes in both layouts.
    for rows in torch.split(qdata.view(-1, qdata.shape[-1]), block * 16):
        rows.copy_(torch._convert_weight_to_int4pack_for_cpu(unpack_int4(rows).int(), 1))
    scale = module.scale.float()
    value = scale * (8 - module.zero.float())
    return qdata, torch.stack([scale, value], -1).bfloat16()


def product(x: Tensor, packed: Tensor, scale_zero: Tensor) -> Tensor:
    """x [..., K] @ w.T -> [..., N] in the dtype of x."""
    flat = x.reshape(-1, x.shape[-1])
    if x.dtype == torch.bfloat16 and 0 < len(flat) <= _FEW_ROWS:
        group = x.shape[-1] // scale_zero.shape[0]
        out = torch._weight_int4pack_mm_for_cpu(flat.contiguous(), packed, group, scale_zero)
        return out.view(*x.shape[:-1], -1)
    block = block_rows()
    assert block is not None
    groups, columns = len(scale_zero), x.shape[-1]
    out = flat.new_empty((len(flat), packed.shape[0]))
    step = max(1, blocks.block_rows(columns, x.device) // block)
    lying = packed.view(-1, columns, block // 2)
    # Unpacked, a byte's two rows lie side by side; scales and results take that order.
    scales = scale_zero.view(groups, -1, 2, block // 2, 2).permute(4, 1, 0, 3, 2)
    for start in range(0, len(lying), step):
        codes = unpack_int4(lying[start : start + step])
        size = len(codes)
        scale, value = scales[:, start : start + size].float().reshape(2, size, groups, 1, block)
        by_group = codes.float().view(size, groups, -1, block)
        wide = torch.addcmul(value - 8 * scale, by_group, scale).view(codes.shape)
        weight = torch.empty(columns, size, block, dtype=x.dtype).copy_(wide.transpose(0, 1))
        made = flat @ weight.view(columns, -1)
        into = out[:, start * block : (start + size) * block].view(-1, size, 2, block // 2)
        into.copy_(made.view(len(flat), size, block // 2, 2).transpose(2, 3))
    return out.view(*x.shape[:-1], packed.shape[0])


class _CpuInt4(nn.Module):
    packed: Tensor
    scale_zero: Tensor

    def __init__(self, packed: Tensor, scale_zero: Tensor) -> None:
        super().__init__()
        self.register_buffer("packed", packed)
        self.register_buffer("scale_zero", scale_zero)


class CpuInt4Linear(_CpuInt4):
    """A linear layer without bias: packed [N, K/2], scale_zero [K/g, N, 2]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        return product(x, self.packed, self.scale_zero)


class CpuInt4ExpertLinear(_CpuInt4):
    """One matrix an expert: packed [E, N, K/2], scale_zero [E, K/g, N, 2]."""

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
        flat = x.reshape(-1, x.shape[-1])
        out = x.new_empty((len(flat), self.packed.shape[1]))
        for row, expert in enumerate(index.flatten().tolist()):
            out[row] = product(flat[row], self.packed[expert], self.scale_zero[expert])
        return out.view(*index.shape, -1)

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, K] sorted by expert -> [M, N]; offsets int32 [E] is where each one ends."""
        out = x.new_zeros((x.shape[0], self.packed.shape[1]))
        start = 0
        for expert, stop in enumerate(offsets.tolist()):
            if stop > start:
                rows = x[start:stop]
                out[start:stop] = product(rows, self.packed[expert], self.scale_zero[expert])
            start = stop
        return out

    def every(self, x: Tensor) -> Tensor:
        """x [E or 1, rows, K], each expert's own or common to all -> [E, rows, N]."""
        each = x.expand(len(self.packed), -1, -1)
        parts = zip(each, self.packed, self.scale_zero, strict=True)
        return torch.stack([product(*part) for part in parts])
