"""float32 copies of a bfloat16 model's parameters, and the optimizer that moves them."""

import torch
from torch import Tensor, nn

from tiny.state import Tensors

BETAS = (0.9, 0.95)
CLIP = 1.0


class Masters:
    """Small updates gather in float32 `values`; the model holds them rounded to bfloat16."""

    def __init__(self, network: nn.Module, values: Tensors, decay: float) -> None:
        self.values = values
        self.parameters: list[Tensor] = list(network.parameters())
        masters = list(values.values())
        for value in masters:
            value.grad = torch.zeros_like(value)
        fused = masters[0].is_cuda
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [v for v in masters if v.dim() > 1], "weight_decay": decay},
                {"params": [v for v in masters if v.dim() == 1], "weight_decay": 0.0},
            ],
            betas=BETAS,
            fused=fused,
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Takes the model's gradients over and makes one step at learning rate `rate`."""
        masters = list(self.values.values())
        torch._foreach_copy_(_gradients(masters), _gradients(self.parameters))
        torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, masters)
        for parameter in self.parameters:
            parameter.grad = None


def _gradients(values: list[Tensor]) -> list[Tensor]:
    return [value.grad for value in values if value.grad is not None]
