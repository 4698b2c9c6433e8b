"""What ranks do together: add their tensors up, or put them side by side.

`torchrun` starts one process a rank; without it there is one rank and nothing to do.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from g4tool.errors import G4Error, UsageError
from g4tool.parallel.launch import launched


class Group(Protocol):
    """All ranks of a model. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks' x, the same on each; x may be overwritten."""
        ...

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """All ranks' x [..., sizes[rank]] side by side."""
        ...


@dataclass(frozen=True)
class World:
    """The ranks of torch.distributed's default process group.

    Raises G4Error where another rank cannot be reached any more.
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """As Group's."""
        x = x.contiguous()
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise _lost(error) from error
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """As Group's; ranks with less pad, since collectives want equal shapes."""
        widest = max(sizes)
        mine = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in sizes]
        try:
            dist.all_gather(parts, mine)
        except RuntimeError as error:
            raise _lost(error) from error
        cut = [part[..., :size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(cut, dim=-1)


def _lost(error: RuntimeError) -> G4Error:
    """gloo's errors are plain RuntimeErrors, with lines of places in its source."""
    why = re.sub(r"\[\S*:\d+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    return G4Error(f"another rank has ended or cannot be reached ({why[:200]}): see what it said.")


@contextmanager
def world(device: str) -> Iterator[World | None]:
    """The group of all processes that torchrun started; None where there is one process.

    NCCL where the device is CUDA, gloo elsewhere. `device` is this rank's own.
    """
    found = launched()
    if found is None:
        yield None
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", device_id=torch.device(device) if cuda else None
    )
    try:
        yield World(found.rank, found.size)
    finally:
        dist.destroy_process_group()


def rank_device(device: str) -> str:
    """This rank's own device: CUDA devices are given out by local rank.

    Raises UsageError where there are more ranks than devices.
    """
    found = launched()
    if found is None or torch.device(device).type != "cuda":
        return device
    if found.local >= torch.cuda.device_count():
        raise UsageError(
            f"rank {found.local} has no CUDA device, since this machine has "
            f"{torch.cuda.device_count()}: start fewer processes, or give --device cpu."
        )
    return f"cuda:{found.local}"
