"""Configs that no model can have are refused, with the layer and the reason."""

from dataclasses import replace

import pytest

from g4tool.errors import G4Error
from g4tool.model.config import LayerConfig, MoeConfig, TextConfig, kv_sources

LAYER = LayerConfig("full", head_dim=8, num_kv_heads=2, intermediate_size=16)
SLIDING = replace(LAYER, attention="sliding")


def build(*layers: LayerConfig, **fields) -> TextConfig:
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_heads": 4, "sliding_window": 4}
    return TextConfig(layers=layers, max_position_embeddings=64, **{**sizes, **fields})


@pytest.mark.parametrize(
    ("layers", "fields", "message"),
    [
        ((), {}, "no layers"),
        ((LAYER,), {"hidden_size": 0}, "hidden_size is 0"),
        ((LAYER,), {"per_layer_dim": 4}, "per_layer_vocab_size is 0"),
        ((LAYER,), {"per_layer_dim": 4, "per_layer_vocab_size": 9}, "per_layer_vocab_size is 9"),
        ((LAYER,), {"moe": MoeConfig(4, 5, 8)}, "top_k is 5"),
        ((LAYER, replace(LAYER, num_kv_heads=3)), {}, "layer 1 has 3 key-value heads"),
        ((replace(LAYER, head_dim=7),), {}, "head_dim 7"),
        ((LAYER,), {"rope": {}}, "no rope entry"),
        ((LAYER, replace(LAYER, head_dim=16)), {}, "layer 1 has head_dim 16"),
        ((replace(LAYER, kv_source=0),), {}, "layer 0 takes its keys and values from layer 0"),
        ((SLIDING, replace(LAYER, kv_source=0)), {}, "not an earlier layer of the same kind"),
    ],
)
def test_nonsense_is_refused(layers, fields, message):
    with pytest.raises(G4Error, match=message):
        build(*layers, **fields)


def test_sources_are_the_last_makers_of_each_kind():
    kinds = ["sliding", "full", "sliding", "full", "full", "sliding"]
    assert kv_sources(kinds, 2) == (None, None, None, None, 3, 2)
    assert kv_sources(kinds, 0) == (None,) * 6


@pytest.mark.parametrize("shared", [-1, 1, 3])
def test_sources_that_do_not_exist_are_refused(shared):
    with pytest.raises(G4Error):
        kv_sources(["sliding", "full"], shared)
