"""One decoder layer: attention, feed-forward (with experts or without), per-layer embedding."""

from typing import Any

import torch
from torch import Tensor, nn

from g4tool.model.arithmetic import PLAIN, Arithmetic, KeysValues
from g4tool.model.attention import Attention
from g4tool.model.cache import Span
from g4tool.model.config import LayerConfig, TextConfig
from g4tool.model.feed_forward import FeedForward
from g4tool.model.moe import Experts, Router
from g4tool.model.norm import RMSNorm
from g4tool.model.per_layer import gated


class DecoderLayer(nn.Module):
    """A norm before and after each branch; `layer_scalar` [1] scales the whole stream."""

    layer_scalar: Tensor
    arithmetic: Arithmetic = PLAIN

    def __init__(self, config: TextConfig, layer: LayerConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.has_experts = config.moe is not None
        self.has_per_layer = config.per_layer_dim > 0
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(dim, layer.intermediate_size)
        self.input_layernorm = RMSNorm(dim, eps)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.pre_feedforward_layernorm = RMSNorm(dim, eps)
        self.post_feedforward_layernorm = RMSNorm(dim, eps)
        if config.moe is not None:
            self.router = Router(dim, config.moe, eps)
            self.experts = Experts(dim, config.moe)
            self.post_feedforward_layernorm_1 = RMSNorm(dim, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(dim, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(dim, eps)
        if self.has_per_layer:
            self.per_layer_input_gate = nn.Linear(dim, config.per_layer_dim, bias=False)
            self.per_layer_projection = nn.Linear(config.per_layer_dim, dim, bias=False)
            self.post_per_layer_input_norm = RMSNorm(dim, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        span: Span,
        shared: KeysValues | None = None,
        per_layer: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """x [B, S, d] -> [B, S, d], and the keys and values its attention used (see Attention).

        per_layer [B, S, P] is this layer's own input where the model has per-layer embeddings.
        """
        run = self.arithmetic
        attended, keys_values = self.self_attn(run.norm(self.input_layernorm, x), span, shared)
        x, given = run.join(
            x, attended, self.post_attention_layernorm, before=self.pre_feedforward_layernorm
        )
        out, after = self._feed_forward(x, given), self.post_feedforward_layernorm
        if self.has_per_layer:
            assert per_layer is not None
            x, given = run.join(x, out, after)
            out = gated(given, per_layer, self.per_layer_input_gate, self.per_layer_projection, run)
            after = self.post_per_layer_input_norm
        return run.leave(x, out, after, self.layer_scalar), keys_values

    def _feed_forward(self, x: Tensor, given: Any) -> Any:
        """x is the stream, `given` its norm; see Arithmetic for what comes back."""
        dense = self.mlp(given)
        if not self.has_experts:
            return dense
        run = self.arithmetic
        # The router reads the raw residual; only the experts' own input is normalised.
        weights, index = run.route(self.router, x)
        mixed = self.experts(run.norm(self.pre_feedforward_layernorm_2, x), weights, index)
        return run.both(
            dense, mixed, self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2
        )
