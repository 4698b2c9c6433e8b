"""The small files of a checkpoint's folder, made of a GGUF file's metadata."""

import json
from pathlib import Path
from typing import Any

from g4tool.checkpoint.gguf_header import Metadata
from g4tool.checkpoint.gguf_tokenizer import (
    CONTROL,
    GENERATION_CONFIG,
    MODEL,
    PREFIX,
    ROLES,
    SAMPLING,
    SHOWN,
    SPACES,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    USER_DEFINED,
    key_of,
)
from g4tool.checkpoint.settings import shown
from g4tool.errors import G4Error


def token_ids(path: Path, metadata: Metadata) -> dict[str, Any]:
    """The special ids of a file, under config.json's keys. `path` is for messages."""
    ends = [_id(path, metadata, role) for role in ("eos", "eot", "eom")]
    found: dict[str, Any] = {"eos_token_id": [end for end in ends if end is not None]}
    for role in ("bos", "pad"):
        number = _id(path, metadata, role)
        if number is not None:
            found[f"{role}_token_id"] = number
    return found


def small_files(path: Path, metadata: Metadata, vocab: int) -> dict[str, str]:
    """Content by name of the files that make a checkpoint's folder, but for config.json.

    `vocab` is the number of the embedding's rows. Raises G4Error, naming the key, for a tokenizer
    of another kind or another model, and for keys that are missing or do not fit each other.
    """
    tokens = _list(path, metadata, "tokens", str)
    if len(tokens) != vocab:
        raise G4Error(
            f"{path}: {PREFIX}tokens has {len(tokens)} tokens, but the model's embedding has "
            f"{vocab} rows; the tokenizer belongs to another model."
        )
    kinds = _list(path, metadata, "token_type", int)
    if len(kinds) != len(tokens):
        raise G4Error(f"{path}: {PREFIX}token_type has not one entry a token.")
    if len(set(tokens)) != len(tokens):
        raise G4Error(f"{path}: {PREFIX}tokens has a token twice.")
    merges = _list(path, metadata, "merges", str)
    for merge in merges:
        if merge.count(" ") != 1:
            raise G4Error(f"{path}: the merge {shown(merge)} is not of two parts.")
    added = [
        _added(number, text, kind == CONTROL or text in SHOWN)
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    ids = token_ids(path, metadata)
    files = {
        TOKENIZER_CONFIG: _settings(path, metadata, tokens, added),
        GENERATION_CONFIG: {
            **ids,
            "do_sample": True,
            **{
                name: metadata[f"general.sampling.{key}"]
                for key, name in SAMPLING.items()
                if f"general.sampling.{key}" in metadata
            },
        },
    }
    # In one line: indented, half a million merges are written by Python's slow encoder.
    tokenizer = json.dumps(_tokenizer(tokens, merges, added), ensure_ascii=False)
    result = {TOKENIZER: tokenizer + "\n"}
    result |= {
        name: json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        for name, value in files.items()
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        result[TEMPLATE] = template
    return result


def _id(path: Path, metadata: Metadata, role: str) -> int | None:
    key = f"{PREFIX}{key_of(role)}_token_id"
    number = metadata.get(key)
    if number is not None and type(number) is not int:
        raise G4Error(f"{path}: {key} is {shown(number)}, not a token's number.")
    if number is None and role in ("bos", "eos"):
        raise G4Error(f"{path}: the metadata key {key} is missing; a Gemma cannot be run without.")
    return number


def _list(path: Path, metadata: Metadata, key: str, kind: type) -> list[Any]:
    if metadata.get(f"{PREFIX}model") != MODEL:
        raise G4Error(
            f"{path}: {PREFIX}model is {shown(metadata.get(f'{PREFIX}model'))}, but g4 knows "
            f"{MODEL!r} only."
        )
    values = metadata.get(PREFIX + key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        problem = "is missing" if values is None else "is not a list of the right kind"
        raise G4Error(f"{path}: the metadata key {PREFIX}{key} {problem}; it has no tokenizer.")
    return values


def _added(number: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def _tokenizer(tokens: list[str], merges: list[str], added: list[dict[str, Any]]) -> dict[str, Any]:
    """A tokenizer.json that splits text as llama.cpp does from the same metadata."""
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": SPACES,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "\n+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": ROLES["unk"],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": merges,
        },
    }


def _settings(
    path: Path, metadata: Metadata, tokens: list[str], added: list[dict[str, Any]]
) -> dict[str, Any]:
    named: dict[str, str] = {}
    for role in ROLES:
        number = _id(path, metadata, role)
        if number is not None:
            if not 0 <= number < len(tokens):
                raise G4Error(f"{path}: {role} is the token {number}, of {len(tokens)}.")
            named[f"{role}_token"] = tokens[number]
    special = [token["content"] for token in added if token["special"]]
    return {
        **named,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": [text for text in special if text not in named.values()],
        "padding_side": "left",
        "tokenizer_class": "GemmaTokenizer",
    }
