"""Quantizes a checkpoint file by file: one for each decoder layer, one for what is outside them.

A file is a shard of the bundle, written in place while its tensors stream through in row blocks;
of a whole tensor only the 4 bit scales and zeros are held, since they lie across the rows.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.tensorfile import row_blocks
from g4tool.checkpoint.writer import SINGLE, Spec, TensorFileWriter
from g4tool.errors import G4Error
from g4tool.formats.bundle import FINGERPRINT
from g4tool.formats.torchao import Kind, Stored, part_names, shard_layout
from g4tool.progress import Progress, Report, silent
from g4tool.quantize.account import TensorAccount, keep_instead
from g4tool.quantize.pack import Packed
from g4tool.quantize.policy import TensorPlan
from g4tool.quantize.solvers import Workers, workers
from g4tool.quantize.tally import Tally, specs_size

_LAYER = re.compile(r"layers\.(\d+)\.")
# Source bytes read at once; a 2-D weight is never whole in memory, of 3-D ones an expert is.
_READ_BYTES = 1 << 26
_CPU = torch.device("cpu")
# Files made at once on a CUDA device: while one's blocks are solved, others are read, written,
# flushed and hashed. Each holds a few blocks of pinned memory.
_UNITS_AT_ONCE = 12
# Up to it the largest bf16 scale spans the weights from its negative to itself in every scheme.
_LARGEST = 2.0**126


Also = Callable[[TensorPlan, int, Tensor, Packed | None, Workers], None]
"""Takes each block as it passes, for another format: its plan, its first row (of quantized 3-D
weights its expert), the rows as they were read, what they became (None where kept), the workers."""


@dataclass(frozen=True)
class Unit:
    """One file of the bundle and the tensors in it."""

    label: str
    file: str
    tensors: tuple[TensorPlan, ...]


def units(plans: list[TensorPlan], layerwise: bool = True) -> list[Unit]:
    """The files of a bundle: first what is outside the layers, then one a layer; or one in all."""
    if not layerwise:
        return [Unit("all", SINGLE, tuple(plans))]
    members: dict[str, list[TensorPlan]] = {"outside the layers": []}
    for item in plans:
        layer = _LAYER.match(item.name)
        members.setdefault(f"layer {layer[1]}" if layer else "outside the layers", []).append(item)
    count = len(members)
    return [
        Unit(label, f"model-{number:05d}-of-{count:05d}.safetensors", tuple(tensors))
        for number, (label, tensors) in enumerate(members.items(), start=1)
    ]


def units_at_once(device: torch.device | str) -> int:
    """How many calls of `quantize_unit` keep the device and the disk busy, each in its thread."""
    if torch.device(device).type != "cuda":
        return 1
    return min(_UNITS_AT_ONCE, os.cpu_count() or 1)


def unit_layout(unit: Unit) -> tuple[dict[str, Spec], dict[str, str]]:
    """Tensors of the unit's file, name -> (dtype, shape), and the header's metadata."""
    return shard_layout(stored(item) for item in unit.tensors)


def quantize_unit(
    checkpoint: Checkpoint,
    unit: Unit,
    path: Path,
    device: torch.device | str = "cpu",
    report: Report = silent,
    fingerprint: str | None = None,
    also: Also | None = None,
) -> list[TensorAccount]:
    """Quantize the unit's tensors and write them as the file `path`, whole or not at all.

    `fingerprint`, that of the bundle, goes into the file's header; `also` sees every block. Raises
    G4Error, naming file and tensor, for NaN or infinity, and for a weight that its scheme cannot
    hold.
    """
    specs, metadata = unit_layout(unit)
    if fingerprint is not None:
        metadata = {**metadata, FINGERPRINT: fingerprint}
    total = sum(checkpoint.info(item.source).nbytes for item in unit.tensors)
    accounts: list[TensorAccount] = []
    done = 0
    with workers(device) as crew, TensorFileWriter(path, specs, metadata) as writer:
        for item in unit.tensors:
            report(Progress("quantize", done, total, "bytes", item.name))
            accounts.append(
                _quantize_tensor(checkpoint, item, specs, writer, crew, also or _nobody)
            )
            done += checkpoint.info(item.source).nbytes
        report(Progress("quantize", done, total, "bytes", unit.label))
    return accounts


def _quantize_tensor(
    checkpoint: Checkpoint,
    item: TensorPlan,
    specs: dict[str, Spec],
    writer: TensorFileWriter,
    crew: Workers,
    also: Also,
) -> TensorAccount:
    parts = part_names(item.hf_name, _kind(item))
    tally = Tally()
    if item.scheme == "keep":
        for start, block in blocks(checkpoint, item):
            writer.write(parts["weight"], block, start)
            also(item, start, block, None, crew)
    elif len(item.shape) == 2:
        _write_matrix(checkpoint, item, parts, writer, crew, also, tally)
    else:
        _write_experts(checkpoint, item, parts, writer, crew, also, tally)
    return tally.account(item, specs_size(specs[name] for name in parts.values()))


def _write_matrix(
    checkpoint: Checkpoint,
    item: TensorPlan,
    parts: dict[str, str],
    writer: TensorFileWriter,
    crew: Workers,
    also: Also,
    tally: Tally,
) -> None:
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    for start, block in blocks(checkpoint, item, crew.device):
        result = _solve(crew, item, block)
        writer.write(parts["qdata"], result.qdata, start)
        if result.zero is None:
            writer.write(parts["scale"], result.scale, start)
            writer.write(parts["zero"], _no_zero(result.scale), start)
        else:
            scales.append(result.scale)
            zeros.append(result.zero)
        tally.add(result)
        also(item, start, block, result, crew)
    if zeros:
        writer.write(parts["scale"], torch.cat(scales, 1))
        writer.write(parts["zero"], torch.cat(zeros, 1))


def _write_experts(
    checkpoint: Checkpoint,
    item: TensorPlan,
    parts: dict[str, str],
    writer: TensorFileWriter,
    crew: Workers,
    also: Also,
    tally: Tally,
) -> None:
    for expert in range(item.shape[0]):
        rows = read(checkpoint, item, expert, expert + 1, crew.device)[0]
        result = _solve(crew, item, rows)
        zero = _no_zero(result.scale) if result.zero is None else result.zero
        for part, values in (("qdata", result.qdata), ("scale", result.scale), ("zero", zero)):
            writer.write(parts[part], values.unsqueeze(0), expert)
        tally.add(result)
        also(item, expert, rows, result, crew)


def _nobody(*_: object) -> None:
    """Takes no block."""


def _solve(crew: Workers, item: TensorPlan, rows: Tensor) -> Packed:
    assert item.solver is not None
    assert item.group_size is not None
    return crew.solve(rows, item.solver, item.group_size)


def blocks(
    checkpoint: Checkpoint, item: TensorPlan, device: torch.device = _CPU
) -> Iterator[tuple[int, Tensor]]:
    """First row and rows, on `device`, of the blocks in which a tensor is read."""
    info = checkpoint.info(item.source)
    # The hqq package's result depends on all rows it sees.
    limit = info.nbytes if item.solver == "reference" else _READ_BYTES
    for start, stop in row_blocks(info.rows, info.row_nbytes, limit):
        yield start, read(checkpoint, item, start, stop, device)


def read(
    checkpoint: Checkpoint, item: TensorPlan, start: int, stop: int, device: torch.device = _CPU
) -> Tensor:
    """Rows of a plan's source, on `device`. Raises G4Error for values that are no use to it."""
    values = checkpoint.read(item.source, start, stop, pinned=device.type == "cuda")
    values = values.to(device, non_blocking=True)
    # The towers hold bounds that may be infinite on purpose; they are carried as they are.
    if values.numel() and values.is_floating_point() and item.source not in checkpoint.extras:
        fault = _fault(item, values)
        if fault is not None:
            file, key = checkpoint.pieces(item.source)[0]
            where = f"{checkpoint.folder / file}: {key}, rows {start} to {stop - 1}"
            raise G4Error(f"{where}, has {fault}.")
    return values


def _fault(item: TensorPlan, values: Tensor) -> str | None:
    """What makes the values useless for the plan, and what to do, or None."""
    low, high = (bound.item() for bound in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        return "NaN or infinity; the checkpoint is damaged"
    if item.scheme != "keep" and max(-low, high) > _LARGEST:
        advice = keep_instead(item.name)
        return f"values beyond {_LARGEST:.2g}, too large for {item.scheme}; {advice}"
    return None


def _kind(item: TensorPlan) -> Kind:
    if item.scheme == "keep":
        return "plain"
    return "int8" if item.scheme == "int8" else "int4"


def stored(item: TensorPlan) -> Stored:
    """The form that a tensor has in the file."""
    kind = _kind(item)
    dtype = item.dtype if kind == "plain" else torch.bfloat16
    return Stored(item.hf_name, kind, item.shape, dtype, item.group_size)


def _no_zero(scale: Tensor) -> Tensor:
    return torch.zeros(scale.shape, dtype=torch.int8)
