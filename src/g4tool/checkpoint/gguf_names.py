"""Between canonical names and the tensors' names in GGUF files; no other file knows the latter."""

import re

ROPE_FREQS = "rope_freqs.weight"
"""Divides the rotary frequencies of the full layers; no weight of the model's own."""

# The experts' gate and up projections, where a file has them apart.
_PAIR = ("ffn_gate_exps.weight", "ffn_up_exps.weight")

_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj.weight",
    "ffn_down_exps.weight": "experts.down_proj.weight",
    # Scaling an expert's output is scaling what comes out of its down projection.
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
_TO_GGUF = {canonical: name for name, canonical in (_TOP | _LAYER).items()}
_CANONICAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def gguf_name(name: str) -> str:
    """The GGUF name of a canonical name."""
    found = _CANONICAL_LAYER.fullmatch(name)
    return f"blk.{found[1]}.{_TO_GGUF[found[2]]}" if found else _TO_GGUF[name]


def canonical_name(name: str) -> str | None:
    """The canonical name of a GGUF name, of each half of the experts' gate and up projection too.

    None for a tensor that no Gemma 4 text model has.
    """
    found = _GGUF_LAYER.fullmatch(name)
    if found is None:
        return _TOP.get(name)
    halves = dict.fromkeys(_PAIR, "experts.gate_up_proj.weight")
    inner = (_LAYER | halves).get(found[2])
    return None if inner is None else f"layers.{int(found[1])}.{inner}"


def expert_pair(name: str) -> tuple[str, str] | None:
    """Gate and up projection of the layer, where `name` is one of the two by itself."""
    found = _GGUF_LAYER.fullmatch(name)
    if found is None or found[2] not in _PAIR:
        return None
    gate, up = _PAIR
    return f"blk.{found[1]}.{gate}", f"blk.{found[1]}.{up}"
