"""Grouped-query attention with normalised queries, keys and values and a scale of one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.model.cache import KeyValueCache, Span
from g4tool.model.config import LayerConfig, TextConfig
from g4tool.model.norm import RMSNorm, rms_norm
from g4tool.model.rope import rotate


class Attention(nn.Module):
    """One layer's attention. A layer that shares another's keys and values has only q and o.

    `cache` is None (whole sequences only) or this layer's own store.
    """

    def __init__(self, config: TextConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.head_dim = layer.head_dim
        self.eps = config.rms_norm_eps
        self.makes_kv = layer.kv_source is None
        self.value_from_key = layer.value_from_key
        self.cache: KeyValueCache | None = None
        width = config.num_heads * layer.head_dim
        kv_width = layer.num_kv_heads * layer.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.q_norm = RMSNorm(layer.head_dim, self.eps)
        if self.makes_kv:
            self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
            self.k_norm = RMSNorm(layer.head_dim, self.eps)
            if not self.value_from_key:
                self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, span: Span, shared: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, S, d] -> [B, S, d], and keys and values attended to [B, kv heads, K, head_dim].

        `shared` is that second result of the layer named by kv_source, if there is one.
        """
        queries = self._heads(self.q_proj(x))
        queries = rotate(self.q_norm(queries), span.cos, span.sin).transpose(1, 2)
        keys, values = self._keys_values(x, span) if shared is None else shared
        if x.shape[1] == 1:
            # A group's query heads stand in for a sequence: keys are read once, not once a head.
            mixed = F.scaled_dot_product_attention(
                queries.view(x.shape[0], keys.shape[1], -1, self.head_dim),
                keys,
                values,
                attn_mask=span.mask,
                scale=1.0,
            )
            # Kernels differ in the strides of their result, and a traced view would bake in one.
            mixed = mixed.clone(memory_format=torch.contiguous_format).view(queries.shape)
        else:
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=span.mask, scale=1.0, enable_gqa=True
            )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out, (keys, values)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def _keys_values(self, x: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        raw = self._heads(self.k_proj(x))
        values = raw if self.value_from_key else self._heads(self.v_proj(x))
        keys = rotate(self.k_norm(raw), span.cos, span.sin).transpose(1, 2)
        values = rms_norm(values, self.eps).transpose(1, 2)
        # Without slots to write to, this is a whole sequence that leaves the cache alone.
        if self.cache is None or (span.slots is None and span.newest is None):
            return keys, values
        return self.cache.update(keys, values, span)
