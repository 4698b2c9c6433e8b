import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Gemma4TextConfig

from g4tool.checkpoint.config import parse_text_config, to_hf_config
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error
from g4tool.model.config import LayerConfig, RopeConfig, TextConfig
from g4tool.model.variants import VARIANTS


def published(
    layers: int, full_every: int, window: int, positions: int, **sizes: object
) -> dict[str, Any]:
    """The text part of a published config.json."""
    types = ["full" if i % full_every == full_every - 1 else "sliding" for i in range(layers)]
    return {
        "model_type": "gemma4_text",
        "num_hidden_layers": layers,
        "layer_types": [f"{kind}_attention" for kind in types],
        "sliding_window": window,
        "max_position_embeddings": positions,
        "head_dim": 256,
        "global_head_dim": 512,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size": 262144,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        **sizes,
    }


def widths(hidden: int, intermediate: int, heads: int, kv: int, kv_full: int | None) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_global_key_value_heads": kv_full,
        "attention_k_eq_v": kv_full is not None,
        "use_bidirectional_attention": None if kv_full is None else "vision",
    }


MOE = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
PUBLISHED = {
    "e2b": published(
        35,
        5,
        512,
        131072,
        **widths(1536, 6144, 8, 1, None),
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=256,
    ),
    "e4b": published(
        42,
        6,
        512,
        131072,
        **widths(2560, 10240, 8, 2, None),
        num_kv_shared_layers=18,
        hidden_size_per_layer_input=256,
    ),
    "12b": published(
        48, 6, 1024, 262144, **widths(3840, 15360, 16, 8, 1), model_type="gemma4_unified_text"
    ),
    "26b-a4b": published(30, 6, 1024, 262144, **widths(2816, 2112, 16, 8, 2), **MOE),
    "31b": published(60, 6, 1024, 262144, **widths(5376, 21504, 32, 16, 4)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_variants(name: str) -> None:
    text = PUBLISHED[name]
    assert parse_text_config(text) == VARIANTS[name]
    wrapper = "gemma4_unified" if name == "12b" else "gemma4"
    assert parse_text_config({"model_type": wrapper, "text_config": text}) == VARIANTS[name]


@pytest.mark.parametrize("name", ["e2b", "e4b", "26b-a4b", "31b"])
def test_both_spellings_agree_with_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in saved
    assert "global_head_dim" not in saved
    for raw in (PUBLISHED[name], saved):
        assert_like_transformers(parse_text_config(raw), theirs)


def test_absent_keys_take_the_class_defaults() -> None:
    ours = parse_text_config({"model_type": "gemma4_text"})
    theirs = Gemma4TextConfig()
    assert_like_transformers(ours, theirs)
    assert ours.per_layer_dim == 256
    assert ours.softcap is None
    assert ours.layers[5] == LayerConfig("full", 512, 4, 9216)


def test_last_layer_is_full_whatever_the_list_says() -> None:
    raw = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention"] * 3,
    }
    assert_like_transformers(parse_text_config(raw), Gemma4TextConfig(**raw))


def test_global_kv_heads_count_only_where_values_come_from_keys() -> None:
    raw = {"model_type": "gemma4_text", "num_global_key_value_heads": 2}
    for from_key in (True, False):
        both = {**raw, "attention_k_eq_v": from_key}
        assert_like_transformers(parse_text_config(both), Gemma4TextConfig(**both))


def test_zero_padded_layer_numbers() -> None:
    raw = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "per_layer_config": {
            "05": {"head_dim": 128, "num_key_value_heads": 2},
            "11": {"head_dim": 128, "num_key_value_heads": 2},
        },
    }
    config = parse_text_config(raw)
    assert_like_transformers(config, Gemma4TextConfig(**raw))
    assert (config.layers[5].head_dim, config.layers[4].head_dim) == (128, 256)


def test_rope_types() -> None:
    rope = {
        "sliding_attention": {"rope_theta": 5000},
        "full_attention": {"rope_theta": 7.5, "rope_type": "proportional"},
    }
    config = parse_text_config({"model_type": "gemma4_text", "rope_parameters": rope})
    assert config.rope == {"sliding": RopeConfig(5000.0), "full": RopeConfig(7.5, 1.0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3_text"}, "config.json: model_type is 'gemma3_text'; g4 knows"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "gemma4"}, "text_config is missing"),
        (
            {"model_type": "gemma4", "text_config": {"model_type": "gemma4_assistant"}},
            "text_config.model_type is 'gemma4_assistant'",
        ),
        (
            {"model_type": "gemma4", "text_config": {"hidden_size": 0}},
            "text_config.hidden_size is 0, not an integer of at least 1",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 30 layers"),
        ({"num_hidden_layers": 1, "layer_types": ["linear"]}, "layer_types[0] is 'linear'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"hidden_size": "128"}, "hidden_size is '128', not an integer"),
        ({"hidden_size": True}, "hidden_size is True, not an integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a number above zero"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping is -30.0"),
        ({"attention_k_eq_v": "yes"}, "attention_k_eq_v is 'yes', not true or false"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        (
            {**MOE, "top_k_experts": 200},
            "top_k_experts is 200, more than the 128 experts",
        ),
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers is 30 of 30"),
        ({"num_kv_shared_layers": 27}, "leaves no full layer to share from"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 8, no multiple of 3"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even size"),
        ({"per_layer_config": {"30": {}}}, "per_layer_config names layer '30'"),
        (
            {"per_layer_config": {"5": {"head_dim": 64}}},
            "gives full layers different heads",
        ),
        (
            {"per_layer_config": {"5": {"intermediate_size": 64}}},
            "per_layer_config.5.intermediate_size differs for one layer",
        ),
        ({"per_layer_config": {"5": 64}}, "per_layer_config.5 is 64, not a table"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            "rope_parameters.sliding_attention is missing",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "rope_parameters.sliding_attention.rope_theta is missing",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "yarn"}}},
            "rope_parameters.sliding_attention.rope_type is 'yarn'",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(G4Error) as error:
        parse_text_config({"model_type": "gemma4_text", **change})
    assert message in str(error.value)
    assert str(error.value).startswith("config.json: ")


@pytest.mark.parametrize("name", TINY)
def test_written_config_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    raw = to_hf_config(TINY[name])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert raw["architectures"] == ["Gemma4ForCausalLM"]
    assert_like_transformers(TINY[name], theirs)


def test_a_config_the_published_spelling_cannot_say() -> None:
    layers = (LayerConfig("sliding", 32, 4, 64), LayerConfig("full", 64, 2, 64))
    config = TextConfig(100, 32, 4, layers, 8, 64)
    with pytest.raises(ValueError, match="cannot be said"):
        to_hf_config(config)


def assert_like_transformers(ours: TextConfig, theirs: Any) -> None:
    """Every size of `ours` is what a transformers config of the same model says."""
    modes = theirs.kv_sharing_modes
    for index, layer in enumerate(ours.layers):
        its = theirs.per_layer_config[index]
        assert layer.head_dim == its.head_dim
        assert layer.num_kv_heads == its.num_key_value_heads
        assert f"{layer.attention}_attention" == theirs.layer_types[index]
        shared = modes[index] == "reuse"
        assert (layer.kv_source is not None) == shared
        if layer.kv_source is not None:
            assert modes[layer.kv_source] == "store"
            assert theirs.layer_types[layer.kv_source] == theirs.layer_types[index]
        wide = 2 if shared and theirs.use_double_wide_mlp else 1
        assert layer.intermediate_size == wide * theirs.intermediate_size
        assert layer.value_from_key == (theirs.attention_k_eq_v and layer.attention == "full")
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.hidden_size == theirs.hidden_size
    assert ours.vocab_size == theirs.vocab_size
    assert ours.sliding_window == theirs.sliding_window
    assert ours.softcap == theirs.final_logit_softcapping
    assert ours.per_layer_dim == theirs.hidden_size_per_layer_input
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert (ours.moe is not None) == theirs.enable_moe_block
    if ours.moe:
        assert ours.moe.num_experts == theirs.num_experts
        assert ours.moe.top_k == theirs.top_k_experts
        assert ours.moe.intermediate_size == theirs.moe_intermediate_size
    for kind, rope in ours.rope.items():
        entry = theirs.rope_parameters[f"{kind}_attention"]
        assert rope.theta == entry["rope_theta"]
        assert rope.rotated == entry.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["gemma4_text"]}, "model_type is ['gemma4_text']; g4 knows"),
        ({"model_type": {"a": 1}}, "model_type is {'a': 1}; g4 knows"),
        (
            {"model_type": "gemma4", "text_config": {"model_type": []}},
            "text_config.model_type is []; g4 knows",
        ),
        ({"layer_types": [["full_attention"]] * 30}, "layer_types[0] is ['full_attention'], not"),
        ({"layer_types": [{}] * 30}, "layer_types[0] is {}, not"),
        ({"layer_types": {"a": 1}}, "layer_types has {'a': 1} entries"),
        ({"hidden_size": 10**400}, "hidden_size is 100000000000000000...000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 100000000000000000...000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number above zero"),
        ({"final_logit_softcapping": float("inf")}, "final_logit_softcapping is inf, not a number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10000"),
        ({"vocab_size": 2**31 + 1}, "vocab_size is 2147483649, more than 2147483648"),
        (
            {"enable_moe_block": True, "num_experts": 10**10, "top_k_experts": 8},
            "num_experts is 10000000000, more than 65536",
        ),
        ({"per_layer_config": {"9" * 5000: {}}}, "per_layer_config names layer '99999"),
        (
            {"vocab_size_per_layer_input": 2048},
            "vocab_size_per_layer_input is 2048, less than the vocab_size of 262144",
        ),
    ],
)
def test_nonsense_in_json_is_one_short_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(G4Error) as error:
        parse_text_config({"model_type": "gemma4_text", **change})
    assert str(error.value).startswith(f"config.json: {message}")
    assert len(str(error.value)) < 250


def test_a_per_layer_table_of_no_use_may_be_small() -> None:
    raw = {
        "model_type": "gemma4_text",
        "vocab_size_per_layer_input": 1,
        "hidden_size_per_layer_input": 0,
    }
    assert parse_text_config(raw).per_layer_vocab_size == 0


def test_transformers_fails_where_the_per_layer_table_is_smaller() -> None:
    """What the refusal rests on; a larger table is fine there and here."""
    from transformers import Gemma4ForCausalLM

    raw = {**to_hf_config(TINY["tiny-e2b"]), "vocab_size_per_layer_input": 2048}
    ids = torch.tensor([[2, 2048]])
    with pytest.raises(IndexError):
        Gemma4ForCausalLM(Gemma4TextConfig(**raw))(ids)
    raw["vocab_size_per_layer_input"] = 4100
    assert parse_text_config(raw).per_layer_vocab_size == 4100
    Gemma4ForCausalLM(Gemma4TextConfig(**raw))(ids)
