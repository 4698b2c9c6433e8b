"""The dense feed-forward: a gated linear unit with tanh-approximated GELU."""

from typing import Any

from torch import nn

from g4tool.model.arithmetic import PLAIN, Arithmetic


class FeedForward(nn.Module):
    """down(gelu(gate x) * up x): gate, up [intermediate, hidden], down [hidden, intermediate]."""

    arithmetic: Arithmetic = PLAIN

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Any) -> Any:
        """x [..., hidden] -> the same shape; either may be of the arithmetic's own kind."""
        run = self.arithmetic
        return run.product(
            self.down_proj, run.gated(run.products((self.gate_proj, self.up_proj), x))
        )
