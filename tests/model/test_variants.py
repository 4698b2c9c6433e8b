"""The published variants, counted on the meta device."""

import pytest
import torch

from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS

# Text parameters and layer scalars of transformers' own models of the same configs.
COUNTS = {
    "e2b": 4_628_569_379,
    "e4b": 7_463_013_418,
    "12b": 11_907_350_320,
    "26b-a4b": 25_233_141_790,
    "31b": 30_697_345_340,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = TextModel(VARIANTS[name])
    assert sum(x.numel() for x in model.state_dict().values()) == COUNTS[name]
    model.allocate_cache(1, 4096, device="meta")
    assert all(x.is_meta for x in model.buffers())


def test_there_are_five():
    assert set(VARIANTS) == set(COUNTS)


@pytest.mark.parametrize(
    ("name", "sliding", "full", "first_shared"), [("e2b", 13, 14, 15), ("e4b", 22, 23, 24)]
)
def test_sources_of_shared_layers(name, sliding, full, first_shared):
    layers = VARIANTS[name].layers
    assert all(layer.kv_source is None for layer in layers[:first_shared])
    for layer in layers[first_shared:]:
        assert layer.kv_source == (full if layer.attention == "full" else sliding)


@pytest.mark.parametrize("name", VARIANTS)
def test_last_layer_is_full(name):
    assert VARIANTS[name].layers[-1].attention == "full"


def test_double_width_is_of_the_shared_layers_of_e2b():
    assert [x.intermediate_size for x in VARIANTS["e2b"].layers] == [6144] * 15 + [12288] * 20
    assert {x.intermediate_size for x in VARIANTS["e4b"].layers} == {10240}
