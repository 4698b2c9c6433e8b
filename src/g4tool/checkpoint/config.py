"""Reads and writes config.json: both spellings, text-only and inside a multimodal wrapper.

The published spelling has `global_head_dim` and `num_global_key_value_heads` for the full layers;
transformers since 5.15 saves `per_layer_config` with one entry a layer instead. Absent keys take
the defaults of transformers' Gemma4TextConfig and Gemma4UnifiedTextConfig, since a saved config
leaves out what equals them.
"""

import math
from collections.abc import Mapping
from typing import Any

from g4tool.checkpoint.settings import Settings, shown
from g4tool.errors import G4Error
from g4tool.model.config import (
    AttentionKind,
    LayerConfig,
    MoeConfig,
    RopeConfig,
    TextConfig,
    kv_sources,
)

_KINDS: dict[str, AttentionKind] = {"sliding_attention": "sliding", "full_attention": "full"}
_LAYER_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
_UNIFIED_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
# Far above every Gemma 4: what costs time or memory by its number alone is refused at once.
_MOST_LAYERS = 10_000
_MOST_EXPERTS = 65_536

_TEXT_TYPES = {"gemma4_text": _DEFAULTS, "gemma4_unified_text": _UNIFIED_DEFAULTS}
_WRAPPER_TYPES = {"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}


def parse_text_config(raw: Mapping[str, Any], where: str = "config.json") -> TextConfig:
    """The text model that a config.json's content describes.

    `where` is the file's name for messages. Raises G4Error, naming file and key, for a model that
    is not Gemma 4, a value of the wrong kind, sizes that contradict each other, and what g4 does
    not run (bidirectional text, biases, other activations, scaled rotary embeddings).
    """
    text = _text_settings(raw, where)
    _refuse_unsupported(text)
    kinds = _layer_kinds(text)
    heads = _heads(text, kinds)
    sources = _kv_sources(text, kinds)
    width = text.size("intermediate_size")
    wide = 2 * width if text.flag("use_double_wide_mlp") else width
    from_key = text.flag("attention_k_eq_v")
    layers = tuple(
        LayerConfig(
            attention=kind,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            intermediate_size=width if source is None else wide,
            value_from_key=from_key and kind == "full",
            kv_source=source,
        )
        for kind, (head_dim, num_kv_heads), source in zip(kinds, heads, sources, strict=True)
    )
    per_layer_dim = text.size("hidden_size_per_layer_input", least=0)
    return TextConfig(
        vocab_size=text.size("vocab_size"),
        hidden_size=text.size("hidden_size"),
        num_heads=text.size("num_attention_heads"),
        layers=layers,
        sliding_window=text.size("sliding_window"),
        max_position_embeddings=text.size("max_position_embeddings"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        softcap=_softcap(text),
        tie_word_embeddings=text.flag("tie_word_embeddings", raw.get("tie_word_embeddings", True)),
        per_layer_dim=per_layer_dim,
        per_layer_vocab_size=_per_layer_vocab(text) if per_layer_dim else 0,
        moe=_moe(text),
        rope=_rope(text, set(kinds)),
    )


def to_hf_config(config: TextConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The content of a text-only config.json for `config`, in the published spelling.

    Raises ValueError for a config this spelling cannot say, such as full layers with key-value
    heads of their own in a model without shared keys and values.
    """
    sliding = next((x for x in config.layers if x.attention == "sliding"), config.layers[-1])
    full = config.layers[-1]
    plain_width = config.layers[0].intermediate_size
    moe = config.moe
    result: dict[str, Any] = {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": any(layer.value_from_key for layer in config.layers),
        "bos_token_id": 2,
        "dtype": dtype,
        "enable_moe_block": moe is not None,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": config.softcap,
        "global_head_dim": full.head_dim,
        "head_dim": sliding.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": config.hidden_size,
        "hidden_size_per_layer_input": config.per_layer_dim,
        "initializer_range": 0.02,
        "intermediate_size": plain_width,
        "layer_types": [_LAYER_TYPES[layer.attention] for layer in config.layers],
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "gemma4_text",
        "moe_intermediate_size": moe.intermediate_size if moe else None,
        "num_attention_heads": config.num_heads,
        "num_experts": moe.num_experts if moe else None,
        "num_global_key_value_heads": (
            full.num_kv_heads if full.num_kv_heads != sliding.num_kv_heads else None
        ),
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_kv_shared_layers": sum(layer.kv_source is not None for layer in config.layers),
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {_LAYER_TYPES[k]: _rope_entry(r) for k, r in config.rope.items()},
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": config.tie_word_embeddings,
        "top_k_experts": moe.top_k if moe else None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": full.intermediate_size != plain_width,
        "vocab_size": config.vocab_size,
        "vocab_size_per_layer_input": config.per_layer_vocab_size or config.vocab_size,
    }
    if parse_text_config(result) != config:
        raise ValueError("this config cannot be said in the published spelling")
    return result


def _text_settings(raw: Mapping[str, Any], where: str) -> Settings:
    model_type = raw.get("model_type")
    if model_type is None and raw.get("architectures") == ["Gemma4ForCausalLM"]:
        model_type = "gemma4_text"
    if isinstance(model_type, str) and model_type in _TEXT_TYPES:
        return Settings(raw, _TEXT_TYPES[model_type], where)
    if not isinstance(model_type, str) or model_type not in _WRAPPER_TYPES:
        known = ", ".join([*_WRAPPER_TYPES, *_TEXT_TYPES])
        raise G4Error(f"{where}: model_type is {shown(model_type)}; g4 knows {known}.")
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise G4Error(f"{where}: text_config is missing; a {model_type} model needs one.")
    inner = text.get("model_type", _WRAPPER_TYPES[model_type])
    if not isinstance(inner, str) or inner not in _TEXT_TYPES:
        known = ", ".join(_TEXT_TYPES)
        raise G4Error(f"{where}: text_config.model_type is {shown(inner)}; g4 knows {known}.")
    return Settings(text, _TEXT_TYPES[inner], where, "text_config.")


def _refuse_unsupported(text: Settings) -> None:
    bidirectional = text.get("use_bidirectional_attention")
    if bidirectional not in (None, "vision"):
        raise text.error(
            "use_bidirectional_attention",
            f"is {shown(bidirectional)}; g4 runs causal text models only (null or 'vision')",
        )
    if text.get("attention_bias"):
        raise text.error("attention_bias", "is set, which no Gemma 4 has and g4 does not run")
    activation = text.get("hidden_activation")
    if activation != "gelu_pytorch_tanh":
        raise text.error(
            "hidden_activation", f"is {shown(activation)}; g4 runs gelu_pytorch_tanh only"
        )


def _softcap(text: Settings) -> float | None:
    key = "final_logit_softcapping"
    return None if text.get(key) is None else text.positive(key)


def _per_layer_vocab(text: Settings) -> int:
    key = "vocab_size_per_layer_input"
    size, tokens = text.size(key), text.size("vocab_size")
    # transformers looks every token up in this table too, and fails at the first beyond it.
    if size < tokens:
        raise text.error(key, f"is {size}, less than the vocab_size of {tokens}")
    return size


def _layer_kinds(text: Settings) -> list[AttentionKind]:
    count = text.size("num_hidden_layers", most=_MOST_LAYERS)
    types = text.get("layer_types")
    if types is None:
        types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(count)]
    if not isinstance(types, list) or len(types) != count:
        entries = len(types) if isinstance(types, list) else shown(types)
        raise text.error("layer_types", f"has {entries} entries for {count} layers")
    for index, layer_type in enumerate(types):
        if not isinstance(layer_type, str) or layer_type not in _KINDS:
            known = " or ".join(_KINDS)
            raise text.error(f"layer_types[{index}]", f"is {shown(layer_type)}, not {known}")
    # As transformers does: the last layer is full whatever the list says.
    return [*(_KINDS[layer_type] for layer_type in types[:-1]), "full"]


def _heads(text: Settings, kinds: list[AttentionKind]) -> list[tuple[int, int]]:
    """Head size and key-value heads of each layer."""
    base = (text.size("head_dim"), text.size("num_key_value_heads"))
    if text.has("per_layer_config"):
        heads = _heads_by_layer(text, base, len(kinds))
    else:
        full_kv = base[1]
        # Read by transformers only where values come from keys.
        if text.flag("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
            full_kv = text.size("num_global_key_value_heads")
        full = (text.size("global_head_dim"), full_kv)
        heads = [full if kind == "full" else base for kind in kinds]
    for kind in ("sliding", "full"):
        sizes = {size for size, its_kind in zip(heads, kinds, strict=True) if its_kind == kind}
        if len(sizes) > 1:
            raise text.error(
                "per_layer_config", f"gives {kind} layers different heads: {sorted(sizes)}"
            )
    num_heads = text.size("num_attention_heads")
    for head_dim, num_kv_heads in set(heads):
        if num_heads % num_kv_heads:
            raise text.error(
                "num_attention_heads", f"is {num_heads}, no multiple of {num_kv_heads} kv heads"
            )
        if head_dim % 2:
            raise text.error("head_dim", f"is {head_dim}; rotary embedding needs an even size")
    return heads


def _heads_by_layer(text: Settings, base: tuple[int, int], count: int) -> list[tuple[int, int]]:
    heads = [base] * count
    for key, entry in text.table("per_layer_config").items():
        # Keys are strings in JSON, and may be zero-padded ("05").
        digits = str(key)
        if not digits.isdecimal() or len(digits) > 9 or int(digits) >= count:
            raise text.error(
                "per_layer_config", f"names layer {shown(key)}; there are {count} layers"
            )
        layer = text.inner("per_layer_config", key, entry)
        unknown = set(layer.raw) - {"head_dim", "num_key_value_heads", "skip"}
        if unknown or layer.get("skip"):
            name = min(unknown, default="skip")
            raise layer.error(name, "differs for one layer, which g4 does not support")
        heads[int(key)] = (
            layer.size("head_dim", base[0]),
            layer.size("num_key_value_heads", base[1]),
        )
    return heads


def _kv_sources(text: Settings, kinds: list[AttentionKind]) -> tuple[int | None, ...]:
    """For each layer the earlier layer whose keys and values it reads, or None."""
    shared = text.size("num_kv_shared_layers", least=0)
    own = max(0, len(kinds) - shared)
    missing = set(kinds[own:]) - set(kinds[:own])
    if missing:
        raise text.error(
            "num_kv_shared_layers",
            f"is {shared} of {len(kinds)}, which leaves no {min(missing)} layer to share from",
        )
    return kv_sources(kinds, shared)


def _moe(text: Settings) -> MoeConfig | None:
    if not text.flag("enable_moe_block"):
        return None
    experts, top_k = text.size("num_experts", most=_MOST_EXPERTS), text.size("top_k_experts")
    if top_k > experts:
        raise text.error("top_k_experts", f"is {top_k}, more than the {experts} experts")
    return MoeConfig(experts, top_k, text.size("moe_intermediate_size"))


def _rope(text: Settings, used: set[AttentionKind]) -> dict[AttentionKind, RopeConfig]:
    rope: dict[AttentionKind, RopeConfig] = {
        "sliding": RopeConfig(theta=1e4),
        "full": RopeConfig(theta=1e6, rotated=0.25),
    }
    given = text.table("rope_parameters")
    for layer_type, kind in _KINDS.items():
        entry = given.get(layer_type)
        if entry is not None or (given and kind in used):
            rope[kind] = _rope_of(text.inner("rope_parameters", layer_type, entry))
    return rope


def _rope_of(entry: Settings) -> RopeConfig:
    theta = entry.positive("rope_theta")
    rope_type = entry.get("rope_type", "default")
    if rope_type == "default":
        # transformers reads no partial_rotary_factor here.
        return RopeConfig(theta)
    if rope_type != "proportional":
        raise entry.error(
            "rope_type", f"is {shown(rope_type)}; g4 knows 'default' and 'proportional'"
        )
    if entry.positive("factor", 1.0) != 1.0:
        raise entry.error("factor", "scales the rotary embedding, which g4 does not support")
    rotated = entry.positive("partial_rotary_factor", 1.0)
    if rotated > 1:
        raise entry.error("partial_rotary_factor", f"is {rotated}, more than 1")
    return RopeConfig(theta, rotated)


def _rope_entry(rope: RopeConfig) -> dict[str, Any]:
    if math.isclose(rope.rotated, 1.0):
        return {"rope_theta": rope.theta, "rope_type": "default"}
    return {
        "partial_rotary_factor": rope.rotated,
        "rope_theta": rope.theta,
        "rope_type": "proportional",
    }
