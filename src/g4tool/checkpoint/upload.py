"""Tensors from safetensors files into a device's memory; on CUDA without a copy on the host.

Several threads read blocks into pinned memory, each into two buffers in turn, so that one is
copied to the device while the other is filled. What is held on the host is those buffers.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from g4tool.checkpoint.tensorfile import SafetensorsFile

Read = Callable[[SafetensorsFile, str, bool], Tensor]
"""File, name of the tensor, and whether its values are wanted at once -> tensor on the device."""

_BLOCK = 1 << 24
_THREADS = 8


@contextmanager
def reader(device: torch.device | str) -> Iterator[Read]:
    """A function that gives a file's tensor, by its name, in the device's memory.

    On CUDA, unless they are wanted at once, the values are there only when the context has been
    left, which raises G4Error for a file that could not be read.
    """
    device = torch.device(device)
    if device.type != "cuda":
        yield lambda file, name, _: file.read(name).to(device)
        return
    upload = _Upload(device)
    try:
        yield upload.read
        upload.finish()
    finally:
        upload.close()


class _Upload:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        self._local = threading.local()
        self._blocks: list[Future[None]] = []
        self._streams: list[torch.cuda.Stream] = []

    def read(self, file: SafetensorsFile, name: str, at_once: bool) -> Tensor:
        """The tensor; unless `at_once`, memory for it that the threads are to fill."""
        if at_once:
            return file.read(name).to(self._device)
        info = file.info(name)
        tensor = torch.empty(info.shape, dtype=info.dtype, device=self._device)
        # Whoever had this memory before may still be at work on the current stream.
        free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        free.record(torch.cuda.current_stream(self._device))
        values = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, len(values), _BLOCK):
            part = values[start : start + _BLOCK]
            self._blocks.append(self._pool.submit(self._fill, file, name, start, part, free))
        return tensor

    def finish(self) -> None:
        """Wait until everything is there; raise the first failure."""
        for block in self._blocks:
            block.result()
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)

    def close(self) -> None:
        """Stop, and wait until no copy is under way."""
        self._pool.shutdown(cancel_futures=True)
        for stream in self._streams:
            stream.synchronize()

    def _fill(
        self, file: SafetensorsFile, name: str, start: int, part: Tensor, free: torch.cuda.Event
    ) -> None:
        lane = self._lane()
        buffer, copied = lane.turn()
        copied.synchronize()
        file.read_bytes(name, start, buffer[: len(part)])
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(free)
            part.copy_(buffer[: len(part)], non_blocking=True)
            copied.record(lane.stream)

    def _lane(self) -> "_Lane":
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = _Lane(self._device)
            self._streams.append(lane.stream)
        return lane


class _Lane:
    """One thread's stream and buffers, each with the event that its copy is done."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._next = 0

    def turn(self) -> tuple[Tensor, torch.cuda.Event]:
        """The buffer whose turn it is."""
        self._next = 1 - self._next
        return self._buffers[self._next], self._copied[self._next]
