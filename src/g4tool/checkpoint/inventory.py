"""Every tensor a text model has, under its canonical name, with its shape.

Canonical names are Hugging Face's text names without prefix; experts end in `.weight` like all
other matrices.
"""

from collections.abc import Iterator

from g4tool.model.config import LayerConfig, TextConfig

Shape = tuple[int, ...]


def text_tensors(config: TextConfig) -> dict[str, Shape]:
    """Shapes by canonical name, in the order the model uses them."""
    width, layers = config.hidden_size, config.num_layers
    shapes: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, width)}
    if config.per_layer_dim:
        packed = layers * config.per_layer_dim
        shapes["embed_tokens_per_layer.weight"] = (config.per_layer_vocab_size, packed)
        shapes["per_layer_model_projection.weight"] = (packed, width)
        shapes["per_layer_projection_norm.weight"] = (config.per_layer_dim,)
    for index, layer in enumerate(config.layers):
        shapes.update((f"layers.{index}.{k}", v) for k, v in _layer_tensors(config, layer))
    shapes["norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def _layer_tensors(config: TextConfig, layer: LayerConfig) -> Iterator[tuple[str, Shape]]:
    width, per_layer = config.hidden_size, config.per_layer_dim
    yield "input_layernorm.weight", (width,)
    yield from _attention_tensors(config, layer)
    yield "post_attention_layernorm.weight", (width,)
    yield "pre_feedforward_layernorm.weight", (width,)
    yield "mlp.gate_proj.weight", (layer.intermediate_size, width)
    yield "mlp.up_proj.weight", (layer.intermediate_size, width)
    yield "mlp.down_proj.weight", (width, layer.intermediate_size)
    if config.moe:
        experts, inner = config.moe.num_experts, config.moe.intermediate_size
        yield "post_feedforward_layernorm_1.weight", (width,)
        yield "pre_feedforward_layernorm_2.weight", (width,)
        yield "router.proj.weight", (experts, width)
        yield "router.scale", (width,)
        yield "router.per_expert_scale", (experts,)
        yield "experts.gate_up_proj.weight", (experts, 2 * inner, width)
        yield "experts.down_proj.weight", (experts, width, inner)
        yield "post_feedforward_layernorm_2.weight", (width,)
    yield "post_feedforward_layernorm.weight", (width,)
    if per_layer:
        yield "per_layer_input_gate.weight", (per_layer, width)
        yield "per_layer_projection.weight", (width, per_layer)
        yield "post_per_layer_input_norm.weight", (width,)
    yield "layer_scalar", (1,)


def _attention_tensors(config: TextConfig, layer: LayerConfig) -> Iterator[tuple[str, Shape]]:
    width, head_dim = config.hidden_size, layer.head_dim
    queries, keys = config.num_heads * head_dim, layer.num_kv_heads * head_dim
    yield "self_attn.q_proj.weight", (queries, width)
    yield "self_attn.q_norm.weight", (head_dim,)
    if layer.kv_source is None:
        yield "self_attn.k_proj.weight", (keys, width)
        yield "self_attn.k_norm.weight", (head_dim,)
        if not layer.value_from_key:
            yield "self_attn.v_proj.weight", (keys, width)
    yield "self_attn.o_proj.weight", (width, queries)
