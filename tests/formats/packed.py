"""Reads compressed-tensors folders by the formula of their format, for comparison."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from g4tool.checkpoint.config import parse_text_config
from g4tool.model.text import TextModel

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def weights(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """fp32 weights by the names of the checkpoint's layout; experts stay one by one."""
    found: dict[str, Tensor] = {}
    for name, value in stored.items():
        stem, _, part = name.rpartition(".")
        if part == "weight_packed":
            rows, columns = stored[f"{stem}.weight_shape"].tolist()
            bits = 32 * value.shape[1] // columns
            shifts = torch.arange(0, 32, bits)
            codes = ((value.unsqueeze(-1) >> shifts) & (2**bits - 1)) - 2 ** (bits - 1)
            scale = stored[f"{stem}.weight_scale"].float()
            groups = codes.float().reshape(rows, scale.shape[1], -1)
            found[f"{stem}.weight"] = (groups * scale.unsqueeze(-1)).reshape(rows, columns)
        elif part not in ("weight_scale", "weight_shape"):
            found[name] = value.float()
    return found


def fused(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the experts of a layer in two tensors, gate before up."""
    result: dict[str, Tensor] = {}
    layers: dict[str, dict[str, list[Tensor]]] = {}
    for name, value in found.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            result[name] = value
    number = 0
    while True:
        ours = {m[1] for n in found if (m := re.match(rf"(.*\.experts)\.{number}\.", n))}
        if not ours:
            break
        for layer in ours:
            for part in ("gate", "up", "down"):
                rows = found[f"{layer}.{number}.{part}_proj.weight"]
                layers.setdefault(layer, {}).setdefault(part, []).append(rows)
        number += 1
    for layer, parts in layers.items():
        pairs = zip(parts["gate"], parts["up"], strict=True)
        result[f"{layer}.gate_up_proj.weight"] = torch.stack([torch.cat(p) for p in pairs])
        result[f"{layer}.down_proj.weight"] = torch.stack(parts["down"])
    return result


def text_model(folder: Path) -> TextModel:
    """Our plain fp32 model with the folder's weights."""
    config = parse_text_config(json.loads((folder / "config.json").read_text()))
    model = TextModel(config)
    values = fused(weights(tensors(folder)))
    texts = {
        name.removeprefix("model.").removeprefix("language_model."): value
        for name, value in values.items()
        if not re.search("vision|audio", name)
    }
    model.load_state_dict(texts)
    return model.eval()
