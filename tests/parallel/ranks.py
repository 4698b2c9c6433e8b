"""Ranks as threads of this process, and what tests share."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class Meeting:
    """Where the threads of `size` ranks hand each other tensors."""

    size: int
    given: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.given = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        everyone = [each for each in self.given if each is not None]
        self.barrier.wait()
        return everyone


@dataclass(frozen=True)
class ThreadGroup:
    """A Group whose ranks are threads."""

    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self.meeting.exchange(self.rank, x)
        assert [part.shape[-1] for part in parts] == list(sizes)
        return torch.cat(parts, dim=-1)


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` gives on each of `size` ranks."""
    meeting = Meeting(size)

    def guarded(rank: int) -> T:
        try:
            with torch.no_grad():
                return work(ThreadGroup(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
