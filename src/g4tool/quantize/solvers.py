"""Runs a solver over the rows of a weight, in blocks the machine likes; any give the same bytes."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from g4tool.quantize import als, grid, int8, reference, rtn, symmetric
from g4tool.quantize.pack import Codes, dequantize, packed

Solve = Callable[[Tensor, int], Codes]

SOLVERS: dict[str, Solve] = {
    "hqq": als.solve,
    "rtn": rtn.solve,
    "reference": reference.solve,
    "symmetric": symmetric.solve,
    "grid": grid.solve,
    "grid-symmetric": partial(grid.solve, zero_at_8=True),
    "int8": int8.solve,
}

# Weights solved at once. On a CPU the block and its three copies should stay in the second cache
# (half and twice are slower by a fifth); an accelerator wants few launches.
_BLOCK_CPU = 2**17
_BLOCK_DEVICE = 2**25


@dataclass(frozen=True)
class Packed:
    """Rows of a weight as they are stored, and per row what was lost.

    `error` and `energy`, fp64 [R]: the sums of (w' - w)^2 and of w^2.
    """

    qdata: Tensor
    scale: Tensor
    zero: Tensor | None
    error: Tensor
    energy: Tensor
    off_grid: int


class Workers:
    """One thread for each core, each with torch's own threads off, so that order never matters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(torch.get_num_threads()) if device.type == "cpu" else None

    def solve(self, rows: Tensor, solver: str, group: int) -> Packed:
        """Quantize rows [R, K] of a weight on the device; the result is on the CPU.

        The solver `reference` sees all rows at once, as its result depends on them.
        """
        block = _BLOCK_CPU if self.device.type == "cpu" else _BLOCK_DEVICE
        step = len(rows) if solver == "reference" else max(1, block // rows.shape[1])
        work = partial(_solve_block, SOLVERS[solver], group, self.device)
        blocks = torch.split(rows, step)
        parts = list(self._pool.map(work, blocks) if self._pool else map(work, blocks))
        # 4 bit scales lie group by row, 8 bit ones row by group.
        across = 1 if parts[0].zero is not None else 0
        zeros = [part.zero for part in parts if part.zero is not None]
        return Packed(
            torch.cat([part.qdata for part in parts]),
            torch.cat([part.scale for part in parts], across),
            torch.cat(zeros, 1) if zeros else None,
            torch.cat([part.error for part in parts]),
            torch.cat([part.energy for part in parts]),
            sum(part.off_grid for part in parts),
        )

    def close(self) -> None:
        """Let the threads go."""
        if self._pool:
            self._pool.shutdown()


@contextmanager
def workers(device: torch.device | str) -> Iterator[Workers]:
    """Workers for a device; on a CPU torch's own threads rest meanwhile."""
    crew = Workers(torch.device(device))
    threads = torch.get_num_threads()
    if crew.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield crew
    finally:
        crew.close()
        torch.set_num_threads(threads)


def relative_error(error: list[float], energy: list[float]) -> float:
    """sqrt(sum error / sum energy), to six digits.

    fsum is exact, so the blocks in which the sums arrive do not show.
    """
    total = math.fsum(energy)
    return float(f"{math.sqrt(math.fsum(error) / total):.6g}") if total else 0.0


@torch.inference_mode()
def _solve_block(solve: Solve, group: int, device: torch.device, rows: Tensor) -> Packed:
    rows = rows.to(device)
    codes = solve(rows, group)
    weights = rows.double()
    lost = dequantize(codes).double().sub_(weights).square_().sum(1)
    energy = weights.square_().sum(1)
    return Packed(
        packed(codes).cpu(),
        codes.scale.cpu(),
        None if codes.zero is None else codes.zero.cpu(),
        lost.cpu(),
        energy.cpu(),
        codes.off_grid,
    )
