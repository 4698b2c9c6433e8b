"""Random small Gemma 4 models, built twice: by transformers (the oracle) and here."""

from typing import Any

import torch
from torch import Tensor

from g4tool.model.config import (
    AttentionKind,
    LayerConfig,
    MoeConfig,
    TextConfig,
    kv_sources,
)
from g4tool.model.text import TextModel

WINDOW = 8
FAMILIES = ("dense", "per-layer", "moe")
TOLERANCE = 1e-4

_LETTERS: dict[str, AttentionKind] = {"s": "sliding", "f": "full"}
_PATTERNS = {"dense": "ssf", "per-layer": "sfsfsf", "moe": "sf"}
_SHARED = {"dense": 0, "per-layer": 2, "moe": 0}
HEADS, HIDDEN, WIDTH, VOCAB = 8, 64, 96, 320
KV_HEADS = {"dense": (4, 2), "per-layer": (1, 1), "moe": (4, 2)}
HEAD_DIM, FULL_HEAD_DIM, PER_LAYER_DIM = 16, 32, 24
EXPERTS, TOP_K, EXPERT_WIDTH = 8, 2, 40


def config_of(family: str) -> TextConfig:
    """The family's sizes as a TextConfig, written out by hand rather than parsed."""
    kinds = [_LETTERS[letter] for letter in _PATTERNS[family]]
    sources = kv_sources(kinds, _SHARED[family])
    per_layer = family == "per-layer"
    layers = tuple(
        LayerConfig(
            attention=kind,
            head_dim=FULL_HEAD_DIM if kind == "full" else HEAD_DIM,
            num_kv_heads=KV_HEADS[family][kind == "full"],
            intermediate_size=WIDTH if source is None else 2 * WIDTH,
            value_from_key=kind == "full" and not per_layer,
            kv_source=source,
        )
        for kind, source in zip(kinds, sources, strict=True)
    )
    return TextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        layers=layers,
        sliding_window=WINDOW,
        max_position_embeddings=1024,
        per_layer_dim=PER_LAYER_DIM if per_layer else 0,
        per_layer_vocab_size=VOCAB if per_layer else 0,
        moe=MoeConfig(EXPERTS, TOP_K, EXPERT_WIDTH) if family == "moe" else None,
    )


def hf_config_fields(family: str) -> dict[str, Any]:
    """The same sizes as the fields of a published text config."""
    moe = family == "moe"
    per_layer = family == "per-layer"
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": len(_PATTERNS[family]),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS[family][0],
        "num_global_key_value_heads": None if per_layer else KV_HEADS[family][1],
        "head_dim": HEAD_DIM,
        "global_head_dim": FULL_HEAD_DIM,
        "layer_types": [f"{_LETTERS[letter]}_attention" for letter in _PATTERNS[family]],
        "sliding_window": WINDOW,
        "max_position_embeddings": 1024,
        "final_logit_softcapping": 30.0,
        "attention_k_eq_v": not per_layer,
        "num_kv_shared_layers": _SHARED[family],
        "use_double_wide_mlp": per_layer,
        "hidden_size_per_layer_input": PER_LAYER_DIM if per_layer else 0,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": moe,
        "num_experts": EXPERTS if moe else None,
        "top_k_experts": TOP_K if moe else None,
        "moe_intermediate_size": EXPERT_WIDTH if moe else None,
    }


def hf_model(family: str, seed: int = 0, **fields: Any) -> Any:
    """transformers' model, every weight, norm, scale and buffer random; logits reach about 20."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(**{**hf_config_fields(family), **fields})
    config._attn_implementation = "eager"
    model = Gemma4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight") or "layernorm" in name or "scale" in name:
                tensor.copy_(1 + 0.3 * normal(tensor))
            elif name.endswith("layer_scalar"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            elif "embed_tokens" in name or name.startswith("lm_head"):
                tensor.copy_(0.3 * normal(tensor))
            elif "router.proj" in name:
                tensor.copy_(0.6 * normal(tensor))
            else:
                tensor.copy_(normal(tensor) * 1.5 * tensor.shape[-1] ** -0.5)
            # Sharper attention than this makes transformers differ from itself by more than 1e-4.
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                tensor.mul_(0.6)
        model.model.norm.weight.mul_(2.0)
    return model


def canonical_state(model: Any) -> dict[str, Tensor]:
    """transformers' weights under the canonical names."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = name.removeprefix("model.")
        state[name + ".weight" if ".experts." in name else name] = tensor.clone()
    return state


def text_model(reference: Any, config: TextConfig) -> TextModel:
    """This package's model with the reference's weights; strict, so that no name may differ."""
    model = TextModel(config).eval()
    model.load_state_dict(canonical_state(reference), strict=True)
    return model


def random_ids(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def chunked(model: TextModel, ids: Tensor, chunk: int, length: int | None = None) -> Tensor:
    """Logits of the whole sequence, fed in chunks through a fresh cache."""
    model.allocate_cache(ids.shape[0], length or ids.shape[1])
    pieces = [
        model(piece, start=torch.tensor(at * chunk))
        for at, piece in enumerate(ids.split(chunk, dim=1))
    ]
    return torch.cat(pieces, dim=1)


def difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()
