from dataclasses import replace

import pytest
import torch

from g4tool.backends.neuron.nxdi_layout import (
    cache_shapes,
    even_plan,
    neuron_state_dict,
)
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error, UsageError
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_one_rank_caches_what_the_canonical_model_caches(variant: str) -> None:
    with torch.device("meta"):
        model = TextModel(VARIANTS[variant])
    model.allocate_cache(3, 4096)
    canonical = {
        int(name.split(".")[1]): tuple(cache.shape)
        for name, cache in model.named_buffers()
        if name.endswith("cache.keys")
    }
    assert cache_shapes(VARIANTS[variant], 1, 3, 4096) == canonical


def test_caches_of_the_31b_on_eight_ranks() -> None:
    shapes = cache_shapes(VARIANTS["31b"], 8, 1, 8192)
    # 16 kv heads in eight parts and a ring of the window; 4 kv heads, each on two ranks.
    assert shapes[0] == (1, 2, 1024, 256)
    assert shapes[5] == (1, 1, 8192, 512)
    assert len(shapes) == 60


def test_layers_that_share_keys_and_values_have_no_cache() -> None:
    assert list(cache_shapes(VARIANTS["e2b"], 2, 1, 2048)) == list(range(15))


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_weight_keeps_its_name_but_the_experts(name: str) -> None:
    shapes = text_tensors(TINY[name])
    weights = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    made = neuron_state_dict(weights, TINY[name], 4)
    ranks = {key: value for key, value in made.items() if key.endswith("rank_util.rank")}
    assert set(made) - set(ranks) == {x.replace(".experts.", ".experts.mlp_op.") for x in shapes}
    assert all(value.tolist() == [0, 1, 2, 3] for value in ranks.values())


def test_experts_are_transposed_and_factors_are_float32() -> None:
    gate_up = torch.randn(8, 512, 128)
    made = neuron_state_dict(
        {
            "layers.0.experts.gate_up_proj.weight": gate_up,
            "layers.0.router.scale": torch.ones(128, dtype=torch.bfloat16),
            "layers.0.layer_scalar": torch.ones(1, dtype=torch.bfloat16),
        },
        TINY["tiny-26b-a4b"],
        1,
    )
    assert made["layers.0.experts.mlp_op.gate_up_proj.weight"][3, 5, 7] == gate_up[3, 7, 5]
    assert made["layers.0.router.scale"].dtype == torch.float32
    assert made["layers.0.layer_scalar"].dtype == torch.bfloat16


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_published_models_split_evenly(variant: str, degree: int) -> None:
    config = VARIANTS[variant]
    if degree > config.num_heads:
        with pytest.raises(UsageError, match="8 query heads"):
            even_plan(config, degree)
        return
    plan = even_plan(config, degree)
    for number, (_, heads, _, size) in cache_shapes(config, degree, 1, 8).items():
        rows = plan.splits[f"layers.{number}.self_attn.k_proj.weight"].rank_shape(0)[0]
        assert rows == heads * size


def test_widths_that_ranks_would_share_unequally_are_refused() -> None:
    layers = tuple(replace(layer, intermediate_size=514) for layer in TINY["tiny-31b"].layers)
    # At 8 ranks key-value heads are repeated, which is noted too and refuses nothing.
    for degree in (4, 8):
        with pytest.raises(G4Error, match=r"0\.mlp\.gate_proj.*width 514 in blocks of 1"):
            even_plan(replace(TINY["tiny-31b"], layers=layers), degree)
