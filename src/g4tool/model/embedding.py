"""Token embedding: rows by id, and the same matrix as the output head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A table of `vocab` rows: weight [vocab, dim]. A quantized twin has the same two methods."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., dim], unscaled, for ids int64 [...]."""
        return F.embedding(ids, self.weight)

    def project(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden [..., dim] against every row: the tied output head."""
        return F.linear(hidden, self.weight)


def root_scales(dim: int) -> dict[torch.dtype, float]:
    """sqrt(dim) as each compute dtype holds it: in bfloat16 sqrt(5376) = 73.32 becomes 73.5.

    The trained models expect the rounded factor. Plain numbers, because a compiler may fold a
    16-bit constant at higher precision than the dtype it was written in.
    """
    return {
        dtype: torch.tensor(math.sqrt(dim), dtype=dtype, device="cpu").item()
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
