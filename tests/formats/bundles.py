"""Makes a bundle of a checkpoint by plain rounding, and keeps the weights it means."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from g4tool.checkpoint.reader import Checkpoint, open_checkpoint
from g4tool.checkpoint.writer import TensorFileWriter
from g4tool.formats.bundle import BUNDLE, CONVENTION
from g4tool.formats.torchao import Stored, part_names, shard_layout

# Canonical name and shape -> "int4", "int8" or "plain", and the group.
Rule = Callable[[str, tuple[int, ...]], tuple[str, int | None]]


def usual_rule(name: str, shape: tuple[int, ...]) -> tuple[str, int | None]:
    """int8 embeddings (one scale a row), int8 v_proj in groups, other matrices int4."""
    if name.startswith("embed_tokens"):
        return "int8", shape[-1]
    if len(shape) < 2 or "router" in name:
        return "plain", None
    return ("int8", 32) if "v_proj" in name else ("int4", 64 if "down_proj" in name else 32)


def make_bundle(source: Path, folder: Path, rule: Rule = usual_rule) -> dict[str, Tensor]:
    """Write `folder`, two files and their index; returns the fp32 weights by canonical name."""
    checkpoint = open_checkpoint(source)
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    (folder / BUNDLE).write_text(json.dumps(CONVENTION))
    half = len(checkpoint.names) // 2
    weights: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for file, names in (
        ("a.safetensors", checkpoint.names[:half]),
        ("b.safetensors", checkpoint.names[half:]),
    ):
        for name in _write(checkpoint, folder / file, names, rule, weights):
            places[name] = file
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def _write(
    checkpoint: Checkpoint, path: Path, names: list[str], rule: Rule, weights: dict[str, Tensor]
) -> list[str]:
    entries = []
    for name in names:
        info = checkpoint.info(name)
        kind, group = rule(name, info.shape)
        dtype = info.dtype if kind == "plain" else torch.bfloat16
        entries.append(Stored(checkpoint.hf_name(name), kind, info.shape, dtype, group))
    specs, metadata = shard_layout(entries)
    with TensorFileWriter(path, specs, metadata) as writer:
        for name, entry in zip(names, entries, strict=True):
            parts, weights[name] = _quantize(checkpoint.read(name), entry)
            for part, tensor in part_names(entry.name, entry.kind).items():
                writer.write(tensor, parts[part])
    return list(specs)


def _quantize(weight: Tensor, entry: Stored) -> tuple[dict[str, Tensor], Tensor]:
    if entry.kind == "plain":
        return {"weight": weight}, weight.float()
    values = weight.float().unflatten(-1, (-1, entry.group))
    if entry.kind == "int8":
        scale = (values.abs().amax(-1) / 127).bfloat16()
        codes = (values / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
        parts = {
            "qdata": codes.flatten(-2).to(torch.int8),
            "scale": scale,
            "zero": torch.zeros_like(scale, dtype=torch.int8),
        }
        return parts, (codes * scale.float().unsqueeze(-1)).flatten(-2)
    low, high = values.amin(-1), values.amax(-1)
    scale = ((high - low) / 15).bfloat16()
    zero = (-low / scale.float()).bfloat16()
    s, z = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)
    codes = (values / s + z).round().clamp(0, 15)
    flat = codes.flatten(-2).to(torch.uint8)
    parts = {
        "qdata": flat[..., 0::2] + 16 * flat[..., 1::2],
        "scale": scale.mT.contiguous(),
        "zero": zero.mT.contiguous(),
    }
    return parts, ((codes - z) * s).flatten(-2)
