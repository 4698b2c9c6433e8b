"""Rotary position embedding, computed from positions, so that any context length works.

Nothing is stored: a buffer of inverse frequencies would be rounded by `model.to(bfloat16)` and
would stay behind when a model is built on the meta device.
"""

import torch
from torch import Tensor

from g4tool.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Radians a position for each of the head_dim / 2 channel pairs: float32 [head_dim / 2].

    theta^(-2i / head_dim) for the first `rotated` share of the pairs, zero (no rotation) for the
    rest. The denominator is the whole head size even where only a part of it is rotated.
    """
    pairs = int(rope.rotated * head_dim // 2)
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device=device) / head_dim
    rotated = 1.0 / rope.theta**exponents
    if 2 * pairs == head_dim:
        return rotated
    still = torch.zeros(head_dim // 2 - pairs, dtype=torch.float32, device=device)
    return torch.cat((rotated, still))


def rope_tables(
    positions: Tensor, rope: RopeConfig, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, 1, head_dim / 2] in `dtype`, for positions int64 [B, S]."""
    frequencies = inverse_frequencies(rope, head_dim, positions.device)
    angles = positions[..., None, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, S, heads, D] by tables [B, S, 1, D / 2]; the pairs are (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
