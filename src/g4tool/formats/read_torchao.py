"""Reads torchao's flattened tensors: g4's own bundles, ExecuTorch's file, and torchao's own.

The header does not say what the codes of an `Int4Tensor` mean. g4 and ExecuTorch keep unsigned
codes, uint8, and a zero point in units of the code; torchao's own kernels read signed codes, int8,
and `zero_point` as what code 0 stands for, w = code * scale + zero_point. The latter become
(code + 8) and 8 - zero_point / scale: exact where `zero_point` is 0, else to the rounding of fp32,
in which that zero is kept.

A weight's parts may lie in several files, and each header may name the weights of all.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.formats.leaf import Leaf, Make, Place, check_float, check_tensor, plain_leaf
from g4tool.formats.torchao import (
    Quantized,
    Spec,
    Stored,
    listed_names,
    part_names,
    part_specs,
    read_layout,
)
from g4tool.kernels.int4 import pack_int4

_TABLE = "tensor_names"


def stored_weights(folder: Path, files: Mapping[str, SafetensorsFile]) -> dict[str, Quantized]:
    """The logical weights of all files by name, from their headers.

    Raises G4Error for headers that are broken, contradict each other or do not fit the tensors.
    """
    metadata: dict[str, str] = {}
    listed: dict[str, None] = {}
    for file in files.values():
        if _TABLE not in file.metadata:
            metadata |= dict.fromkeys(file.tensors, '{"_type": "Tensor"}')
            listed |= dict.fromkeys(file.tensors)
            continue
        names = listed_names(str(file.path), file.metadata)
        for name in names:
            text = file.metadata.get(name, "")
            if metadata.setdefault(name, text) != text:
                raise G4Error(f"{file.path}: another file's header says otherwise of {name}.")
        listed |= dict.fromkeys(names)
    tensors = {name for file in files.values() for name in file.tensors}
    # transformers lists a tied head too, which is in no file; what else is missing shows later.
    kept = [name for name in listed if {name, *part_names(name, "int4").values()} & tensors]
    metadata[_TABLE] = json.dumps(kept)
    where = next(iter(files.values())).path if len(files) == 1 else folder
    return {weight.name: weight for weight in read_layout(str(where), metadata, tensors)}


def torchao_leaf(
    weights: Mapping[str, Quantized], files: Mapping[str, SafetensorsFile], signed: bool
) -> Make:
    """What makes the leaf of a weight; `signed` where int4 codes are torchao's own.

    Codes of at most 4 bit that lie one a byte become an int4 leaf, of an embedding an int8 one.
    """
    place = {name: file for file in files.values() for name in file.tensors}

    def make(key: str, shape: tuple[int, ...], embedding: bool) -> Leaf:
        weight = weights[key]
        parts = {part: (place[name], name) for part, name in weight.parts.items()}
        if weight.kind == "plain":
            return plain_leaf(*parts["weight"], shape)
        specs = _check(weight, parts, shape, signed)
        where = parts["scale"][0].path
        if weight.kind == "int8":
            if weight.bits <= 4 and not embedding:
                return _packed(where, weight, parts, specs)
            _check_symmetric(weight, parts)
            del parts["zero"], specs["zero"]
        elif signed:
            return _shifted(where, weight, parts, specs)
        return Leaf(where, weight, specs, parts)

    return make


def _check(
    weight: Quantized, parts: Mapping[str, Place], shape: tuple[int, ...], signed: bool
) -> dict[str, Spec]:
    """Dtype and shape of each part as it is stored. G4Error where one is not what it should be."""
    file, key = parts["scale"]
    dtype = check_float(file, key)
    try:
        specs = part_specs(Stored(weight.name, weight.kind, shape, dtype, weight.group))
    except ValueError as error:
        raise G4Error(f"{file.path}: {error}, the shape that config.json asks for.") from None
    zero_file, zero = parts["zero"]
    if weight.kind == "int8" and zero_file.info(zero).dtype != torch.int8:
        specs["zero"] = (check_float(zero_file, zero), specs["zero"][1])
    if weight.kind == "int4" and signed:
        specs["qdata"] = (torch.int8, specs["qdata"][1])
    for part, (own, name) in parts.items():
        check_tensor(own, name, specs[part])
    return specs


def _check_symmetric(weight: Quantized, parts: Mapping[str, Place]) -> None:
    file, key = parts["zero"]
    if file.read(key).any():
        raise G4Error(
            f"{file.path}: {weight.name} is int8 with zero points, which g4 does not run."
        )


def _packed(
    where: Path, weight: Quantized, parts: Mapping[str, Place], specs: Mapping[str, Spec]
) -> Leaf:
    """Signed codes one a byte, w = (code - zero) * scale, as an int4 leaf."""
    (dtype, by_row), (zero_dtype, _) = specs["scale"], specs["zero"]
    shape = specs["qdata"][1]
    by_group = (*by_row[:-2], by_row[-1], by_row[-2])
    if shape[-1] % 2:
        raise G4Error(f"{where}: {weight.name} cannot be int4: its columns are odd.")
    # A zero point that is a float may need more digits when it is shifted than its dtype has.
    zero = dtype if zero_dtype == torch.int8 else torch.float32

    def make(part: str, start: int, stop: int) -> Tensor:
        file, key = parts[part]
        if part == "qdata":
            codes = file.read(key, start, stop)
            if (codes < -8).any() or (codes > 7).any():
                raise G4Error(f"{where}: {key} has codes beyond the 4 bit that the header says.")
            return pack_int4(codes + 8)
        if len(shape) == 3:
            values = file.read(key, start, stop).mT
        else:
            values = file.read(key).mT[start:stop]
        return (values.to(zero) + 8 if part == "zero" else values).contiguous()

    made: dict[str, Spec] = {
        "qdata": (torch.uint8, (*shape[:-1], shape[-1] // 2)),
        "scale": (dtype, by_group),
        "zero": (zero, by_group),
    }
    stored = Quantized(weight.name, "int4", weight.group, weight.parts)
    return Leaf(where, stored, made, make=make)


def _shifted(
    where: Path, weight: Quantized, parts: Mapping[str, Place], specs: Mapping[str, Spec]
) -> Leaf:
    """torchao's own int4, w = code * scale + zero, as an int4 leaf."""
    (file, key), (scale_file, scale_key) = parts["zero"], parts["scale"]
    dtype, shape = specs["zero"]
    symmetric = not file.read(key).any()
    if not symmetric and not scale_file.read(scale_key).all():
        raise G4Error(
            f"{where}: {weight.name} has zero points to scales of 0, which g4 cannot keep."
        )

    def make(part: str, start: int, stop: int) -> Tensor:
        if part == "qdata":
            codes, name = parts[part]
            # Adding 8 to a signed code turns its highest bit over.
            return codes.read(name, start, stop).view(torch.uint8) ^ 0x88
        values = file.read(key, start, stop)
        if symmetric:
            return torch.full_like(values, 8)
        scale = scale_file.read(scale_key, start, stop)
        return (8 - values.double() / scale.double()).float()

    made: dict[str, Spec] = {
        "qdata": (torch.uint8, specs["qdata"][1]),
        "scale": specs["scale"],
        "zero": (dtype if symmetric else torch.float32, shape),
    }
    stored = Quantized(weight.name, "int4", weight.group, weight.parts)
    return Leaf(where, stored, made, {"scale": parts["scale"]}, make)
