"""Checkpoints as other makers quantize them: of the tiny models, by the formula of each format."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.formats.leaf import Leaf
from g4tool.formats.weights import QuantizedWeights
from g4tool.kernels.int4 import dequantize_int4
from g4tool.kernels.int8 import dequantize_int8

PREFIX = "model.language_model."
# What Google's checkpoints leave alone, and the towers.
IGNORE = ["lm_head", "re:.*vision_tower.*", "re:.*audio_tower.*", "re:.*router.*", "re:.*embed.*"]


@dataclass(frozen=True)
class Packing:
    """A scheme of compressed-tensors, and how experts lie.

    One by one, gate and up in `pairs`, or a layer's in one tensor, `fused` or `dotted`.
    """

    bits: int = 4
    group: int | None = 32
    symmetric: bool = True
    scale: torch.dtype = torch.bfloat16
    experts: str = "single"


def quantized(weight: Tensor, how: Packing) -> tuple[Tensor, Tensor, Tensor | None]:
    """Signed codes int8 [N, K], scale [N, G], zero points int8 [N, G] where asymmetric."""
    values = weight.float().unflatten(-1, (-1, how.group or weight.shape[-1]))
    half = 2 ** (how.bits - 1)
    if how.symmetric:
        scale, zero = (values.abs().amax(-1) / (half - 0.5)).to(how.scale), None
        shift: Tensor | float = 0.0
    else:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scale = ((high - low) / (2 * half - 1)).to(how.scale)
        zero = (-half - low / scale.float()).round().clamp(-half, half - 1).to(torch.int8)
        shift = zero.float().unsqueeze(-1)
    codes = (values / scale.float().unsqueeze(-1) + shift).round().clamp(-half, half - 1)
    return codes.flatten(-2).to(torch.int8), scale, zero


def meant(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The fp32 weight."""
    values = codes.float().unflatten(-1, (scale.shape[-1], -1))
    shift = 0 if zero is None else zero.float().unsqueeze(-1)
    return ((values - shift) * scale.float().unsqueeze(-1)).flatten(-2)


def packed(values: Tensor, bits: int, dim: int) -> Tensor:
    """Signed values as int32 words, the first value lowest, along `dim`."""
    per = 32 // bits
    rows = values.movedim(dim, -1).to(torch.int64) + 2 ** (bits - 1)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % per)).unflatten(-1, (-1, per))
    words = (rows << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


Pack = Callable[[Tensor, Packing], dict[str, Tensor]]


def pack_weight(weight: Tensor, how: Packing) -> dict[str, Tensor]:
    """The tensors `packed`, `scale`, `shape` and `zero_point` of a matrix."""
    codes, scale, zero = quantized(weight, how)
    parts = {
        "packed": packed(codes, how.bits, -1),
        "scale": scale,
        "shape": torch.tensor(weight.shape),
    }
    return parts if zero is None else {**parts, "zero_point": packed(zero, how.bits, 0)}


def quantization_config(how: Packing) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {
        "num_bits": how.bits,
        "type": "int",
        "symmetric": how.symmetric,
        "strategy": "channel" if how.group is None else "group",
        "group_size": how.group,
        "actorder": None,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORE,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def packed_checkpoint(
    source: Path, folder: Path, how: Packing, pack: Pack = pack_weight
) -> dict[str, Tensor]:
    """A multimodal folder as Google's `-qat-w4a16-ct` ones; returns fp32 weights, canonical names.

    Two files, so that the parts of a weight part: scales lie in the second.
    """
    checkpoint = open_checkpoint(source)
    tensors: dict[str, Tensor] = {"model.vision_tower.encoder.weight": torch.ones(4, 4)}
    weights: dict[str, Tensor] = {}
    for name in checkpoint.names:
        value = checkpoint.read(name)
        key = PREFIX + checkpoint.hf_name(name).removeprefix(checkpoint.prefix)
        if name.endswith("norm.weight") or value.ndim < 2 or "router" in name or "embed" in name:
            tensors[key], weights[name] = value, value.float()
            continue
        codes, scale, zero = quantized(value, how)
        weights[name] = meant(codes, scale, zero)
        if value.ndim == 2:
            stem = key.removesuffix("weight")
            tensors |= {f"{stem}weight_{p}": t for p, t in pack(value, how).items()}
        else:
            tensors |= _experts(key, value, how, pack)
    folder.mkdir()
    raw = checkpoint.raw_config
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**raw, "architectures": None},
        "quantization_config": quantization_config(how),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, tensors)
    return weights


def save(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Two files and their index, scales in the second."""
    files: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        files["b.safetensors" if "scale" in name else "a.safetensors"][name] = tensor.contiguous()
    for file, members in files.items():
        save_file(members, folder / file, {"format": "pt", **(metadata or {})})
    places = {name: file for file, members in files.items() for name in members}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def dequantized(leaf: Leaf) -> Tensor:
    """The fp32 weight that a leaf means."""
    parts = {part: leaf.read(part) for part in leaf.specs}
    assert {p: (t.dtype, tuple(t.shape)) for p, t in parts.items()} == dict(leaf.specs)
    if leaf.stored.kind == "plain":
        return parts["weight"].float()
    if leaf.stored.kind == "int8":
        return dequantize_int8(parts["qdata"], parts["scale"], torch.float32)
    return dequantize_int4(parts["qdata"], parts["scale"], parts["zero"], torch.float32)


def read_all(weights: QuantizedWeights) -> dict[str, Tensor]:
    """Every weight in fp32, by canonical name."""
    return {name: dequantized(leaf) for name, leaf in weights.leaves.items()}


def _experts(key: str, value: Tensor, how: Packing, pack: Pack) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    stem, matrix = key.rsplit(".", 1)
    if how.experts in ("fused", "dotted"):
        join = "_" if how.experts == "fused" else ".weight_"
        each = [pack(expert, how) for expert in value]
        parts = [part for part in each[0] if part != "shape"]
        return {f"{key}{join}{part}": torch.stack([e[part] for e in each]) for part in parts}
    for number, expert in enumerate(value):
        halves = {matrix: expert}
        if matrix == "gate_up_proj" and how.experts == "single":
            halves = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
        for part, rows in halves.items():
            for name, tensor in pack(rows, how).items():
                found[f"{stem}.{number}.{part}.weight_{name}"] = tensor
    return found
