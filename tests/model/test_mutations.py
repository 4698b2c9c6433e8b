"""Mistakes other implementations have made: each moves the logits far beyond the tolerance.

So the comparison with transformers would catch every one of them.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from g4tool.model import rope
from g4tool.model.decoder import DecoderLayer
from g4tool.model.text import TextModel

from .oracle import TOLERANCE, WINDOW, config_of, difference, hf_model, random_ids, text_model

FAR = 300 * TOLERANCE


@torch.no_grad()
def mutated_difference(family: str, change=None, config=None) -> float:
    """Largest logit difference to transformers after `change(model)` or with another config."""
    reference = hf_model(family)
    ids = random_ids(1, 3 * WINDOW)
    model = text_model(reference, config or config_of(family))
    if change is not None:
        change(model)
    return difference(model(ids), reference(ids).logits)


@pytest.mark.parametrize("family", ["dense", "per-layer", "moe"])
def test_without_a_mistake_there_is_no_difference(family):
    assert mutated_difference(family) <= TOLERANCE


def normalised_router(self: DecoderLayer, x: Tensor, given: Tensor) -> Tensor:
    dense = self.post_feedforward_layernorm_1(self.mlp(given))
    normed = self.pre_feedforward_layernorm_2(x)
    return dense + self.post_feedforward_layernorm_2(self.experts(normed, *self.router(normed)))


def test_router_fed_the_normalised_input(monkeypatch):
    monkeypatch.setattr(DecoderLayer, "_feed_forward", normalised_router)
    assert mutated_difference("moe") > FAR


def test_softcap_dropped():
    config = replace(config_of("dense"), softcap=None)
    assert mutated_difference("dense", config=config) > FAR


def test_softcap_as_x_times_tanh(monkeypatch):
    def wrong(self: TextModel, hidden: Tensor) -> Tensor:
        scores = self.embed_tokens.project(hidden)
        return scores * torch.tanh(scores / 30.0)

    monkeypatch.setattr(TextModel, "logits", wrong)
    assert mutated_difference("dense") > FAR


def test_post_attention_norm_taken_for_the_feed_forward_norm():
    def change(model):
        for layer in model.layers:
            layer.pre_feedforward_layernorm.weight.copy_(layer.post_attention_layernorm.weight)

    assert mutated_difference("dense", change) > FAR


@pytest.mark.parametrize("name", ["layer_scalar", "router.scale", "router.per_expert_scale"])
def test_scale_never_loaded(name):
    def change(model):
        for key, tensor in model.state_dict().items():
            if key.endswith(name):
                tensor.fill_(1.0)

    assert mutated_difference("moe", change) > FAR


def test_rotary_denominator_of_the_rotated_part(monkeypatch):
    def wrong(config, head_dim, device):
        pairs = int(config.rotated * head_dim // 2)
        exponents = torch.arange(0, 2 * pairs, 2, device=device) / (2 * pairs)
        rest = torch.zeros(head_dim // 2 - pairs)
        return torch.cat((1.0 / config.theta**exponents, rest))

    monkeypatch.setattr(rope, "inverse_frequencies", wrong)
    assert mutated_difference("dense") > FAR


def test_rotary_over_the_first_channels_instead_of_half_a_head_apart(monkeypatch):
    def wrong(x, cos, sin):
        part = 2 * int((sin != 0).any(dim=(0, 1, 2)).sum())
        first, second = x[..., : part // 2], x[..., part // 2 : part]
        cos, sin = cos[..., : part // 2], sin[..., : part // 2]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, x[..., part:]), dim=-1)

    monkeypatch.setattr("g4tool.model.arithmetic.rotate", wrong)
    assert mutated_difference("dense") > FAR


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1])
def test_window_off_by_one(window):
    config = replace(config_of("dense"), sliding_window=window)
    assert mutated_difference("dense", config=config) > FAR


def test_per_layer_table_not_scaled():
    def change(model):
        model.per_layer_scales = dict.fromkeys(model.per_layer_scales, 1.0)

    assert mutated_difference("per-layer", change) > FAR


def test_shared_layers_reading_the_wrong_source():
    config = config_of("per-layer")
    layers = [
        layer if layer.kv_source is None else replace(layer, kv_source=layer.kv_source - 2)
        for layer in config.layers
    ]
    config = replace(config, layers=tuple(layers))
    assert mutated_difference("per-layer", config=config) > FAR


def test_embedding_not_scaled():
    def change(model):
        model.embed_scales = dict.fromkeys(model.embed_scales, 1.0)

    assert mutated_difference("dense", change) > FAR


def test_norm_scale_as_one_plus_weight():
    def change(model):
        for key, tensor in model.state_dict().items():
            if key.endswith("layernorm.weight"):
                tensor.add_(1.0)

    assert mutated_difference("dense", change) > FAR
