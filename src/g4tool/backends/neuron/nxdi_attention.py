"""Gemma 4's attention on NxD Inference's attention base class."""

# mypy: disable-error-code="import-not-found, import-untyped, misc"

from typing import Any, NamedTuple

from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.gqa import replicate_kv
from torch import Tensor

from g4tool.backends.neuron.nxdi_cache import KeysValues
from g4tool.backends.neuron.nxdi_config import Gemma4InferenceConfig
from g4tool.model.config import LayerConfig, TextConfig
from g4tool.model.norm import RMSNorm, rms_norm
from g4tool.model.rope import rotate
from g4tool.parallel.plan import kv_heads


class NeuronSpan(NamedTuple):
    """What a layer's attention needs to know of a step.

    cos, sin: rotary tables [B, S, 1, head_dim / 2]. mask: bool, of the chunk's own tokens
    [.., S, S] in a prompt, of the cached ones [B, 1, 1, slots] for one token. past: the cached keys
    and values, None in a prompt. position_ids: int64 [B, S].
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor
    position_ids: Tensor
    past: KeysValues | None = None


class NeuronAttention(NeuronAttentionBase):
    """One layer's attention. A layer that shares another's keys and values has only q and o."""

    def __init__(self, config: Gemma4InferenceConfig, text: TextConfig, layer: LayerConfig) -> None:
        # A scale of one: NxD divides by softmax_scale, sqrt(head_dim) unless it is told.
        super().__init__(
            config=config,
            hidden_size=text.hidden_size,
            num_attention_heads=text.num_heads,
            num_key_value_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            softmax_scale=1.0,
        )
        # Nothing here asks for the rank, and each layer's would have to be in every shard.
        self.rank_util = None
        self.eps = text.rms_norm_eps
        self.makes_kv = layer.kv_source is None
        self.value_from_key = layer.value_from_key
        self.source_kv_heads = layer.num_kv_heads
        self.num_heads = text.num_heads // self.tp_degree
        self.num_key_value_heads = len(kv_heads(layer, text.num_heads, self.tp_degree, 0))
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        width = text.num_heads * layer.head_dim
        self.q_proj = self._columns(width)
        self.q_norm = RMSNorm(layer.head_dim, self.eps)
        if self.makes_kv:
            kv_width = self.num_key_value_heads * self.tp_degree * layer.head_dim
            self.k_proj = self._columns(kv_width)
            self.k_norm = RMSNorm(layer.head_dim, self.eps)
            if not self.value_from_key:
                self.v_proj = self._columns(kv_width)
        self.o_proj = RowParallelLinear(
            width,
            self.hidden_size,
            bias=False,
            input_is_parallel=True,
            dtype=self.torch_dtype,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
            reduce_dtype=self.rpl_reduce_dtype,
        )

    def init_gqa_properties(self) -> None:
        """Nothing: the base class would make a v_proj for layers that have none."""

    def forward(
        self, x: Tensor, span: NeuronSpan, shared: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """x [B, S, d] -> [B, S, d], and the keys and values made of x [B, kv heads, S, head_dim].

        `shared` is that second result of the layer named by kv_source, if there is one.
        """
        batch, length, _ = x.shape
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), span.cos, span.sin)
        queries = queries.transpose(1, 2)
        keys, values = self._keys_values(x, span) if shared is None else shared
        if span.past is None:
            mixed, _ = self.perform_prefill(queries, keys, values, length, batch, span.mask)
        else:
            mixed = self.compute_for_token_gen(
                queries, keys, values, span.position_ids, span.past, span.mask, active_mask=None
            )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out, (keys, values)

    def preshard_hook(self, model_state_dict: dict[str, Tensor], prefix: str) -> None:
        """Repeats key-value heads in the whole weights, so that every rank is cut its own."""
        repeats = self.num_key_value_heads * self.tp_degree // self.source_kv_heads
        for projection in ("k_proj", "v_proj"):
            name = f"{prefix.removesuffix('weight')}{projection}.weight"
            if repeats > 1 and name in model_state_dict:
                model_state_dict[name], _ = replicate_kv(
                    model_state_dict[name], self.source_kv_heads, repeats
                )

    def _columns(self, width: int) -> Any:
        return ColumnParallelLinear(
            self.hidden_size,
            width,
            bias=False,
            gather_output=False,
            dtype=self.torch_dtype,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def _keys_values(self, x: Tensor, span: NeuronSpan) -> KeysValues:
        raw = self._heads(self.k_proj(x))
        values = raw if self.value_from_key else self._heads(self.v_proj(x))
        keys = rotate(self.k_norm(raw), span.cos, span.sin).transpose(1, 2)
        return keys, rms_norm(values, self.eps).transpose(1, 2)
