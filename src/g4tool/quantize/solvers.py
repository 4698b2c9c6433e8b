"""Runs a solver over the rows of a weight, in blocks the machine likes; any give the same bytes."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from g4tool.kernels.register import has_triton
from g4tool.quantize import als, grid, int8, reference, rtn, symmetric
from g4tool.quantize.pack import Codes, Packed, dequantize, packed

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


KERNEL_GROUPS = (16, 32, 64, 128, 256)
"""Group sizes that `triton_als` solves."""

_streams = threading.local()


class Workers:
    """Solves on one device.

    On a CPU one thread for each core, each with torch's own threads off, so that order never
    matters. On a CUDA device everything is queued on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(torch.get_num_threads()) if device.type == "cpu" else None

    def solve(self, rows: Tensor, solver: str, group: int) -> Packed:
        """Quantize rows [R, K] of a weight on the device; the result is on the CPU.

        The solver `reference` sees all rows at once, as its result depends on them.
        """
        block = _BLOCK_CPU if self.device.type == "cpu" else _BLOCK_DEVICE
        step = len(rows) if solver == "reference" else max(1, block // rows.shape[1])
        work = partial(_solve_block, solver, group, self.device)
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
    """Workers for a device; on a CPU torch's own threads rest meanwhile.

    On a CUDA device this thread has a stream of its own meanwhile, so that several threads keep
    reading, copying, solving and writing at once.
    """
    crew = Workers(torch.device(device))
    if crew.device.type == "cuda":
        stream = _stream(crew.device)
        stream.wait_stream(torch.cuda.current_stream(crew.device))
        with torch.cuda.stream(stream):
            yield crew
        return
    threads = torch.get_num_threads()
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
def _solve_block(solver: str, group: int, device: torch.device, rows: Tensor) -> Packed:
    rows = rows.to(device, non_blocking=True)
    if solver == "hqq" and group in KERNEL_GROUPS and has_triton(device):
        from g4tool.quantize import triton_als

        return _home(triton_als.solve(rows, group))
    codes = SOLVERS[solver](rows, group)
    weights = rows.double()
    lost = dequantize(codes).double().sub_(weights).square_().sum(1)
    energy = weights.square_().sum(1)
    return _home(Packed(packed(codes), codes.scale, codes.zero, lost, energy, codes.off_grid))


def _home(result: Packed) -> Packed:
    """The same on the CPU; of a CUDA device in page-locked memory, copied all at once."""
    if result.qdata.device.type == "cpu":
        return result

    def copied(values: Tensor) -> Tensor:
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, True)

    home = replace(
        result,
        qdata=copied(result.qdata),
        scale=copied(result.scale),
        zero=None if result.zero is None else copied(result.zero),
        error=copied(result.error),
        energy=copied(result.energy),
    )
    torch.cuda.current_stream(result.qdata.device).synchronize()
    return home


def _stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's stream on a CUDA device.

    One for good: memory that torch freed on a stream is not used again on another.
    """
    found: torch.cuda.Stream | None = getattr(_streams, str(device), None)
    if found is None:
        found = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        setattr(_streams, str(device), found)
    return found
