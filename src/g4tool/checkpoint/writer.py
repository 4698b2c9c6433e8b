"""Writes safetensors: one file by row blocks in any order, or a whole sharded checkpoint.

A file is written as `<name>.part` and takes its name only when every byte is there and on disk.
"""

import json
import math
import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from g4tool.checkpoint.tensorfile import DTYPE_NAMES, TensorInfo, row_blocks
from g4tool.errors import G4Error
from g4tool.files import sync_folder, write_json
from g4tool.progress import Progress, Report, silent

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000

Spec = tuple[torch.dtype, tuple[int, ...]]
ReadRows = Callable[[str, int, int], torch.Tensor]


class TensorFileWriter:
    """One safetensors file whose tensors are known beforehand and arrive in row blocks.

    `specs` gives dtype and shape of each tensor, in the order they shall lie; `metadata` is the
    header's string table ("format": "pt" is added, as loaders ask for it). Used as a context
    manager it closes on success and aborts on an exception. Raises G4Error when the disk refuses.
    """

    def __init__(
        self, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        header, self._infos, size = _layout(specs, metadata or {})
        # For each tensor the sorted, disjoint runs of rows that are written.
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in specs}
        try:
            self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise G4Error(f"{self._part} cannot be created: {error.strerror}.") from None
        try:
            self._put(memoryview(header), 0)
            os.truncate(self._descriptor, size)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Put `tensor` [n, ...] at rows row:row+n of `name`.

        Raises ValueError when dtype or row shape is not the spec's, and for rows outside the
        tensor or written before.
        """
        info = self._infos[name]
        rows = tensor.shape[0] if info.shape else 1
        if tensor.dtype != info.dtype or tensor.shape[1:] != info.shape[1:]:
            raise ValueError(
                f"{name} is {info.dtype} {info.shape}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
        if row < 0 or row + rows > info.rows:
            raise ValueError(f"rows {row}:{row + rows} of {name}, which has {info.rows}")
        if not tensor.numel():
            return
        _add_run(self._written[name], (row, row + rows), name)
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._put(values.numpy().data, info.offset + row * info.row_nbytes)

    def close(self) -> None:
        """Check that every row is there, flush, and give the file its name.

        Raises ValueError, leaving nothing, when rows are missing.
        """
        for name, info in self._infos.items():
            if info.nbytes and self._written[name] != [(0, info.rows)]:
                self.abort()
                raise ValueError(f"{self.path}: {name} was not written whole")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self.abort()
            raise G4Error(f"{self.path} cannot be written: {error.strerror}.") from None
        os.close(self._descriptor)
        self._descriptor = -1
        self._part.replace(self.path)
        sync_folder(self.path.parent)

    def abort(self) -> None:
        """Forget the file; nothing stays under the final name or beside it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _put(self, values: memoryview, offset: int) -> None:
        done = 0
        while done < len(values):
            try:
                done += os.pwrite(self._descriptor, values[done : done + (1 << 26)], offset + done)
            except OSError as error:
                raise G4Error(f"{self.path} cannot be written: {error.strerror}.") from None


def write_checkpoint(
    folder: Path,
    specs: Mapping[str, Spec],
    read: ReadRows,
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Report = silent,
) -> list[Path]:
    """Write the tensors of `specs`, in its order, as a sharded checkpoint; return the files.

    `read(name, start, stop)` gives rows of a tensor; they are converted to the spec's dtype, and
    no more than one block of rows is in memory. One shard is `model.safetensors` alone; more have
    an index, written last, so that an interrupted folder does not look whole. A tensor larger
    than `shard_bytes` gets a shard of its own. Raises G4Error when the folder holds a checkpoint
    of the other kind, since loaders would pick one of the two, and as `write_shard` does.
    """
    shards = plan_shards(specs, shard_bytes)
    other = folder / (SINGLE if len(shards) > 1 else INDEX)
    if other.exists():
        raise G4Error(f"{other} belongs to another checkpoint; choose an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    total = sum(_nbytes(spec) for spec in specs.values())
    done = 0

    def advance(step: Progress) -> None:
        report(Progress("write", done + step.done, total, "bytes", step.note))

    for shard, members in shards.items():
        write_shard(folder / shard, members, read, metadata=metadata, report=advance)
        done += sum(_nbytes(spec) for spec in members.values())
    files = [folder / shard for shard in shards]
    if len(shards) > 1:
        write_json(folder / INDEX, index_content(shards))
        files.append(folder / INDEX)
    return files


def write_shard(
    path: Path,
    specs: Mapping[str, Spec],
    read: ReadRows,
    *,
    metadata: Mapping[str, str] | None = None,
    report: Report = silent,
) -> None:
    """Write one file of a checkpoint, block of rows by block of rows.

    Raises G4Error, leaving no file, when a finite value is beyond the spec's dtype.
    """
    total = sum(_nbytes(spec) for spec in specs.values())
    done = 0
    with TensorFileWriter(path, specs, metadata) as writer:
        for name, (dtype, shape) in specs.items():
            rows = shape[0] if shape else 1
            row_nbytes = _nbytes((dtype, shape)) // max(1, rows)
            for start, stop in row_blocks(rows, row_nbytes):
                writer.write(name, _converted(path, name, read(name, start, stop), dtype), start)
                done += row_nbytes * (stop - start)
                report(Progress("write", done, total, "bytes", path.name))


def index_content(shards: Mapping[str, Mapping[str, Spec]]) -> dict[str, Any]:
    """What model.safetensors.index.json holds for the shards of `plan_shards`."""
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    total = sum(_nbytes(spec) for members in shards.values() for spec in members.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def plan_shards(specs: Mapping[str, Spec], shard_bytes: int) -> dict[str, dict[str, Spec]]:
    """Which file holds which tensors: in order, each file filled up to `shard_bytes` of values."""
    shards: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        nbytes = _nbytes(spec)
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def _converted(path: Path, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = values.to(dtype)
    floats = values.is_floating_point() and dtype.is_floating_point
    narrower = floats and torch.finfo(dtype).max < torch.finfo(values.dtype).max
    # A tower's bound may be infinite beforehand, which is no fault of the dtype.
    if narrower and (values.isfinite() & ~result.isfinite()).any():
        wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
        raise G4Error(
            f"{path}: {name} has values that {str(dtype).removeprefix('torch.')} cannot hold; "
            f"choose {wider}."
        )
    return result


def _layout(
    specs: Mapping[str, Spec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo], int]:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (dtype, shape) in specs.items():
        nbytes = _nbytes((dtype, shape))
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The values begin at a multiple of 8, as the safetensors package lays them.
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    infos: dict[str, TensorInfo] = {}
    offset = start
    for name, (dtype, shape) in specs.items():
        infos[name] = TensorInfo(name, dtype, tuple(shape), offset)
        offset += infos[name].nbytes
    return struct.pack("<Q", len(text)) + text, infos, offset


def _nbytes(spec: Spec) -> int:
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _add_run(runs: list[tuple[int, int]], run: tuple[int, int], name: str) -> None:
    at = bisect_left(runs, run)
    if (at > 0 and runs[at - 1][1] > run[0]) or (at < len(runs) and runs[at][0] < run[1]):
        raise ValueError(f"rows {run[0]}:{run[1]} of {name} are written twice")
    start, stop = run
    low, high = at, at
    if at > 0 and runs[at - 1][1] == start:
        low, start = at - 1, runs[at - 1][0]
    if at < len(runs) and runs[at][0] == stop:
        high, stop = at + 1, runs[at][1]
    runs[low:high] = [(start, stop)]
