"""Gemma 4's text model on NxD Inference's model base class: all variants in one definition.

A layer's arithmetic is the canonical `DecoderLayer.forward`; only the parts that are split over
ranks, or that keep a cache, are made anew.
"""

# mypy: disable-error-code="import-not-found, import-untyped, misc"

from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from neuronx_distributed_inference.models.model_base import NeuronBaseModel
from neuronx_distributed_inference.modules.generation.sampling import create_sampler
from torch import Tensor, nn

from g4tool.backends.neuron.nxdi_attention import NeuronAttention, NeuronSpan
from g4tool.backends.neuron.nxdi_cache import KeysValues, LayerCaches
from g4tool.backends.neuron.nxdi_config import Gemma4InferenceConfig
from g4tool.backends.neuron.nxdi_feed_forward import NeuronExperts, NeuronFeedForward
from g4tool.backends.neuron.nxdi_layout import cache_shapes, cache_slots
from g4tool.backends.neuron.nxdi_ring import prompt_mask, token_mask
from g4tool.errors import G4Error
from g4tool.model.config import AttentionKind, LayerConfig, TextConfig
from g4tool.model.decoder import DecoderLayer
from g4tool.model.embedding import root_scales
from g4tool.model.moe import Router
from g4tool.model.norm import RMSNorm
from g4tool.model.per_layer import per_layer_rows
from g4tool.model.rope import rope_tables
from g4tool.model.text import softcapped


class NeuronDecoderLayer(DecoderLayer):
    """The canonical layer with parallel attention and feed-forward."""

    def __init__(self, config: Gemma4InferenceConfig, text: TextConfig, layer: LayerConfig) -> None:
        nn.Module.__init__(self)
        dim, eps = text.hidden_size, text.rms_norm_eps
        self.has_experts = text.moe is not None
        self.has_per_layer = text.per_layer_dim > 0
        self.self_attn = NeuronAttention(config, text, layer)
        self.mlp = NeuronFeedForward(config, dim, layer.intermediate_size)
        norms = [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
        if text.moe is not None:
            self.router = Router(dim, text.moe, eps)
            self.experts = NeuronExperts(config, dim, text.moe)
            norms += [
                "post_feedforward_layernorm_1",
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_2",
            ]
        if self.has_per_layer:
            # Whole on every rank: splitting these small matrices would cost a reduction a layer.
            self.per_layer_input_gate = nn.Linear(dim, text.per_layer_dim, bias=False)
            self.per_layer_projection = nn.Linear(text.per_layer_dim, dim, bias=False)
            norms.append("post_per_layer_input_norm")
        for name in norms:
            self.add_module(name, RMSNorm(dim, eps))
        # Not a buffer as in the canonical layer: tracing would bake its value into the program.
        self.layer_scalar = nn.Parameter(torch.ones(1))


class TiedHead(nn.Module):
    """Logits from the rows of the embedding that this rank holds: no second copy of them."""

    def __init__(self, embedding: Any, softcap: float | None, gather_output: bool) -> None:
        super().__init__()
        self.table = (embedding,)  # in a tuple, so that it is not registered as a part of this
        self.softcap = softcap
        self.gather_output = gather_output
        self.tensor_parallel_group = embedding.tensor_model_parallel_group

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, d] -> logits [B, S, V], or the rank's part of them if not gathered."""
        scores = F.linear(x, self.table[0].weight)
        if self.gather_output:
            scores = gather_from_tensor_model_parallel_region(
                scores, process_group=self.tensor_parallel_group
            )
        return softcapped(scores, self.softcap)


class UntiedHead(ColumnParallelLinear):
    """Logits from a matrix of their own."""

    softcap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """As TiedHead's."""
        return softcapped(super().forward(x), self.softcap)


class NeuronTextModel(NeuronBaseModel):
    """The text model as NxD Inference traces it: one step's inputs to logits and caches."""

    def setup_attr_for_model(self, config: Gemma4InferenceConfig) -> None:
        """The attributes that the base class asks for."""
        settings = config.neuron_config
        self.text = config.text
        self.on_device_sampling = settings.on_device_sampling_config is not None
        self.tp_degree = settings.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = settings.max_batch_size
        self.buckets = settings.buckets

    def init_model(self, config: Gemma4InferenceConfig) -> None:
        """The modules, their parameters named canonically (see nxdi_layout)."""
        text, dtype = self.text, config.neuron_config.torch_dtype
        dim, eps = text.hidden_size, text.rms_norm_eps
        self.kinds: dict[AttentionKind, LayerConfig] = {x.attention: x for x in text.layers}
        self.embed_scales = root_scales(dim)
        self.embed_tokens = _table(text.vocab_size, dim, dtype)
        if text.per_layer_dim:
            width = text.num_layers * text.per_layer_dim
            self.per_layer_scales = root_scales(text.per_layer_dim)
            self.embed_tokens_per_layer = _table(text.per_layer_vocab_size, width, dtype)
            self.per_layer_model_projection = ColumnParallelLinear(
                dim, width, bias=False, gather_output=True, dtype=dtype
            )
            self.per_layer_projection_norm = RMSNorm(text.per_layer_dim, eps)
        self.layers = nn.ModuleList(
            NeuronDecoderLayer(config, text, layer) for layer in text.layers
        )
        self.norm = RMSNorm(dim, eps)
        # On devices NxD's sampler searches all ranks' parts; on a CPU, what it is given.
        gather = not self.on_device_sampling or config.neuron_config.on_cpu
        if text.tie_word_embeddings:
            self.lm_head = TiedHead(self.embed_tokens, text.softcap, gather)
        else:
            self.lm_head = UntiedHead(
                dim, text.vocab_size, bias=False, gather_output=gather, dtype=dtype
            )
            self.lm_head.softcap = text.softcap

    def init_inference_optimization(self, config: Gemma4InferenceConfig) -> None:
        """The sampler, where tokens are chosen on the device, and each layer's caches."""
        settings = config.neuron_config
        if self.on_device_sampling:
            group = self.lm_head.tensor_parallel_group
            self.sampler = create_sampler(settings, group.size())
        shapes = cache_shapes(
            self.text, settings.tp_degree, settings.kv_cache_batch_size, settings.max_length
        )
        self.kv_mgr = LayerCaches(
            shapes,
            settings.attention_dtype or settings.torch_dtype,
            settings.is_continuous_batching,
        )

    def get_model_output(
        self,
        input_ids: Tensor,
        seq_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        is_for_context_encoding: bool = False,
        inputs_embeds: Tensor | None = None,
        vision_embeddings: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Final normalised states [B, S, d] of a step, and all caches after it.

        input_ids, position_ids [B, S], right-padded prompts or one token a row; attention_mask
        [B, 1, 1, bucket] says which cached tokens a single token sees, never itself. Raises G4Error
        for inputs of a multimodal model.
        """
        if inputs_embeds is not None or vision_embeddings is not None:
            raise G4Error("the Neuron port runs text only: it takes token ids, not embeddings.")
        positions = position_ids.view(input_ids.shape).long()
        x = self.embed_tokens(input_ids)
        x = x * self.embed_scales[x.dtype]
        per_layer = self._per_layer(input_ids, x) if self.text.per_layer_dim else None
        past = {} if is_for_context_encoding else self.kv_mgr.read(attention_mask.shape[-1])
        spans = {kind: self._span(kind, x, positions, attention_mask, past) for kind in self.kinds}
        made: dict[int, KeysValues] = {}
        for number, (layer, block) in enumerate(zip(self.text.layers, self.layers, strict=True)):
            source = number if layer.kv_source is None else layer.kv_source
            span = spans[layer.attention]._replace(past=past.get(source))
            own = None if per_layer is None else per_layer[:, :, number]
            x, keys_values = block(x, span, made.get(source), own)
            made[source] = keys_values
        if is_for_context_encoding:
            return self.norm(x), self.kv_mgr.write_prompt(made, positions, seq_ids)
        return self.norm(x), self.kv_mgr.write_token(made, positions)

    def _per_layer(self, input_ids: Tensor, x: Tensor) -> Tensor:
        return per_layer_rows(
            input_ids,
            x,
            self.embed_tokens_per_layer,
            self.per_layer_scales,
            self.per_layer_model_projection,
            self.per_layer_projection_norm,
            self.text,
        )

    def _span(
        self,
        kind: AttentionKind,
        x: Tensor,
        positions: Tensor,
        attention_mask: Tensor,
        past: dict[int, KeysValues],
    ) -> NeuronSpan:
        layer = self.kinds[kind]
        cos, sin = rope_tables(positions, self.text.rope[kind], layer.head_dim, x.dtype)
        window = self.text.sliding_window if kind == "sliding" else None
        if not past:
            mask = prompt_mask(x.shape[1], window, x.device)
            return NeuronSpan(cos, sin, mask, positions)
        ring = cache_slots(layer, self.text, self.neuron_config.max_length)
        mask = token_mask(min(ring, attention_mask.shape[-1]), positions, ring)
        if kind == "full":
            mask = mask & attention_mask.bool()
        return NeuronSpan(cos, sin, mask, positions)


def _table(rows: int, dim: int, dtype: torch.dtype) -> Any:
    return ParallelEmbedding(rows, dim, dtype=dtype, use_spmd_rank=True)
