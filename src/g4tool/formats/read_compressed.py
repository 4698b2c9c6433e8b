"""Reads compressed-tensors' pack-quantized checkpoints, g4's and others'.

`config.json` says which module has which scheme; the files must agree with it. Codes are kept as
they are packed, scales in their own dtype, so that a weight is exactly (code - zero) * scale. See
g4tool.formats.compressed_tensors for the layout; beside it experts may lie in one tensor a layer,
`experts.gate_up_proj_packed` [E, 2f, …] and so on.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.formats.compressed_tensors import Bits, unpacked_words, unpacked_zeros
from g4tool.formats.leaf import Leaf, Make, Place, check_float, check_tensor, plain_leaf
from g4tool.formats.torchao import Quantized, Spec
from g4tool.kernels.int4 import unpack_int4

_PART = re.compile(r"(.*)\.weight_(packed|scale|shape|zero_point|g_idx)")
_FUSED = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))_(packed|scale|shape|zero_point)")
_TABLES = ("embed_tokens", "embed_tokens_per_layer")
_EXPERTS = re.compile(r".*\.experts\.(?:gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Scheme:
    """How modules are packed; `group` is None where a row has one scale."""

    bits: Bits
    group: int | None
    symmetric: bool


@dataclass(frozen=True)
class Packed:
    """A weight of the files: its module, and where each of its tensors lies.

    `parts` are packed, scale, shape and zero_point, or weight alone.
    """

    module: str
    parts: Mapping[str, Place]


def packed_weights(files: Mapping[str, SafetensorsFile]) -> dict[str, Packed]:
    """The weights of all files by the names that a plain checkpoint would give them.

    Raises G4Error for packed weights in the order of activations, and for a weight that is both.
    """
    found: dict[str, dict[str, Place]] = {}
    modules: dict[str, str] = {}
    for file in files.values():
        for tensor in file.tensors:
            name, module, part = _split(tensor)
            if part == "g_idx":
                raise G4Error(
                    f"{file.path}: {tensor} says that groups lie in the order of activations "
                    f"(actorder), which g4 does not run."
                )
            parts = found.setdefault(name, {})
            if parts and ("weight" in parts) != (part == "weight"):
                raise G4Error(f"{file.path}: {tensor} belongs to a weight that is there unpacked.")
            parts[part] = (file, tensor)
            modules[name] = module
    return {name: Packed(modules[name], parts) for name, parts in found.items()}


def packed_leaf(weights: Mapping[str, Packed], section: Mapping[str, Any], where: Path) -> Make:
    """What makes the leaf of a weight.

    `section` is the `quantization_config`, checked, of the config.json `where`. Raises G4Error
    where modules are named by something else than names and regexes.
    """
    lists = [group.get("targets") for group in section["config_groups"].values()]
    for names in (section.get("ignore"), *lists):
        _check_names(names or (), where)

    def make(key: str, shape: tuple[int, ...], embedding: bool) -> Leaf:
        weight = weights[key]
        if "weight" in weight.parts:
            return plain_leaf(*weight.parts["weight"], shape)
        scheme = _scheme(weight.module, section, where)
        _check(key, weight, scheme, shape)
        return _leaf(key, weight, scheme, shape, embedding)

    return make


def _check_names(names: object, where: Path) -> None:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise G4Error(f"{where}: quantization_config names modules by {names!r}, not by a list.")
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise G4Error(
                f"{where}: {name} in quantization_config is no regex ({error})."
            ) from None


def _split(tensor: str) -> tuple[str, str, str]:
    """A tensor's weight, module and part."""
    found = _PART.fullmatch(tensor) or _FUSED.fullmatch(tensor)
    if found is None:
        return tensor, tensor.removesuffix(".weight"), "weight"
    module, part = found.groups()
    return module if _EXPERTS.fullmatch(module) else f"{module}.weight", module, part


def _scheme(module: str, section: Mapping[str, Any], where: Path) -> Scheme:
    """The scheme of the group that names the module, by a regex, or its class, in this order."""
    if _named(module, section.get("ignore") or ()) or _matched(module, section.get("ignore") or ()):
        raise G4Error(f"{where}: {module} is in the ignore list, but the files have it packed.")
    for level in (_named, _matched, _of_class):
        groups = section["config_groups"].values()
        chosen = [group for group in groups if level(module, group.get("targets") or ())]
        schemes = {_parse(group["weights"]) for group in chosen}
        if len(schemes) > 1:
            raise G4Error(f"{where}: quantization_config says in two ways how {module} is packed.")
        if schemes:
            return schemes.pop()
    raise G4Error(f"{where}: quantization_config does not say how {module} is packed.")


def _named(module: str, targets: Collection[str]) -> bool:
    return module in targets


def _matched(module: str, targets: Collection[str]) -> bool:
    """Whether a target `re:…` matches from the module's start on."""
    return any(t.startswith("re:") and re.match(t[3:], module) is not None for t in targets)


def _of_class(module: str, targets: Collection[str]) -> bool:
    return "Embedding" in targets if module.endswith(_TABLES) else "Linear" in targets


def _parse(weights: Mapping[str, Any]) -> Scheme:
    size = weights.get("group_size")
    grouped = weights["strategy"] == "group" and isinstance(size, int) and size > 0
    bits: Bits = 4 if weights["num_bits"] == 4 else 8
    return Scheme(bits, size if grouped else None, weights.get("symmetric", True))


def _check(key: str, weight: Packed, scheme: Scheme, shape: tuple[int, ...]) -> None:
    """Raise G4Error for a tensor that is missing, of another dtype or shape, or too many."""
    any_file, any_tensor = next(iter(weight.parts.values()))
    wanted = {"packed", "scale"} | (set() if scheme.symmetric else {"zero_point"})
    wanted |= {"shape"} if _PART.fullmatch(any_tensor) and len(shape) == 2 else set()
    for part in sorted(wanted - set(weight.parts)):
        raise G4Error(f"{any_file.path.parent}: no file has the {part} of {key}, which is packed.")
    for part in sorted(set(weight.parts) - wanted - {"shape"}):
        file, tensor = weight.parts[part]
        raise G4Error(f"{file.path}: config.json says nothing of {tensor}: {key} is symmetric.")
    *lead, rows, columns = shape
    group = scheme.group or columns
    file, tensor = weight.parts["scale"]
    if columns % group or columns % 2:
        raise G4Error(f"{file.path}: groups of {group} do not fit {key} {list(shape)}.")
    specs: dict[str, Spec] = {
        "packed": (torch.int32, (*lead, rows, -(-columns * scheme.bits // 32))),
        "scale": (check_float(file, tensor), (*lead, rows, columns // group)),
        "zero_point": (torch.int32, (*lead, -(-rows * scheme.bits // 32), columns // group)),
        "shape": (torch.int64, (len(shape),)),
    }
    for part, (own, name) in weight.parts.items():
        check_tensor(own, name, specs[part])
    if "shape" in weight.parts:
        file, tensor = weight.parts["shape"]
        said = file.read(tensor).tolist()
        if said != list(shape):
            raise G4Error(
                f"{file.path}: {tensor} says {said}, but config.json asks for {list(shape)}."
            )


def _leaf(
    key: str, weight: Packed, scheme: Scheme, shape: tuple[int, ...], embedding: bool
) -> Leaf:
    *lead, rows, columns = shape
    group = scheme.group or columns
    file, tensor = weight.parts["scale"]
    dtype = file.info(tensor).dtype
    if scheme.bits == 8 or embedding:
        if not scheme.symmetric:
            raise G4Error(
                f"{file.path}: {key} has zero points, which g4 runs in 4 bit matrices alone."
            )
        specs: dict[str, Spec] = {
            "qdata": (torch.int8, shape),
            "scale": (dtype, (*lead, rows, columns // group)),
        }
        make = partial(_int8_part, weight, scheme.bits, columns)
        stored = Quantized(key, "int8", group, {})
        return Leaf(file.path, stored, specs, {"scale": (file, tensor)}, make)
    by_group = (*lead, columns // group, rows)
    specs = {
        "qdata": (torch.uint8, (*lead, rows, columns // 2)),
        "scale": (dtype, by_group),
        "zero": (dtype, by_group),
    }
    made = partial(_int4_part, weight, shape, by_group)
    return Leaf(file.path, Quantized(key, "int4", group, {}), specs, make=made)


def _int8_part(
    weight: Packed, bits: Bits, columns: int, part: str, start: int, stop: int
) -> Tensor:
    """Signed codes; those of 4 bit are an embedding's, which has no int4 leaf."""
    assert part == "qdata"
    codes = _codes(weight, bits, columns, start, stop)
    return codes if bits == 8 else unpack_int4(codes).view(torch.int8) - 8


def _int4_part(
    weight: Packed,
    shape: tuple[int, ...],
    by_group: tuple[int, ...],
    part: str,
    start: int,
    stop: int,
) -> Tensor:
    if part == "qdata":
        return _codes(weight, 4, shape[-1], start, stop)
    file, tensor = weight.parts["scale"]
    if part == "zero" and "zero_point" not in weight.parts:
        dtype = file.info(tensor).dtype
        return torch.full((stop - start, *by_group[1:]), 8, dtype=dtype)
    stacked = len(shape) == 3
    # Of a matrix the rows asked for are groups, which lie across every row of the tensor.
    span = (start, stop) if stacked else (0, None)
    if part == "zero":
        zeros, name = weight.parts["zero_point"]
        words = zeros.read(name, *span)
        each = words if stacked else words[None]
        values = torch.stack([unpacked_zeros(one, shape[-2]) for one in each])
        values = values if stacked else values[0]
        values = values.to(file.info(tensor).dtype)
    else:
        values = file.read(tensor, *span)
    turned = values.mT if stacked else values.mT[start:stop]
    return turned.contiguous()


def _codes(weight: Packed, bits: Bits, columns: int, start: int, stop: int) -> Tensor:
    file, tensor = weight.parts["packed"]
    words = file.read(tensor, start, stop)
    codes = unpacked_words(words.flatten(0, -2), bits, columns)
    return codes.view(*words.shape[:-1], -1)
