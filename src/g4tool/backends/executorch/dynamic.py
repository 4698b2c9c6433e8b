"""Int4 linear layers on XNNPACK's int8 kernels: activations are quantized as the program runs.

XNNPACK has no zero points for weights, so W = s (q - 8) + s (8 - z) is split: the first part is
what its kernel multiplies, the second is exact, one small product with the sums of each group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.kernels.int4 import Int4Linear, unpack_int4


class DynamicInt4Linear(nn.Module):
    """Twin of Int4Linear."""

    correction: Tensor

    def __init__(self, leaf: Int4Linear) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
            IntxUnpackedToInt8Tensor,
            IntxUnpackedToInt8TensorActivationQuantization,
        )

        codes = (unpack_int4(leaf.qdata).to(torch.int8) - 8).contiguous()
        scale = leaf.scale.float().t().contiguous()
        self.groups = scale.shape[1]
        rows, columns = codes.shape
        weight = IntxUnpackedToInt8Tensor(
            codes,
            scale,
            torch.zeros_like(scale, dtype=torch.int8),
            torch.int4,  # type: ignore[attr-defined]
            (1, columns // self.groups),
            torch.float32,
            IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN,
        )
        self.linear = nn.Linear(columns, rows, bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("correction", scale * (8 - leaf.zero.float().t()))

    def forward(self, x: Tensor) -> Tensor:
        """x fp32 [..., K] -> [..., N]."""
        sums = x.reshape(*x.shape[:-1], self.groups, -1).sum(-1)
        product: Tensor = self.linear(x)
        return product + F.linear(sums, self.correction)
