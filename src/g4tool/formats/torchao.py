"""How quantized weights lie in a safetensors file: torchao's names and header, our convention.

A weight `a.b.weight` is stored as `a.b._weight_qdata`, `…_scale` and `…_zero_point`, and one JSON
text in the file's header; `experts.down_proj` as `experts._down_proj_qdata` and so on. The fields
of an int4 weight are those of g4tool.kernels.int4, of an int8 weight those of g4tool.kernels.int8
with an int8 zero, all noughts, of the scale's shape beside them.

torchao itself writes the header, from tensors on the meta device; reading needs no torchao.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from g4tool.errors import G4Error

Kind = Literal["int4", "int8", "plain"]
Spec = tuple[torch.dtype, tuple[int, ...]]

_CLASSES: dict[str, Kind] = {
    "Int4Tensor": "int4",
    "IntxUnpackedToInt8Tensor": "int8",
    "Int8Tensor": "int8",
    "Tensor": "plain",
}
_PARTS = {"qdata": "qdata", "scale": "scale", "zero": "zero_point"}
_WIDTHS = {f"int{bits}": bits for bits in range(1, 9)}
_BF16 = {"_type": "torch.dtype", "_data": "bfloat16"}


@dataclass(frozen=True)
class Stored:
    """One logical weight of a file.

    `name` as in the checkpoint's layout; `shape` of the weight itself; `dtype` of the weight where
    it is plain, else of scale and of an int4 zero. `group` columns share a scale; None where plain.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int | None = None


@dataclass(frozen=True)
class Quantized:
    """A weight as a file's header describes it; `parts` maps qdata, scale, zero to tensors' names.

    A plain weight has the single part `weight` and no group. `bits` is the width of the codes
    that an int8 weight keeps unpacked, one a byte.
    """

    name: str
    kind: Kind
    group: int | None
    parts: Mapping[str, str]
    bits: int = 8


def part_names(name: str, kind: Kind) -> dict[str, str]:
    """Part (qdata, scale, zero; or weight, where plain) -> name of its tensor in the file."""
    if kind == "plain":
        return {"weight": name}
    module, _, last = name.rpartition(".")
    return {part: f"{module}._{last}_{field}" for part, field in _PARTS.items()}


def part_specs(entry: Stored) -> dict[str, Spec]:
    """Dtype and shape of each part (qdata, scale, zero; or weight, where plain) of a weight.

    Raises ValueError where the group does not divide the columns.
    """
    if entry.kind == "plain":
        return {"weight": (entry.dtype, entry.shape)}
    if len(entry.shape) < 2 or not entry.group or entry.shape[-1] % entry.group:
        raise ValueError(f"groups of {entry.group} do not fit {entry.name} {list(entry.shape)}")
    *lead, count, columns = entry.shape
    groups = columns // entry.group
    if entry.kind == "int8":
        per_group = (*lead, count, groups)
        return {
            "qdata": (torch.int8, entry.shape),
            "scale": (entry.dtype, per_group),
            "zero": (torch.int8, per_group),
        }
    if columns % 2:
        raise ValueError(f"{entry.name} {list(entry.shape)} cannot be int4: its columns are odd")
    by_group = (*lead, groups, count)
    return {
        "qdata": (torch.uint8, (*lead, count, columns // 2)),
        "scale": (entry.dtype, by_group),
        "zero": (entry.dtype, by_group),
    }


def shard_layout(entries: Iterable[Stored]) -> tuple[dict[str, Spec], dict[str, str]]:
    """The tensors of one file in order, name -> (dtype, shape), and the header's metadata.

    Raises ValueError where a group does not fit its weight.
    """
    with _quiet():
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    tensors, metadata = flatten_tensor_state_dict({e.name: _on_meta(e) for e in entries})
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return specs, metadata


def read_layout(file: str, metadata: Mapping[str, str], names: Iterable[str]) -> list[Quantized]:
    """The logical weights of a file with tensors `names`, from its header's `metadata`.

    `file` is for messages. A file without torchao's metadata is all plain tensors. Raises G4Error
    for a header that is broken, of an unknown class or form, or that does not fit the tensors.
    """
    names = list(names)
    if "tensor_names" not in metadata:
        return [Quantized(name, "plain", None, {"weight": name}) for name in names]
    left = set(names)
    weights = [_parse(file, name, metadata) for name in listed_names(file, metadata)]
    for weight in weights:
        for tensor in weight.parts.values():
            if tensor not in left:
                raise G4Error(f"{file} has no tensor {tensor}, a part of {weight.name}.")
            left.remove(tensor)
    if left:
        raise G4Error(f"{file}: the header's table of weights does not name {min(left)}.")
    return weights


def _on_meta(entry: Stored) -> torch.Tensor:
    parts = {
        part: torch.empty(shape, dtype=dtype, device="meta")
        for part, (dtype, shape) in part_specs(entry).items()
    }
    if entry.kind == "plain":
        return parts["weight"]
    block = [*(1 for _ in entry.shape[1:]), entry.group]
    with _quiet():
        from torchao.quantization import Int4Tensor, IntxUnpackedToInt8Tensor
    if entry.kind == "int4":
        int4: torch.Tensor = Int4Tensor(
            parts["qdata"], parts["scale"], parts["zero"], block, torch.Size(entry.shape)
        )
        return int4
    int8: torch.Tensor = IntxUnpackedToInt8Tensor(
        qdata=parts["qdata"],
        scale=parts["scale"],
        zero_point=parts["zero"],
        target_dtype=torch.int8,
        block_size=block,
        dtype=entry.dtype,
        activation_quantization=None,
    )
    return int8


def listed_names(file: str, metadata: Mapping[str, str]) -> list[str]:
    """The weights that a header names. Raises G4Error where that is no list of names."""
    try:
        names = json.loads(metadata["tensor_names"])
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise G4Error(f"{file}: tensor_names in the header is not a list of names.")
    return names


def _parse(file: str, name: str, metadata: Mapping[str, str]) -> Quantized:
    try:
        facts: dict[str, Any] = json.loads(metadata[name])
        class_name = facts["_type"]
    except (KeyError, TypeError, ValueError):
        raise G4Error(f"{file}: the header does not say how {name} is stored.") from None
    kind = _CLASSES.get(class_name)
    if kind is None:
        raise G4Error(f"{file}: {name} is a torchao {class_name}, which g4 does not read.")
    if kind == "plain":
        return Quantized(name, kind, None, {"weight": name})
    data = facts.get("_data")
    data = data if isinstance(data, dict) else {}
    parts = facts.get("_tensor_data_names")
    if not isinstance(parts, list) or sorted(map(str, parts)) != sorted(_PARTS.values()):
        raise G4Error(f"{file}: {name} has other parts than qdata, scale and zero_point.")
    has_width = class_name == "IntxUnpackedToInt8Tensor"
    bits = _WIDTHS.get(_dtype_name(data.get("target_dtype"))) if has_width else 8
    if bits is None:
        raise G4Error(f"{file}: the target_dtype of {name} is no width of 1 to 8 bits.")
    asked = [data.get(key) for key in ("activation_quantization", "act_quant_kwargs")]
    if asked != [None, None] or data.get("activation_dtype", _BF16) != _BF16:
        raise G4Error(f"{file}: {name} asks for quantized activations, which g4 does not do.")
    group = _group(data.get("block_size"))
    if group is None:
        raise G4Error(f"{file}: the block_size of {name} is not that of groups along a row.")
    return Quantized(name, kind, group, part_names(name, kind), bits)


def _dtype_name(value: Any) -> str:
    """What torchao's JSON of a dtype names."""
    return str(value.get("_data")) if isinstance(value, dict) else ""


def _group(block: Any) -> int | None:
    """The group size of a block_size [1, …, g], or None for any other value."""
    if not isinstance(block, list) or len(block) < 2 or any(type(b) is not int for b in block):
        return None
    *outer, group = block
    return group if group > 0 and all(size == 1 for size in outer) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torchao's import silent: it logs its missing CUDA libraries and pytree registrations."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
