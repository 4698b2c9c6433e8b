"""Writes a GGUF file that llama.cpp loads: weights as they are stored, streamed by rows.

int4 becomes Q4_1, or Q4_0 where every zero point is 8; int8 becomes Q8_0. Codes are kept as they
are. What is rounded is a block's scale and minimum, which the file has in half precision;
`Entry.error` says how much. llama.cpp's CPU kernels round a matrix product's other side too, to
the type of the weights or to 8 bit, which is none of the file's doing.

The gguf package writes the header. It would take a tensor's values in one piece only, and an
expert matrix of a large model has gigabytes, so the values are put behind the header here.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from g4tool.checkpoint.gguf_config import ARCHITECTURE, rope_factors
from g4tool.checkpoint.gguf_header import ALIGNMENT, Metadata, gguf_package
from g4tool.checkpoint.gguf_names import ROPE_FREQS, gguf_name
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tensorfile import row_blocks
from g4tool.errors import G4Error
from g4tool.files import sync_folder
from g4tool.formats.gguf_blocks import BLOCK, pack_int4, pack_int8, rounding
from g4tool.formats.weights import Weights
from g4tool.progress import Progress, Report, silent

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}
# Small, and it decides which experts are taken: llama.cpp's own converter never rounds it.
_ROUTER = ".router.proj.weight"
# Beyond this, half precision is no longer a rounding but another model.
_MOST_ERROR = 0.05


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: its GGUF name, type (the gguf package's name), shape and bytes.

    `error`: how far a weight of it is moved at most, in steps of its coarsest group.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    error: float = 0.0


def plan_entries(weights: Weights, dtype: torch.dtype | None = None) -> dict[str, Entry]:
    """Canonical name -> entry, in model order. Matrices that are not quantized get `dtype`.

    Without it they keep their own. Vectors and routers are F32, as llama.cpp wants them. Raises
    G4Error for scales that half precision cannot hold, and groups that are no blocks of 32.
    """
    return {
        name: _entry(weights, name, shape, dtype)
        for name, shape in text_tensors(weights.config).items()
    }


def type_counts(entries: Mapping[str, Entry]) -> dict[str, int]:
    """How many tensors there are of each type."""
    return dict(sorted(Counter(entry.kind for entry in entries.values()).items()))


def file_type(entries: Mapping[str, Entry]) -> int:
    """What llama.cpp says of the whole file: the type of most of its values."""
    values: Counter[str] = Counter()
    for entry in entries.values():
        values[entry.kind] += math.prod(entry.shape)
    (kind, _), *_ = values.most_common(1)
    types = gguf_package().LlamaFileType
    return int(types.ALL_F32 if kind == "F32" else types[f"MOSTLY_{kind}"])


def file_size(entries: Mapping[str, Entry]) -> int:
    """Bytes of all values with what aligns them, without the header."""
    return sum(-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in entries.values())


def write_gguf(
    path: Path,
    weights: Weights,
    entries: Mapping[str, Entry],
    metadata: Metadata,
    report: Report = silent,
) -> None:
    """Write the file under `path` + ".part", then give it its name.

    `metadata` by full key: bool, int (uint32), float (float32), str, or a list of one of them.
    Raises G4Error when the disk refuses, and for values beyond float16 where that is asked for;
    nothing stays behind then.
    """
    part = path.with_name(path.name + ".part")
    factors = rope_factors(weights.config)
    try:
        _write_header(part, [_rope_entry(factors), *entries.values()], metadata)
        with part.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            _pad(file)
            _put(file, factors)
            _pad(file)
            for done, (name, entry) in enumerate(entries.items(), start=1):
                for rows in _rows(weights, name, entry):
                    _put(file, rows)
                _pad(file)
                report(Progress("gguf", done, len(entries), "tensors", entry.name))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise G4Error(f"{path} cannot be written: {error.strerror}.") from None
        raise


def _entry(weights: Weights, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Entry:
    stored = weights.stored(name)
    if stored.kind == "plain":
        own = weights.specs(name)["weight"][0]
        full = len(shape) == 1 or name.endswith(_ROUTER)
        kind = "F32" if full else _TYPES[dtype or own]
        return Entry(gguf_name(name), kind, shape, math.prod(shape) * _DTYPES[kind].itemsize)
    group = stored.group or 0
    if group % BLOCK:
        raise G4Error(
            f"{name} has groups of {group} columns, but a GGUF file has blocks of {BLOCK}; "
            f"quantize with a group size that is a multiple of that."
        )
    kind, error = _examine(weights, name)
    if error > _MOST_ERROR:
        raise G4Error(
            f"{name} has scales that half precision does not hold, which is what a GGUF file has "
            f"(a weight would move by {error:.2g} steps); convert the model it was made from."
        )
    block, size = gguf_package().GGML_QUANT_SIZES[_number(kind)]
    return Entry(gguf_name(name), kind, shape, math.prod(shape) // block * size, error)


def _examine(weights: Weights, name: str) -> tuple[str, float]:
    """The type that a quantized weight becomes, and the error of that."""
    if weights.stored(name).kind == "int8":
        parts = [(scale, None) for scale, _ in _scales(weights, name)]
        return "Q8_0", max(rounding("Q8_0", scale, zero) for scale, zero in parts)
    centred = all(bool((zero == 8).all()) for _, zero in _scales(weights, name) if zero is not None)
    kind = "Q4_0" if centred else "Q4_1"
    return kind, max(
        rounding(kind, scale, None if centred else zero) for scale, zero in _scales(weights, name)
    )


def _scales(weights: Weights, name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales and zero points; expert by expert where there are several."""
    specs = weights.specs(name)
    count = specs["scale"][1][0]
    step = 1 if len(specs["scale"][1]) == 3 else count
    for start in range(0, count, step):
        scale = weights.read(name, "scale", start, start + step)
        zero = weights.read(name, "zero", start, start + step) if "zero" in specs else None
        if len(scale.shape) == 3:
            scale, zero = scale[0], None if zero is None else zero[0]
        yield scale, zero


def _rows(weights: Weights, name: str, entry: Entry) -> Iterator[Tensor]:
    """The values as the file has them, in order, by blocks of rows."""
    stored, shape = weights.stored(name), entry.shape
    main = "weight" if stored.kind == "plain" else "qdata"
    dtype, whole = weights.specs(name)[main]
    nbytes = math.prod(whole[1:]) * dtype.itemsize
    if stored.kind == "plain":
        for start, stop in row_blocks(shape[0], nbytes):
            values = weights.read(name, main, start, stop).to(_DTYPES[entry.kind])
            if entry.kind == "F16" and not torch.isfinite(values).all():
                raise G4Error(f"{name} has values that float16 does not hold; take another dtype.")
            yield values
    elif stored.kind == "int8":
        for start, stop in row_blocks(shape[0], nbytes):
            scale = weights.read(name, "scale", start, stop)
            codes = weights.read(name, main, start, stop)
            yield pack_int8(codes.view(-1, shape[-1]), scale.view(-1, scale.shape[-1]))
    else:
        yield from _int4_rows(weights, name, entry.kind, nbytes)


def _int4_rows(weights: Weights, name: str, kind: str, nbytes: int) -> Iterator[Tensor]:
    rows = weights.specs(name)["qdata"][1]
    for expert, (scale, zero) in enumerate(_scales(weights, name)):
        zero = None if kind == "Q4_0" else zero
        if len(rows) == 3:
            yield pack_int4(weights.read(name, "qdata", expert, expert + 1)[0], scale, zero)
            continue
        for start, stop in row_blocks(rows[0], nbytes):
            part = slice(start, stop)
            yield pack_int4(
                weights.read(name, "qdata", start, stop),
                scale[:, part],
                None if zero is None else zero[:, part],
            )


def _rope_entry(factors: Tensor) -> Entry:
    return Entry(ROPE_FREQS, "F32", tuple(factors.shape), factors.nbytes)


def _number(kind: str) -> Any:
    return gguf_package().GGMLQuantizationType[kind]


def _write_header(path: Path, entries: list[Entry], metadata: Metadata) -> None:
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        # The one key whose number llama.cpp reads as signed.
        add = writer.add_int32 if key.endswith(".top_k") else adders[type(value)]
        add(key, value)
    for entry in entries:
        # The type of the values goes by `raw_dtype`; the other one only says that they are not
        # packed, so that the shape counts values.
        writer.add_tensor_info(
            entry.name, entry.shape, np.float32, entry.nbytes, _number(entry.kind)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _put(file: BinaryIO, values: Tensor) -> None:
    file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
