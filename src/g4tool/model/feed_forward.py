"""The dense feed-forward: a gated linear unit with tanh-approximated GELU."""

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """down(gelu(gate x) * up x): gate, up [intermediate, hidden], down [hidden, intermediate]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out
