"""Which scheme the presets give to the tensors of the models they are for."""

import re

import pytest

from g4tool.recipe.load import load_recipe, presets


def scheme(preset: str, name: str) -> tuple[str, int | None]:
    """Scheme and group size of a tensor by the first rule that matches; 4 bit where none does."""
    quantize = load_recipe(preset).quantize
    assert quantize
    for rule in quantize.rules:
        if re.search(rule.match, name):
            return rule.scheme, rule.group_size
    return quantize.scheme, quantize.group_size


INT4 = ("int4-hqq", 32)
INT8 = ("int8", None)
KEEP = ("keep", None)
KEPT = [
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.post_per_layer_input_norm.weight",
    "per_layer_projection_norm.weight",
    "layers.0.layer_scalar",
    "layers.0.router.proj.weight",
    "layers.0.router.scale",
    "layers.0.router.per_expert_scale",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
    "model.audio_tower.layers.0.self_attn.q_proj.linear.weight",
    "model.embed_vision.embedding_projection.weight",
    "model.embed_audio.embedding_projection.weight",
    "model.vision_embedder.patch_dense.weight",
]
QUANTIZED = [
    "layers.5.self_attn.q_proj.weight",
    "layers.5.self_attn.o_proj.weight",
    "layers.5.mlp.gate_up.weight",
    "layers.5.mlp.down_proj.weight",
    "layers.0.experts.gate_up_proj.weight",
    "layers.0.experts.down_proj.weight",
]


@pytest.mark.parametrize("preset", [preset.name for preset in presets()])
def test_what_every_preset_keeps_and_embeds(preset: str) -> None:
    assert {scheme(preset, name) for name in KEPT} == {KEEP}
    assert scheme(preset, "embed_tokens.weight") == INT8
    if preset != "31b-int4-hqq-sensitive":
        assert {scheme(preset, name) for name in QUANTIZED} == {INT4}


@pytest.mark.parametrize(
    ("preset", "slice_width"),
    [("e2b-int4-hqq", 256), ("e4b-int4-hqq", 256), ("31b-int4-hqq", 256), ("tiny-e2b", 64)],
)
def test_per_layer_inputs_are_int8(preset: str, slice_width: int) -> None:
    assert scheme(preset, "embed_tokens_per_layer.weight") == ("int8", slice_width)
    for name in (
        "per_layer_model_projection.weight",
        "layers.3.per_layer_input_gate.weight",
        "layers.3.per_layer_projection.weight",
    ):
        assert scheme(preset, name) == INT8


def test_the_sensitive_preset_is_int8_in_the_edge_layers_only() -> None:
    for part in ("self_attn.v_proj", "mlp.down_proj"):
        eight = [
            layer
            for layer in range(60)
            if scheme("31b-int4-hqq-sensitive", f"layers.{layer}.{part}.weight") == ("int8", 32)
        ]
        assert eight == [*range(15), *range(45, 60)]
    for part in ("self_attn.k_proj", "mlp.up_proj", "self_attn.o_proj"):
        for layer in (0, 14, 30, 59):
            assert scheme("31b-int4-hqq-sensitive", f"layers.{layer}.{part}.weight") == INT4
