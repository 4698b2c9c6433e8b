"""Root-mean-square normalisation with a plain scale."""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension; in float32, cast back.

    The scale is the weight itself, not one plus the weight as in Gemma 1 to 3.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if scale is not None:
        wide = wide * scale.float()
    return wide.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale: weight [dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> the same shape and dtype."""
        return rms_norm(x, self.eps, self.weight)
