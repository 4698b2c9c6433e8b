"""compressed-tensors' pack-quantized layout: how an integer weight lies on disk, both ways.

A weight `a.b.weight` [N, K] in groups of g columns is

    a.b.weight_packed      int32 [N, K * bits / 32]   unsigned codes, the first column lowest
    a.b.weight_scale       [N, K/g]
    a.b.weight_shape       int64 [2]
    a.b.weight_zero_point  int32 [N * bits / 32, K/g]   only where asymmetric, packed down the rows

with w = (code - zero) * scale and zero 2**(bits-1) where there is none. On a little-endian machine
the bytes of `weight_packed` are qdata of g4tool.kernels.int4 as they stand. Experts lie one by one,
`experts.E.gate_proj` and so on, as vLLM reads them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from g4tool.errors import G4Error
from g4tool.formats.torchao import Spec, Stored
from g4tool.kernels.int4 import dequantize_int4
from g4tool.kernels.int8 import dequantize_int8

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
# What a bundle with int4 experts says instead of the status "compressed". transformers knows no
# such status and stops with this text; without it, it would leave the experts random and only log
# that they are missing. vLLM does not look at it, and g4tool.hf puts the right word in its place.
GUARD = "compressed, needs: import g4tool.hf"

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:\.weight)?")
_ATTENTION = re.compile(
    r"(?:model\.(?:language_model\.)?)?(layers\.\d+\.self_attn)\.[qkv]_proj\.weight"
)
Bits = Literal[4, 8]


def modules(name: str, experts: int | None = None) -> list[str]:
    """The linear layers that make up a weight; of fused `experts` those of each in turn."""
    fused = _FUSED.fullmatch(name)
    if fused is None or experts is None:
        return [name.removesuffix(".weight")]
    parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    return [f"{fused[1]}.{expert}.{part}" for expert in range(experts) for part in parts]


def weight_specs(entry: Stored) -> dict[str, Spec]:
    """Dtype and shape of every tensor that a weight becomes.

    Raises ValueError where group or width do not fit.
    """
    if entry.kind == "plain":
        return {entry.name: (entry.dtype, entry.shape)}
    columns, group = entry.shape[-1], entry.group
    per_word = 32 // bits_of(entry)
    if not group or columns % group or columns % per_word:
        raise ValueError(f"groups of {group} or whole words do not fit {entry.name}")
    names = modules(entry.name, _experts(entry))
    count = entry.shape[-2] * (entry.shape[0] if len(entry.shape) == 3 else 1) // len(names)
    specs: dict[str, Spec] = {}
    for module in names:
        specs[f"{module}.weight_packed"] = (torch.int32, (count, columns // per_word))
        specs[f"{module}.weight_scale"] = (entry.dtype, (count, columns // group))
        specs[f"{module}.weight_shape"] = (torch.int64, (2,))
    return specs


def bits_of(entry: Stored) -> Bits:
    """Bits of a code."""
    return 4 if entry.kind == "int4" else 8


def _experts(entry: Stored) -> int | None:
    return entry.shape[0] if len(entry.shape) == 3 else None


def packed_words(qdata: Tensor) -> Tensor:
    """uint8 nibbles [N, K/2] or int8 codes [N, K] as int32 words [N, K * bits / 32]."""
    if qdata.dtype == torch.int8:
        qdata = (qdata.to(torch.int16) + 128).to(torch.uint8)
    return qdata.contiguous().view(torch.int32)


def unpacked_words(words: Tensor, bits: Bits, columns: int) -> Tensor:
    """The inverse of `packed_words`: uint8 nibbles [N, columns/2], or int8 codes [N, columns]."""
    values = words.contiguous().view(torch.uint8)[:, : columns * bits // 8]
    if bits == 4:
        return values.contiguous()
    return (values.to(torch.int16) - 128).to(torch.int8)


def dequantized(words: Tensor, scale: Tensor, shape: Tensor) -> Tensor:
    """The weight [N, K], in the dtype of `scale`, that three tensors of a symmetric one mean."""
    columns = int(shape[1])
    if words.shape[1] * 4 == columns:
        return dequantize_int8(unpacked_words(words, 8, columns), scale, scale.dtype)
    zero = torch.full_like(scale, 8).t()
    return dequantize_int4(unpacked_words(words, 4, columns), scale.t(), zero, scale.dtype)


def unpacked_zeros(words: Tensor, rows: int) -> Tensor:
    """4-bit zero points int32 [ceil(rows/8), groups], packed down the rows -> uint8 [rows, groups].

    In units of the unsigned code: 8 is the zero of a symmetric weight.
    """
    shifts = torch.arange(0, 32, 4).view(1, 8, 1)
    nibbles = (words.unsqueeze(1) >> shifts) & 15
    return nibbles.flatten(0, 1)[:rows].to(torch.uint8)


def quantization_config(entries: Iterable[Stored], linears: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint with these weights.

    `linears` names the linear layers that are plain, for the ignore list. Where all integer weights
    are alike the target is the class Linear, the form every loader knows best; else each kind names
    its layers, since loaders try names and classes in different orders.
    """
    kinds: dict[tuple[Bits, int | None], list[Stored]] = defaultdict(list)
    experts = False
    for entry in entries:
        if entry.kind != "plain":
            fused = len(entry.shape) == 3
            # vLLM's experts are never one scale a row, though a group may be as long as one.
            row = entry.kind == "int8" and entry.group == entry.shape[-1] and not fused
            kinds[bits_of(entry), None if row else entry.group].append(entry)
            experts |= fused
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if len(kinds) == 1 else _targets(alike),
            "weights": _arguments(bits, group),
            "input_activations": None,
            "output_activations": None,
            "format": FORMAT,
        }
        for number, ((bits, group), alike) in enumerate(kinds.items())
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": GUARD if experts else "compressed",
        "config_groups": groups,
        "ignore": list(linears),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(entries: Iterable[Stored]) -> list[str]:
    return list(dict.fromkeys(target(entry.name) for entry in entries))


def target(name: str) -> str:
    """What names the layers of a weight, in the file's naming, for targets and ignore lists.

    A path, which vLLM translates to its own; a pattern is taken as it is, so it starts anywhere.
    """
    attention = _ATTENTION.fullmatch(name)
    if attention is not None:
        # vLLM joins the three, and asks for all of them even where a layer has no v or k.
        return rf"re:.*{re.escape(attention[1])}\.[qkv]_proj$"
    experts = _FUSED.fullmatch(name)
    if experts is not None:
        layer = re.search(r"layers\.\d+\.experts", name)
        assert layer is not None, "experts are in layers"
        parts = "(gate|up)" if experts[2] == "gate_up_proj" else "down"
        return rf"re:.*{re.escape(layer[0])}\..*{parts}_proj$"
    return name.removesuffix(".weight")


def _arguments(bits: Bits, group: int | None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
    }


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise G4Error for a `quantization_config` whose weights g4 cannot read as they are meant."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise G4Error(f"{where}: quantization_config has no config_groups.")
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        value = config.get(key)
        if value and value != {"format": "dense"}:
            raise G4Error(f"{where}: quantization_config asks for a {key}, which g4 does not do.")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise G4Error(f"{where}: {name} of quantization_config does not say its weights.")
        layout = group.get("format") or config.get("format")
        problem = None
        if layout != FORMAT:
            problem = f"the format {layout}"
        elif weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
            problem = f"{weights.get('num_bits')}-bit weights of type {weights.get('type')}"
        elif weights.get("strategy") not in ("group", "channel"):
            problem = f"the strategy {weights.get('strategy')}"
        elif weights.get("actorder") not in (None, False, "weight", "static"):
            problem = "groups in the order of activations"
        elif group.get("input_activations") or group.get("output_activations"):
            problem = "quantized activations"
        if problem:
            raise G4Error(
                f"{where}: {name} of quantization_config has {problem}; g4 reads {FORMAT} integers "
                f"of 4 or 8 bit and 16-bit activations."
            )
