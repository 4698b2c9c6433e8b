"""GGUF files written by the gguf package alone: its names, its writer, its quantizers."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from g4tool.checkpoint.gguf_config import config_metadata, rope_factors
from g4tool.checkpoint.gguf_tokenizer import tokenizer_metadata
from g4tool.checkpoint.names import hf_name
from g4tool.checkpoint.reader import open_checkpoint

Values = dict[str, np.ndarray[Any, Any]]


def foreign_name(key: str, layers: int) -> str:
    """What the package's own table for Gemma 4 makes of a published key."""
    if key.endswith("router.scale"):
        return foreign_name(key.replace(".scale", ".proj.weight"), layers)[:-7] + ".scale"
    if key.endswith("router.per_expert_scale"):
        down = key.replace("router.per_expert_scale", "experts.down_proj.weight")
        return foreign_name(down, layers)[:-7] + ".scale"
    if key.endswith("layer_scalar") or re.search(r"experts\.\w+$", key):
        key += ".weight"
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    name = table.get_name(key, try_suffixes=(".weight",))
    assert name is not None, key
    return str(name)


def foreign_gguf(
    path: Path,
    folder: Path,
    kinds: Mapping[str, str],
    *,
    change: Mapping[str, Any] | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> Values:
    """Write the checkpoint in `folder`; returns what the package dequantizes, by canonical name.

    `kinds` has a pattern of canonical names -> type; what no pattern fits is F32. Types that the
    package does not quantize get random codes. `change` replaces metadata (None: leaves out);
    `more` are tensors by GGUF name.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "gemma4")
    metadata = {f"gemma4.{key}": value for key, value in config_metadata(config).items()}
    metadata |= tokenizer_metadata(folder, config.vocab_size)
    add_metadata(writer, metadata | dict(change or {}))
    values: Values = {}
    for name in checkpoint.names:
        kind = next((kind for pattern, kind in kinds.items() if re.search(pattern, name)), "F32")
        stored = _stored(checkpoint.read(name).float(), kind)
        number = gguf.GGMLQuantizationType[kind]
        values[name] = gguf.quants.dequantize(stored, number)
        key = foreign_name(hf_name(name, "model."), config.num_layers)
        writer.add_tensor(key, stored, raw_dtype=number)
    for name, tensor in {"rope_freqs.weight": rope_factors(config), **(more or {})}.items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add values by key, as the types that llama.cpp wants; None adds nothing."""
    for key, value in metadata.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int() if key != "general.architecture":
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                writer.add_string(key, value)


def _stored(values: Tensor, kind: str) -> np.ndarray[Any, Any]:
    number = gguf.GGMLQuantizationType[kind]
    if kind not in ("Q4_K", "Q6_K"):
        stored: np.ndarray[Any, Any] = gguf.quants.quantize(values.numpy(), number)
        return stored
    block, size = gguf.GGML_QUANT_SIZES[number]
    generator = torch.Generator().manual_seed(5)
    count = values.numel() // block
    codes = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)
    # The half-precision factors of a block: first in Q4_K (two), last in Q6_K.
    factors = torch.rand(count, 2, generator=generator).half().view(torch.uint8)
    if kind == "Q4_K":
        codes[:, :4] = factors
    else:
        codes[:, -2:] = factors[:, :2]
    return codes.view(*values.shape[:-1], -1).numpy()


def text_of(folder: Path) -> str:
    """A text with every kind of token in it: words, newlines, bytes, control tokens."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = " ".join(piece.strip("▁") for piece in list(vocabulary)[600:1200:7])
    return f"{words}\n\n  two\n\n\nlines\t– naïve 中文 🙂 <|turn>user\nhi<turn|>\n<unused3>{words}"
