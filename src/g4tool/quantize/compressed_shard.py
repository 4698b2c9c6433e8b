"""Writes the files of a compressed-tensors bundle: beside those of another format, or alone.

Beside another one it takes the blocks of rows as they pass through `driver.quantize_unit`, so that
nothing is read twice; what both formats solve alike is solved once.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.writer import TensorFileWriter
from g4tool.formats import compressed_tensors as layout
from g4tool.formats.bundle import FINGERPRINT
from g4tool.progress import Progress, Report, silent
from g4tool.quantize import driver
from g4tool.quantize.account import TensorAccount
from g4tool.quantize.compressed import stored, unit_specs
from g4tool.quantize.driver import Unit
from g4tool.quantize.pack import Packed
from g4tool.quantize.policy import TensorPlan
from g4tool.quantize.solvers import Workers, workers
from g4tool.quantize.tally import Tally, specs_size


class CompressedShard:
    """One file of the bundle, filled by the blocks that `take` is given.

    A context manager: the file appears at its end, with `accounts` of every tensor.
    """

    def __init__(self, path: Path, unit: Unit, fingerprint: str | None) -> None:
        self._plans = {item.name: item for item in unit.tensors}
        metadata = {} if fingerprint is None else {FINGERPRINT: fingerprint}
        self._writer = TensorFileWriter(path, unit_specs(unit), metadata)
        self._tallies = {item.name: Tally() for item in unit.tensors}
        self._shaped: set[str] = set()

    def take(
        self, item: TensorPlan, start: int, rows: Tensor, result: Packed | None, crew: Workers
    ) -> None:
        """See `driver.Also`; `item` and `result` are those of the other format."""
        plan = self._plans.get(item.name)
        if plan is None:
            return
        if plan.scheme == "keep":
            # Experts come one by one, each as the matrix it is.
            whole = rows if rows.dim() == len(plan.shape) else rows.unsqueeze(0)
            self._writer.write(plan.hf_name, whole, start)
            return
        assert plan.solver is not None
        assert plan.group_size is not None
        same = (item.solver, item.group_size) == (plan.solver, plan.group_size)
        if result is None or not same:
            result = crew.solve(rows, plan.solver, plan.group_size)
        self._write(plan, start, result)
        self._tallies[plan.name].add(result)

    def _write(self, plan: TensorPlan, start: int, result: Packed) -> None:
        words = layout.packed_words(result.qdata)
        scale = result.scale.t() if result.zero is not None else result.scale
        names = layout.modules(plan.hf_name, plan.shape[0] if len(plan.shape) == 3 else None)
        if len(plan.shape) == 3:
            each = len(names) // plan.shape[0]
            names, start = names[start * each : (start + 1) * each], 0
        for name, part, scales in zip(
            names, words.chunk(len(names)), scale.chunk(len(names)), strict=True
        ):
            self._writer.write(f"{name}.weight_packed", part, start)
            self._writer.write(f"{name}.weight_scale", scales.contiguous(), start)
            if name not in self._shaped:
                self._shaped.add(name)
                rows = plan.shape[-2] // len(names)
                shape = torch.tensor([rows, plan.shape[-1]])
                self._writer.write(f"{name}.weight_shape", shape)

    @property
    def accounts(self) -> list[TensorAccount]:
        """What became of every tensor. Raises G4Error for a weight that the scheme cannot hold."""
        return [
            self._tallies[item.name].account(
                item, specs_size(layout.weight_specs(stored(item)).values())
            )
            for item in self._plans.values()
        ]

    def __enter__(self) -> "CompressedShard":
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._writer.__exit__(kind, *rest)


def compressed_unit(
    checkpoint: Checkpoint,
    unit: Unit,
    path: Path,
    device: torch.device | str = "cpu",
    report: Report = silent,
    fingerprint: str | None = None,
) -> list[TensorAccount]:
    """Write one file of the bundle by itself. Raises as `driver.quantize_unit` does."""
    total = sum(checkpoint.info(item.source).nbytes for item in unit.tensors)
    done = 0
    with workers(device) as crew, CompressedShard(path, unit, fingerprint) as shard:
        for item in unit.tensors:
            report(Progress("quantize", done, total, "bytes", item.name))
            for start, rows in _matrices(checkpoint, item):
                shard.take(item, start, rows, None, crew)
            done += checkpoint.info(item.source).nbytes
        accounts = shard.accounts
        report(Progress("quantize", done, total, "bytes", unit.label))
    return accounts


def _matrices(checkpoint: Checkpoint, item: TensorPlan) -> Iterator[tuple[int, Tensor]]:
    """First row and rows of the blocks of a tensor; of quantized experts one expert at a time."""
    if item.scheme == "keep" or len(item.shape) == 2:
        yield from driver.blocks(checkpoint, item)
        return
    for expert in range(item.shape[0]):
        yield expert, driver.read(checkpoint, item, expert, expert + 1)[0]
