"""A trained model as a checkpoint in the published layout."""

from pathlib import Path
from typing import Any

import torch

from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.folder import CONFIG
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.names import TEXT_PREFIX, hf_name
from g4tool.checkpoint.tiny import TINY
from g4tool.checkpoint.writer import Spec, write_checkpoint
from g4tool.errors import G4Error
from g4tool.files import write_bytes, write_json, write_text
from g4tool.model.config import TextConfig
from tiny.state import read_state

# Small enough that every tiny model has several shards and an index.
SHARD_BYTES = 2_000_000
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

_CONTROL_TOKENS = [
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"),
    *("<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"),
]


def export(name: str, state_folder: Path, tokenizer: Path, folder: Path) -> list[Path]:
    """Writes model `name` into `folder` with the best weights of `state_folder`; its files.

    Raises G4Error for a state that is missing or has other tensors.
    """
    weights = read_state(state_folder, name).best_weights
    shapes = text_tensors(TINY[name])
    found = {key: tuple(value.shape) for key, value in weights.items()}
    if found != shapes:
        wrong = sorted(k for k in found.keys() | shapes if found.get(k) != shapes.get(k))[0]
        raise G4Error(
            f"{state_folder}: the state of {name} has {wrong} as {found.get(wrong)}, but the "
            f"model has it as {shapes.get(wrong)}; train it again."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*safetensors*"):
        path.unlink()
    small = write_small_files(TINY[name], tokenizer, folder)
    values = {hf_name(key, TEXT_PREFIX): weights[key] for key in shapes}
    specs: dict[str, Spec] = {
        key: (torch.bfloat16, tuple(value.shape)) for key, value in values.items()
    }
    return small + write_checkpoint(
        folder, specs, lambda key, start, stop: values[key][start:stop], shard_bytes=SHARD_BYTES
    )


def write_small_files(config: TextConfig, tokenizer: Path, folder: Path) -> list[Path]:
    """Everything of a published checkpoint but the weights and their index."""
    write_json(folder / CONFIG, to_hf_config(config))
    write_json(folder / "generation_config.json", _generation_config())
    write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    write_bytes(folder / "tokenizer.json", tokenizer.read_bytes())
    write_text(folder / "chat_template.jinja", chat_template(large=not config.per_layer_dim))
    return sorted(path for path in folder.iterdir() if "safetensors" not in path.name)


def chat_template(large: bool) -> str:
    """As published: large models close an empty thought in theirs, small ones do not."""
    setting = f"{{%- set append_empty_thought = {str(large).lower()} -%}}"
    return f"{setting}\n{TEMPLATE.read_text(encoding='utf-8')}"


def _generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 106, 50],
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }


def _tokenizer_config(config: TextConfig) -> dict[str, Any]:
    return {
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        # Converters split a control token in two that is not listed here.
        "extra_special_tokens": _CONTROL_TOKENS,
        "mask_token": "<mask>",
        "model_max_length": config.max_position_embeddings,
        "pad_token": "<pad>",
        "padding_side": "left",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    }
