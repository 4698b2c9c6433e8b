"""What a generation cost: tokens, seconds, memory."""

import sys
import time
from dataclasses import dataclass

import torch


@dataclass
class Figures:
    """Sums over the generations it was given to.

    Prefill is the prompt's own tokens (no padding, nothing reused) up to the first new token;
    decode is every token after that one. Seconds are wall time inside the model and the sampler,
    without the time the caller takes between tokens.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 before there is one."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second, over all rows; 0 before there is one."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


def clock(device: torch.device) -> float:
    """Seconds of a steady clock, once `device` has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: tensors allocated on a CUDA device, else this process's resident
    set (0 where the platform does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
