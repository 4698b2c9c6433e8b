"""Writes a rank's part of all weights to one file, and joins ranks' files again.

Tensor by tensor, a block of rows at a time: a file of any size is made in the memory of one block.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.writer import Spec, TensorFileWriter
from g4tool.errors import G4Error
from g4tool.parallel.cut import cut_blocks, cut_rows, join, rank_part_shape
from g4tool.parallel.plan import Layout, Plan
from g4tool.progress import Progress, Report, silent

Change = Callable[[str, Tensor], Tensor]
"""A weight's name and rows of it (or an empty tensor on "meta") -> as the file holds them."""


class Parts(Protocol):
    """Weights to read by rows, part by part (see g4tool.formats.weights)."""

    def specs(self, name: str) -> Mapping[str, Spec]: ...

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor: ...


def shard_key(name: str, part: str) -> str:
    """The name in a rank's file: a plain weight's own, or `layers.0.mlp.up_proj.qdata`."""
    return name if part == "weight" else f"{name.removesuffix('.weight')}.{part}"


def shard_specs(
    weights: Parts, plan: Plan, rank: int, change: Change | None = None
) -> dict[str, Spec]:
    """Dtype and shape of each tensor in a rank's file, in order."""
    specs: dict[str, Spec] = {}
    for name, split in plan.splits.items():
        layout = plan.layouts.get(name, Layout())
        for part, (dtype, shape) in weights.specs(name).items():
            own = rank_part_shape(split, layout, part, shape, rank)
            if change:
                empty = change(name, torch.empty(own, dtype=dtype, device="meta"))
                dtype, own = empty.dtype, tuple(empty.shape)
            specs[shard_key(name, part)] = (dtype, own)
    return specs


def write_shard(
    path: Path,
    weights: Parts,
    plan: Plan,
    rank: int,
    *,
    rename: Callable[[str], str] = str,
    change: Change | None = None,
    more: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
    report: Report = silent,
) -> None:
    """Write what `rank` holds of every weight.

    `rename` gives a tensor's name in the file, `change` its values: of a block of rows, so it may
    not mix rows. `more` are further tensors.
    """
    own = shard_specs(weights, plan, rank, change)
    more = more or {}
    specs: dict[str, Spec] = {rename(key): spec for key, spec in own.items()}
    specs |= {key: (value.dtype, tuple(value.shape)) for key, value in more.items()}
    with TensorFileWriter(path, specs, metadata) as writer:
        for done, (name, split) in enumerate(plan.splits.items(), start=1):
            layout = plan.layouts.get(name, Layout())
            for part, (dtype, shape) in weights.specs(name).items():
                nbytes = math.prod(shape) * dtype.itemsize
                for start, stop, place in cut_blocks(split, layout, part, shape, nbytes, rank):
                    rows = weights.read(name, part, start, stop)
                    block = cut_rows(split, layout, part, rows, rank)
                    writer.write(
                        rename(shard_key(name, part)),
                        change(name, block) if change else block,
                        place,
                    )
            report(Progress("shard", done, len(plan.splits), "tensors", path.name))
        for key, value in more.items():
            writer.write(key, value)


def join_shards(files: Sequence[Path], plan: Plan, name: str) -> dict[str, Tensor]:
    """The whole parts of the weight `name` from all ranks' files of `write_shard`, unchanged ones.

    Raises G4Error for a wrong number of files, a missing or misshapen piece, or ranks' copies that
    differ.
    """
    if len(files) != plan.degree:
        raise G4Error(f"there are {len(files)} shards of {plan.degree} ranks: give them all.")
    layout = plan.layouts.get(name, Layout())
    parts = {"plain": ("weight",), "int4": ("qdata", "scale", "zero"), "int8": ("qdata", "scale")}
    whole: dict[str, Tensor] = {}
    for part in parts[layout.kind]:
        pieces = []
        for path in files:
            with SafetensorsFile(path) as file:
                pieces.append(file.read(shard_key(name, part)))
        whole[part] = join(plan.splits[name], layout, part, pieces)
    return whole
