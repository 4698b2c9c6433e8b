"""The text model against a second, independent implementation (PyPI: gemma4-pt-claude)."""

from typing import Any

import pytest
import torch

from g4tool.model.decoder import DecoderLayer

from .oracle import (
    EXPERT_WIDTH,
    EXPERTS,
    FAMILIES,
    FULL_HEAD_DIM,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    PER_LAYER_DIM,
    TOLERANCE,
    TOP_K,
    VOCAB,
    WIDTH,
    WINDOW,
    config_of,
    difference,
    hf_model,
    random_ids,
    text_model,
)
from .test_mutations import normalised_router


def peer_model(family: str, state: dict[str, torch.Tensor]) -> Any:
    from gemma4_pt_claude import config as sizes
    from gemma4_pt_claude.load import _hf_convert_weights
    from gemma4_pt_claude.model import Gemma4Model

    layers = config_of(family).layers
    kinds = {"sliding": sizes.AttentionType.LOCAL_SLIDING, "full": sizes.AttentionType.GLOBAL}
    moe, per_layer = family == "moe", family == "per-layer"
    shared = sum(layer.kv_source is not None for layer in layers)
    first = {kind: next(x for x in layers if x.attention == kind) for kind in kinds}
    text = sizes.TextConfig(
        vocab_size=VOCAB,
        embed_dim=HIDDEN,
        hidden_dim=WIDTH,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        global_head_dim=FULL_HEAD_DIM,
        num_kv_heads=first["sliding"].num_kv_heads,
        num_global_kv_heads=first["full"].num_kv_heads,
        num_layers=len(layers),
        sliding_window_size=WINDOW,
        final_logit_softcap=30.0,
        per_layer_input_dim=PER_LAYER_DIM if per_layer else 0,
        attention_pattern=tuple(kinds[layer.attention] for layer in layers),
        kv_sharing=sizes.KVCacheSharingConfig(shared / len(layers), True, True) if shared else None,
        override_kv_shared_ffw_hidden=2 * WIDTH if shared else None,
        moe=sizes.MoEConfig(EXPERTS, TOP_K, EXPERT_WIDTH, WIDTH) if moe else None,
        k_eq_v_global=not per_layer,
    )
    model = Gemma4Model(sizes.Gemma4Config(text=text)).eval()
    converted = _hf_convert_weights(state, len(layers), has_moe=moe)
    missing, unexpected = model.load_state_dict(converted, strict=False)
    assert not unexpected
    # The peer has key and value weights in layers that share another's; they are never used.
    makers = [n for n, layer in enumerate(layers) if layer.kv_source is None]
    assert not [x for x in missing if int(x.split("blocks.")[1].split(".")[0]) in makers]
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_peer(family, monkeypatch):
    reference = hf_model(family, seed=5)
    state = {name: x for name, x in reference.state_dict().items() if name != "lm_head.weight"}
    peer = peer_model(family, state)
    model = text_model(reference, config_of(family))
    ids = random_ids(2, 4 * WINDOW + 1)
    expected, _ = peer(ids)
    if family == "moe":
        # The peer's router reads the experts' normalised input; transformers' and ours do not.
        assert difference(model(ids), expected) > 100 * TOLERANCE
        monkeypatch.setattr(DecoderLayer, "_feed_forward", normalised_router)
    assert difference(model(ids), expected) <= TOLERANCE
