"""Grouped-query attention with normalised queries, keys and values and a scale of one."""

from typing import Any

from torch import nn

from g4tool.model.arithmetic import PLAIN, Arithmetic, KeysValues
from g4tool.model.cache import KeyValueCache, Span
from g4tool.model.config import LayerConfig, TextConfig
from g4tool.model.norm import RMSNorm


class Attention(nn.Module):
    """One layer's attention. A layer that shares another's keys and values has only q and o.

    `cache` is None (whole sequences only) or this layer's own store.
    """

    arithmetic: Arithmetic = PLAIN

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
        self, x: Any, span: Span, shared: KeysValues | None = None
    ) -> tuple[Any, KeysValues]:
        """x [B, S, d] -> [B, S, d], and keys and values attended to [B, kv heads, K, head_dim].

        `shared` is that second result of the layer named by kv_source, if there is one. x and the
        first result may be of the arithmetic's own kind.
        """
        run = self.arithmetic
        queries, own = run.heads(
            run.products(self._projections(), x),
            span,
            self.q_norm,
            self.k_norm if self.makes_kv else None,
            self.value_from_key,
            self.cache,
        )
        keys_values = own if shared is None else shared
        assert keys_values is not None
        mixed = run.attend(queries, *keys_values, span)
        return run.product(self.o_proj, mixed), keys_values

    def _projections(self) -> list[nn.Module]:
        if not self.makes_kv:
            return [self.q_proj]
        return [self.q_proj, self.k_proj, *([] if self.value_from_key else [self.v_proj])]
