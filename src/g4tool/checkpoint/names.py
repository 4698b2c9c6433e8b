"""Between canonical names and the keys of Hugging Face checkpoints; no other file knows the keys.

Three prefixes occur: `model.language_model.` in multimodal checkpoints, `model.` in text-only
ones, none in a bare text model. Fused experts lack `.weight` there; some third-party checkpoints
hold the experts one by one.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from g4tool.checkpoint.inventory import text_tensors
from g4tool.model.config import TextConfig

MULTIMODAL_PREFIX = "model.language_model."
TEXT_PREFIX = "model."
PREFIXES = (MULTIMODAL_PREFIX, TEXT_PREFIX, "")

_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
_FUSED = re.compile(r"(layers\.\d+\.experts\.(?:gate_up_proj|down_proj))\.weight")
_SHARED_KV = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.weight")
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class NameMap:
    """What became of the keys of a checkpoint.

    `pieces` gives for each canonical name the keys whose values, joined along dimension 0 and
    reshaped, are the tensor; `dropped` has the reason for each key; `unread` are keys that belong
    nowhere, `unfilled` canonical names without a key.
    """

    prefix: str
    pieces: dict[str, tuple[str, ...]]
    extras: list[str]
    dropped: dict[str, str]
    unread: list[str]
    unfilled: list[str]


def find_prefix(keys: Collection[str]) -> str | None:
    """The prefix of the text model's keys, or None when there is no embedding under any."""
    return next((p for p in PREFIXES if f"{p}embed_tokens.weight" in keys), None)


def published_prefix(raw_config: Mapping[str, Any]) -> str:
    """The prefix that loaders expect beside this config.json."""
    return MULTIMODAL_PREFIX if "text_config" in raw_config else TEXT_PREFIX


def hf_name(name: str, prefix: str) -> str:
    """The published key of a canonical name."""
    if name == _HEAD:
        return _HEAD
    fused = _FUSED.fullmatch(name)
    return prefix + (fused[1] if fused else name)


def map_names(keys: Collection[str], config: TextConfig, prefix: str) -> NameMap:
    """Sort the keys of a checkpoint whose text keys have `prefix`."""
    left = dict.fromkeys(keys)
    pieces: dict[str, tuple[str, ...]] = {}
    unfilled: list[str] = []
    for name in text_tensors(config):
        found = _keys_of(name, config, prefix, left)
        if found is None:
            unfilled.append(name)
            continue
        pieces[name] = found
        for key in found:
            del left[key]
    extras = [key for key in left if is_extra(key)]
    reasons = ((key, _drop_reason(key, config, prefix)) for key in left)
    dropped = {key: reason for key, reason in reasons if reason is not None}
    known = {*extras, *dropped}
    unread = [key for key in left if key not in known]
    return NameMap(prefix, pieces, extras, dropped, unread, unfilled)


def _keys_of(
    name: str, config: TextConfig, prefix: str, keys: Collection[str]
) -> tuple[str, ...] | None:
    published = hf_name(name, prefix)
    if published in keys:
        return (published,)
    if _FUSED.fullmatch(name) is None or config.moe is None:
        return None
    return _single_expert_keys(published, config.moe.num_experts, keys)


def _single_expert_keys(
    published: str, experts: int, keys: Collection[str]
) -> tuple[str, ...] | None:
    """The keys of one fused tensor, `….experts.<matrix>`, where they are there one by one."""
    stem, matrix = published.rsplit(".", 1)
    ways = [(matrix,), ("gate_proj", "up_proj")] if matrix == "gate_up_proj" else [(matrix,)]
    for parts in ways:
        spelt = (f"{stem}.{e}.{part}.weight" for e in range(experts) for part in parts)
        # Stops at the first one missing: the number of experts may be a mistake.
        found = tuple(takewhile(keys.__contains__, spelt))
        if len(found) == experts * len(parts):
            return found
    return None


def is_extra(key: str) -> bool:
    """Whether a key is a tower's: of what sees or hears, not of the text model."""
    return key.removeprefix("model.").split(".", 1)[0] in _TOWERS


def _drop_reason(key: str, config: TextConfig, prefix: str) -> str | None:
    if key == _HEAD and config.tie_word_embeddings:
        return "the head is tied to the embedding"
    shared = _SHARED_KV.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
    if shared is None or int(shared[1]) >= config.num_layers:
        return None
    source = config.layers[int(shared[1])].kv_source
    return None if source is None else f"layer {shared[1]} reads the keys and values of {source}"
