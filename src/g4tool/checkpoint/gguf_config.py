"""A text model's sizes as the metadata that llama.cpp's `gemma4` reads, and back.

The keys are those of the gguf package's constants; what llama.cpp makes of them, including what
it does not ask for but takes for granted, is `src/models/gemma4.cpp` there.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from g4tool.checkpoint.gguf_header import Metadata
from g4tool.checkpoint.settings import MOST, shown
from g4tool.errors import G4Error
from g4tool.model.config import (
    AttentionKind,
    LayerConfig,
    MoeConfig,
    RopeConfig,
    TextConfig,
    kv_sources,
)
from g4tool.model.rope import inverse_frequencies

ARCHITECTURE = "gemma4"
# Divides a frequency so far that the angle is zero at every position.
_STILL = 1e30


def check_expressible(config: TextConfig) -> None:
    """Raise G4Error for a model that llama.cpp would compute differently, or not at all."""
    kinds = [layer.attention for layer in config.layers]
    makers = sum(layer.kv_source is None for layer in config.layers)
    for number, layer in enumerate(config.layers):
        # llama.cpp takes these two for granted, whatever the layers before are.
        source = makers - (2 if layer.attention == "sliding" else 1)
        if layer.kv_source not in (None, source):
            raise G4Error(
                f"llama.cpp would have layer {number} read the keys and values of layer {source}, "
                f"not of layer {layer.kv_source}; this model cannot be a GGUF file."
            )
    if set(kinds) != {"sliding", "full"}:
        raise G4Error(
            f"llama.cpp's {ARCHITECTURE} has sliding and full layers, but this model has "
            f"{kinds[0]} ones only; it cannot be a GGUF file."
        )
    if config.rope["sliding"].rotated != 1.0:
        raise G4Error(
            "llama.cpp rotates the whole head of a sliding layer, but this model a part of it; "
            "it cannot be a GGUF file."
        )
    if config.per_layer_dim and config.per_layer_vocab_size != config.vocab_size:
        raise G4Error(
            f"llama.cpp wants as many rows in the per-layer table as there are tokens, but this "
            f"model has {config.per_layer_vocab_size} and {config.vocab_size}; it cannot be a "
            f"GGUF file."
        )


def config_metadata(config: TextConfig) -> Metadata:
    """The keys of the architecture, without its prefix."""
    layers, moe = config.layers, config.moe
    head: dict[str, int] = {layer.attention: layer.head_dim for layer in layers}
    found: Metadata = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "embedding_length_per_layer_input": config.per_layer_dim,
        "feed_forward_length": _one_or_each([layer.intermediate_size for layer in layers]),
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": _one_or_each([layer.num_kv_heads for layer in layers]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [layer.attention == "sliding" for layer in layers],
        "attention.shared_kv_layers": sum(layer.kv_source is not None for layer in layers),
        "rope.freq_base": config.rope["full"].theta,
        "rope.freq_base_swa": config.rope["sliding"].theta,
    }
    for kind, suffix in (("full", ""), ("sliding", "_swa")):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            found[key + suffix] = head[kind]
    if config.softcap is not None:
        found["final_logit_softcapping"] = config.softcap
    if moe is not None:
        found["expert_count"] = moe.num_experts
        found["expert_used_count"] = moe.top_k
        found["expert_feed_forward_length"] = moe.intermediate_size
    return found


def rope_factors(config: TextConfig) -> torch.Tensor:
    """What divides the frequencies of the full layers: float32 [head_dim / 2].

    llama.cpp computes the frequencies itself, all of them, so those that are zero here are divided
    away.
    """
    head_dim = next(x.head_dim for x in config.layers if x.attention == "full")
    rotated = inverse_frequencies(config.rope["full"], head_dim, torch.device("cpu")) != 0
    return torch.where(rotated, 1.0, _STILL)


def parse_metadata(
    path: Path, metadata: Metadata, names: Collection[str], factors: torch.Tensor, vocab: int
) -> TextConfig:
    """The sizes that a file's metadata states.

    `names` are the canonical names of its tensors, `factors` the values of its `rope_freqs`
    (float32), `vocab` the rows of its embedding. Raises G4Error, naming file and key, for another
    architecture, a key that is missing or of another kind, and what g4 does not run.
    """
    try:
        config = _parse(_Keys(path, metadata), names, _rotated(factors), vocab)
        check_expressible(config)
    except G4Error as error:
        # What no model can have is said without a file's name.
        named = str(error).startswith(str(path))
        raise G4Error(str(error) if named else f"{path}: {error}") from None
    if not torch.equal(rope_factors(config), factors):
        raise G4Error(f"{path}: rope_freqs scales rotary frequencies, which g4 does not support.")
    return config


def check_architecture(path: Path, metadata: Metadata) -> None:
    """Raise G4Error unless the file says that it holds a Gemma 4 text model."""
    name = metadata.get("general.architecture")
    if name != ARCHITECTURE:
        raise G4Error(
            f"{path}: general.architecture is {shown(name)}, but g4 reads {ARCHITECTURE!r} only."
        )


def _parse(keys: "_Keys", names: Collection[str], rotated: float, vocab: int) -> TextConfig:
    per_layer = keys.whole("embedding_length_per_layer_input", 0)
    experts = keys.whole("expert_count", 0)
    capped = keys.has("final_logit_softcapping")
    return TextConfig(
        vocab_size=vocab,
        hidden_size=keys.whole("embedding_length"),
        num_heads=keys.whole("attention.head_count"),
        layers=_layers(keys, names),
        sliding_window=keys.whole("attention.sliding_window"),
        max_position_embeddings=keys.whole("context_length"),
        rms_norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        softcap=keys.real("final_logit_softcapping") if capped else None,
        tie_word_embeddings="lm_head.weight" not in names,
        per_layer_dim=per_layer,
        per_layer_vocab_size=vocab if per_layer else 0,
        moe=(
            MoeConfig(
                experts, keys.whole("expert_used_count"), keys.whole("expert_feed_forward_length")
            )
            if experts
            else None
        ),
        rope={
            "sliding": RopeConfig(keys.real("rope.freq_base_swa", 1e4)),
            "full": RopeConfig(keys.real("rope.freq_base"), rotated),
        },
    )


def _layers(keys: "_Keys", names: Collection[str]) -> tuple[LayerConfig, ...]:
    count = keys.whole("block_count")
    if count > len(names):
        raise keys.error("block_count", f"is {count}, but the file has {len(names)} tensors only")
    pattern = keys.each("attention.sliding_window_pattern", count)
    kinds: list[AttentionKind] = ["sliding" if flag else "full" for flag in pattern]
    kv_heads = keys.each("attention.head_count_kv", count)
    widths = keys.each("feed_forward_length", count)
    sources = kv_sources(kinds, keys.whole("attention.shared_kv_layers", 0))
    makers = [number if source is None else source for number, source in enumerate(sources)]
    return tuple(
        LayerConfig(
            attention=kind,
            head_dim=keys.whole(f"attention.key_length{'_swa' if kind == 'sliding' else ''}"),
            num_kv_heads=kv_heads[number],
            intermediate_size=widths[number],
            value_from_key=f"layers.{makers[number]}.self_attn.v_proj.weight" not in names,
            kv_source=sources[number],
        )
        for number, kind in enumerate(kinds)
    )


def _rotated(factors: torch.Tensor) -> float:
    """The share of the frequencies that is left as it is."""
    return float((factors == 1.0).float().mean())


def _one_or_each(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


class _Keys:
    def __init__(self, path: Path, metadata: Metadata) -> None:
        self._path = path
        self._metadata = metadata

    def has(self, key: str) -> bool:
        return f"{ARCHITECTURE}.{key}" in self._metadata

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, which may be written once a layer."""
        value = self._get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or not 0 <= value <= MOST:
            raise self.error(key, f"is {shown(value)}, not a whole number up to {MOST}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not value > 0:
            raise self.error(key, f"is {shown(value)}, not a number above zero")
        return float(value)

    def each(self, key: str, count: int) -> list[Any]:
        """One value a layer; a single number stands for all."""
        value = self._get(key, None)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(type(each) in (int, bool) for each in values):
            raise self.error(key, f"is no list of {count} numbers, one a layer")
        return values

    def error(self, key: str, problem: str) -> G4Error:
        return G4Error(f"{self._path}: {ARCHITECTURE}.{key} {problem}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{ARCHITECTURE}.{key}", default)
        if value is None:
            raise self.error(
                key, "is missing from the metadata, and Gemma 4 cannot be run without it"
            )
        return value
