"""The canonical model made ready to learn: initial weights, dropout, balanced experts.

Two modules are exchanged for training and only for it: the norms that end a branch also drop
elements, and routers also report how evenly they spread tokens. Parameters keep their names.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.model.config import TextConfig
from g4tool.model.decoder import DecoderLayer
from g4tool.model.moe import Router
from g4tool.model.norm import RMSNorm, rms_norm
from g4tool.model.text import TextModel

BRANCH_ENDS = (
    "post_attention_layernorm",
    "post_feedforward_layernorm",
    "post_per_layer_input_norm",
)
SCALARS = (0.75, 1.25)
"""Layer scalars, in turn: fixed before training, so that a runtime that skips them is caught."""


class DroppingNorm(RMSNorm):
    """The norm at the end of a branch, followed by dropout while training."""

    def __init__(self, dim: int, eps: float, drop: float) -> None:
        super().__init__(dim, eps)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """x [..., dim] -> the same shape."""
        return F.dropout(super().forward(x), self.drop, self.training)


class ReportingRouter(Router):
    """A router that keeps `balance`: experts * sum of (share of tokens * mean probability).

    It is 1 when experts are used evenly (Switch Transformer, equation 4).
    """

    balance: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As Router."""
        weights, index = super().forward(x)
        scores = self.proj(rms_norm(x, self.eps) * self.scale * self.root)
        experts = scores.shape[-1]
        probability = torch.softmax(scores, dim=-1, dtype=torch.float32).reshape(-1, experts)
        chosen = index.reshape(-1, 1) == torch.arange(experts, device=index.device)
        share = chosen.float().mean(0)
        self.balance = experts * (share.detach() * probability.mean(0)).sum()
        return weights, index


def make(config: TextConfig, drop: float, seed: int) -> TextModel:
    """A model of `config` in float32 on the CPU, initialised from `seed`, in training mode."""
    torch.manual_seed(seed)
    model = TextModel(config)
    for block in model.layers:
        layer = cast(DecoderLayer, block)
        for name in BRANCH_ENDS:
            if hasattr(layer, name):
                setattr(layer, name, DroppingNorm(config.hidden_size, config.rms_norm_eps, drop))
        if config.moe is not None:
            layer.router = ReportingRouter(config.hidden_size, config.moe, config.rms_norm_eps)
            # The grouped matmul has no gradient.
            layer.experts.prefill = "every"
    initialise(model)
    return model.train()


@torch.no_grad()
def initialise(model: TextModel) -> None:
    """Initial weights: unit streams, attention scores of variance one, quiet branches."""
    config = model.config
    branches = 2 * config.num_layers
    for name, value in model.named_parameters():
        kind = name.rsplit(".", 2)[-2]
        if kind == "embed_tokens_per_layer":
            value.normal_(std=config.per_layer_dim**-0.5)
        elif kind in ("q_norm", "k_norm"):
            # Scores are q.k without a further scale, and both have unit channels.
            value.fill_(value.numel() ** -0.25)
        elif kind in BRANCH_ENDS:
            value.fill_(branches**-0.5)
        elif name.endswith("router.proj.weight"):
            value.normal_(std=0.5)
        elif value.dim() > 1:
            value.normal_(std=value.shape[-1] ** -0.5)
    for number, block in enumerate(model.layers):
        layer = cast(DecoderLayer, block)
        layer.layer_scalar.fill_(SCALARS[number % len(SCALARS)])


def loss(model: TextModel, rows: Tensor, balance_weight: float) -> tuple[Tensor, Tensor]:
    """Mean next-token loss of rows int64 [B, S + 1], and what is to be minimised (it and balance).

    Both float32 scalars, in nats a token.
    """
    logits = model(rows[:, :-1]).flatten(0, 1).float()
    token_loss = F.cross_entropy(logits, rows[:, 1:].flatten())
    total = token_loss
    for layer in model.layers:
        router = getattr(layer, "router", None)
        if isinstance(router, ReportingRouter):
            total = total + balance_weight * (router.balance - 1)
    return token_loss.detach(), total


@torch.no_grad()
def row_losses(model: nn.Module, rows: Tensor, batch: int = 32) -> Tensor:
    """Loss of each predicted token, float32 [N, S], of rows int64 [N, S + 1]; in eval mode."""
    training = model.training
    model.eval()
    found = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        logits = model(part[:, :-1]).float()
        found.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    model.train(training)
    return torch.cat(found)


def expert_shares(model: TextModel, rows: Tensor) -> list[list[float]]:
    """The share of choices that went to each expert, by layer, over rows int64 [N, S]."""
    shares: list[list[float]] = []

    def note(router: nn.Module, _: object, output: tuple[Tensor, Tensor]) -> None:
        counts = torch.bincount(output[1].flatten(), minlength=experts)
        shares.append((counts / counts.sum()).tolist())

    if model.config.moe is None:
        return shares
    experts = model.config.moe.num_experts
    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, Router)]
    with torch.no_grad():
        model.hidden(rows)
    for hook in hooks:
        hook.remove()
    return shares
