"""One decoder layer: attention, feed-forward (with experts or without), per-layer embedding."""

import torch
from torch import Tensor, nn

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
        shared: tuple[Tensor, Tensor] | None = None,
        per_layer: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, S, d] -> [B, S, d], and the keys and values its attention used (see Attention).

        per_layer [B, S, P] is this layer's own input where the model has per-layer embeddings.
        """
        attended, keys_values = self.self_attn(self.input_layernorm(x), span, shared)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self._feed_forward(x))
        if self.has_per_layer:
            assert per_layer is not None
            added = gated(x, per_layer, self.per_layer_input_gate, self.per_layer_projection)
            x = x + self.post_per_layer_input_norm(added)
        scaled: Tensor = x * self.layer_scalar
        return scaled, keys_values

    def _feed_forward(self, x: Tensor) -> Tensor:
        dense: Tensor = self.mlp(self.pre_feedforward_layernorm(x))
        if not self.has_experts:
            return dense
        # The router reads the raw residual; only the experts' own input is normalised.
        weights, index = self.router(x)
        mixed = self.experts(self.pre_feedforward_layernorm_2(x), weights, index)
        dense = self.post_feedforward_layernorm_1(dense)
        mixed = self.post_feedforward_layernorm_2(mixed)
        both: Tensor = dense + mixed
        return both
