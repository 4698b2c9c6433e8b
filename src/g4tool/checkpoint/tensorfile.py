"""Reads one safetensors file: header checked in full, values by rows into fresh memory.

The safetensors package's `safe_open` maps the file. A mapped page that was touched counts in the
resident set for as long as the map lives, so a job that walks a 60 GB checkpoint would seem to
need 60 GB, and under a memory limit would be killed for it. Here every read is a `pread` into
memory of its own, and the resident set is what the caller holds.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header size, JSON header
{name: {dtype, shape, data_offsets}}, then the values).
"""

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from g4tool.errors import G4Error

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

# The limit the safetensors package sets; a larger number is a file of another kind.
_MAX_HEADER = 100_000_000
# One read call moves less than 2 GiB on Linux, and a buffer this size keeps it interruptible.
_READ_BLOCK = 1 << 26


@dataclass(frozen=True)
class TensorInfo:
    """One tensor. `offset` counts bytes from the start of its file (0 where it has several)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Size of dimension 0; a scalar counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of dimension 0."""
        return self.nbytes // self.rows if self.rows else 0


def row_blocks(rows: int, row_nbytes: int, block: int = 1 << 26) -> Iterator[tuple[int, int]]:
    """Start and stop of consecutive runs of rows, each of at most `block` bytes (or one row)."""
    step = max(1, block // max(1, row_nbytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


class SafetensorsFile:
    """An open safetensors file: `metadata`, `tensors` by name in the order they lie, and `read`.

    `size` counts all bytes of the file; `header_sha256` is that of the header with its length, so
    of every name, dtype, shape and place, but of no value. Raises G4Error, naming the file and
    where possible the tensor, when the file is missing, unreadable, truncated, longer than its
    header says, or its header is not a valid one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Without O_NONBLOCK opening a pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise G4Error(f"{path} does not exist.") from None
        except OSError as error:
            raise G4Error(f"{path} cannot be opened: {error.strerror}.") from None
        try:
            header, self.size = _read_header(path, self._descriptor)
            self.header_sha256 = hashlib.sha256(header).hexdigest()
            self.metadata, self.tensors = _parse_header(path, header, self.size)
        except OSError as error:
            self.close()
            raise G4Error(f"{path} cannot be read: {error.strerror}.") from None
        except BaseException:
            self.close()
            raise

    def read(
        self, name: str, start: int = 0, stop: int | None = None, pinned: bool = False
    ) -> torch.Tensor:
        """Rows start:stop of dimension 0 of a tensor, in fresh memory (a scalar only whole).

        `pinned`: in page-locked memory, from which a CUDA device copies by itself.
        """
        info = self.info(name)
        stop = info.rows if stop is None else stop
        if not 0 <= start <= stop <= info.rows:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {info.rows}")
        shape = (stop - start, *info.shape[1:]) if info.shape else ()
        tensor = torch.empty(shape, dtype=info.dtype, pin_memory=pinned)
        if tensor.numel():
            # A scalar and float8 cannot be viewed as bytes by numpy; flat uint8 always can.
            buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
            self._fill(buffer, info.offset + start * info.row_nbytes, name)
        return tensor

    def read_bytes(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fill `into`, flat uint8 on the CPU, with a tensor's bytes from the `start`-th on."""
        self._fill(into.numpy().data, self.info(name).offset + start, name)

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor. Raises G4Error when the file has none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise G4Error(f"{self.path} has no tensor {name}.") from None

    def close(self) -> None:
        """Give the file back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def _fill(self, buffer: memoryview, offset: int, name: str) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(
                    self._descriptor, [buffer[done : done + _READ_BLOCK]], offset + done
                )
            except OSError as error:
                raise G4Error(f"{self.path}: {name} cannot be read: {error.strerror}.") from None
            if got == 0:
                raise G4Error(
                    f"{self.path}: {name} ends too early; the file was cut short while in use."
                )
            done += got


def _read_header(path: Path, descriptor: int) -> tuple[bytes, int]:
    """The header with the 8 bytes of its length, and the file's size."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise G4Error(f"{path} is {kind}, not a safetensors file.")
    size = status.st_size
    prefix = os.pread(descriptor, 8, 0)
    if len(prefix) < 8:
        raise G4Error(f"{path} is truncated: {size} bytes cannot hold a safetensors header.")
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER:
        raise G4Error(f"{path} is not a safetensors file: its header would be {length} bytes.")
    if 8 + length > size:
        raise G4Error(f"{path} is truncated: the header needs {8 + length} bytes, it has {size}.")
    return prefix + os.pread(descriptor, length, 8), size


def _parse_header(
    path: Path, content: bytes, size: int
) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    try:
        text = content[8:].decode()
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        if "\\u" in text:
            # An escape can make half a surrogate pair, which no file or terminal takes later.
            json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise G4Error(f"{path}: the safetensors header is not valid JSON ({error}).") from None
    if not isinstance(header, dict):
        raise G4Error(f"{path}: the safetensors header is not a JSON object.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise G4Error(f"{path}: the header's __metadata__ is not a table of strings.")
    start = len(content)
    infos = [_parse_entry(path, name, entry, start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_layout(path, infos, start, size)
    return metadata, {info.name: info for info in infos}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is named twice")
    return result


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    problem = f"{path}: the header's entry for {name}"
    if not isinstance(entry, dict):
        raise G4Error(f"{problem} is not a JSON object.")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
    if dtype is None:
        raise G4Error(f"{problem} has the dtype {entry.get('dtype')!r}, which g4 does not know.")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape):
        raise G4Error(f"{problem} has the shape {shape!r}, not a list of sizes.")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise G4Error(f"{problem} has the data_offsets {offsets!r}, not a begin and an end.")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise G4Error(
            f"{problem} spans {offsets[1] - offsets[0]} bytes, but {entry['dtype']} {shape} "
            f"needs {nbytes}."
        )
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_layout(path: Path, infos: list[TensorInfo], start: int, size: int) -> None:
    # The format allows neither gaps nor overlaps, so the tensors must tile the rest of the file.
    end = start
    for info in infos:
        if info.offset + info.nbytes > size:
            raise G4Error(
                f"{path} is truncated: {info.name} ends at byte {info.offset + info.nbytes}, "
                f"the file has {size}."
            )
        if info.offset < end:
            raise G4Error(f"{path}: {info.name} overlaps the tensor before it.")
        if info.offset > end:
            raise G4Error(
                f"{path}: {info.offset - end} bytes before {info.name} belong to no tensor."
            )
        end += info.nbytes
    if end != size:
        raise G4Error(f"{path}: {size - end} bytes at the end belong to no tensor.")
