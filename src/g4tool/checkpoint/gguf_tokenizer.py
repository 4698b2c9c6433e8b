"""A Gemma tokenizer and its small files as the metadata that llama.cpp reads.

llama.cpp's tokenizer `gemma4` is BPE over characters, spaces written as U+2581, with tokens for
single bytes; a run of newlines is never merged with what stands around it. What a tokenizer.json
says beyond that is lost, so another kind of tokenizer is refused.
"""

import re
from pathlib import Path
from typing import Any

from g4tool.checkpoint.folder import CONFIG, read_json
from g4tool.checkpoint.gguf_header import Metadata
from g4tool.checkpoint.settings import shown
from g4tool.errors import G4Error

MODEL = "gemma4"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG, TEMPLATE = "generation_config.json", "chat_template.jinja"

PREFIX = "tokenizer.ggml."
# Types of tokens, as the gguf package's TokenType has them.
_NORMAL, CONTROL, USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# llama.cpp hides control tokens in its output; these a chat's parser wants to see.
SHOWN = {
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
}
_TURN_END = "<turn|>"
ROLES = {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
# llama.cpp merges by the order of the list, not by score; its own converter writes this one.
_NO_SCORE = -1000.0
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p"}


def tokenizer_metadata(folder: Path, vocab: int) -> Metadata:
    """The keys for the tokenizer, the chat template and the sampling defaults in `folder`.

    `vocab` is the number of the embedding's rows, which is how many tokens there must be. Raises
    G4Error for a tokenizer of another kind, or with more tokens than that.
    """
    path = folder / TOKENIZER
    raw = read_json(path)
    model = _gemma_model(path, raw)
    added = {token["content"]: token for token in raw.get("added_tokens") or []}
    ids = {**model["vocab"], **{text: token["id"] for text, token in added.items()}}
    if len(ids) > vocab or max(ids.values()) >= vocab or len(set(ids.values())) != len(ids):
        raise G4Error(
            f"{path} has {len(ids)} tokens up to the id {max(ids.values())}, but the model's "
            f"embedding has {vocab} rows."
        )
    tokens = [f"[PAD{number}]" for number in range(vocab)]
    kinds = [_UNUSED] * vocab
    for text, number in ids.items():
        tokens[number], kinds[number] = text, _kind(text, added.get(text))
    found: Metadata = {
        "model": MODEL,
        "tokens": tokens,
        "scores": [_NO_SCORE] * vocab,
        "token_type": kinds,
        "merges": _joined(path, model["merges"]),
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    settings = _optional(folder / TOKENIZER_CONFIG)
    generation = _optional(folder / GENERATION_CONFIG)
    for role, text in ROLES.items():
        named = settings.get(f"{role}_token", text)
        text = named.get("content") if isinstance(named, dict) else named
        if text in ids:
            found[f"{key_of(role)}_token_id"] = ids[text]
    found |= _ends(folder, found, ids, generation)
    result = {PREFIX + key: value for key, value in found.items()}
    if suppressed := generation.get("suppress_tokens"):
        result[f"{PREFIX}suppress_tokens"] = suppressed
    template = folder / TEMPLATE
    if template.is_file():
        result["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(settings.get("chat_template"), str):
        result["tokenizer.chat_template"] = settings["chat_template"]
    for key, name in SAMPLING.items():
        if type(generation.get(name)) in (int, float):
            result[f"general.sampling.{key}"] = generation[name]
    return result


def key_of(role: str) -> str:
    """The word for a special token in the metadata's keys."""
    return {"unk": "unknown", "pad": "padding"}.get(role, role)


def _gemma_model(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The BPE model of a tokenizer.json. Raises G4Error when it is not one such as Gemma's."""
    model = raw.get("model")
    model = model if isinstance(model, dict) else {}
    normalizer = raw.get("normalizer")
    if isinstance(normalizer, dict) and normalizer.get("type") == "Sequence":
        steps = normalizer.get("normalizers")
        normalizer = steps[0] if isinstance(steps, list) and len(steps) == 1 else None
    fits = (
        model.get("type") == "BPE"
        and model.get("byte_fallback") is True
        and isinstance(model.get("vocab"), dict)
        and isinstance(model.get("merges"), list)
        and normalizer == SPACES
    )
    if not fits:
        raise G4Error(
            f"{path} is no tokenizer such as Gemma 4's (BPE with byte fallback, spaces written as "
            f"U+2581), which is all that llama.cpp's {MODEL} knows."
        )
    return model


def _joined(path: Path, merges: list[Any]) -> list[str]:
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or any(" " in part for part in pair):
            raise G4Error(f"{path}: the merge {shown(pair)} cannot be said in a GGUF file.")
    return [" ".join(pair) for pair in pairs]


def _kind(text: str, added: dict[str, Any] | None) -> int:
    if text in SHOWN:
        return USER_DEFINED
    if added is not None and added.get("special"):
        return CONTROL
    return _BYTE if _BYTE_TOKEN.fullmatch(text) else _NORMAL


def _ends(
    folder: Path, found: Metadata, ids: dict[str, int], generation: dict[str, Any]
) -> Metadata:
    """Keys of the end tokens beside EOS. llama.cpp has room for three: EOS, of turn, of message."""
    listed = generation.get("eos_token_id", read_json(folder / CONFIG).get("eos_token_id"))
    listed = listed if isinstance(listed, list) else [listed]
    turn = ids.get(_TURN_END)
    known = {found.get("eos_token_id"), turn}
    more = [number for number in listed if type(number) is int and number not in known]
    if len(more) > 1:
        raise G4Error(
            f"{folder}: the model ends at any of the tokens {listed}, more than llama.cpp knows of."
        )
    ends = {"eot_token_id": turn, "eom_token_id": more[0] if more else None}
    return {key: number for key, number in ends.items() if number is not None}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
