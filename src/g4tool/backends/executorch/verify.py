"""The proof of an exported program, stage by stage, each beside the one before.

eager bf16 -> int4 eager -> exported program -> lowered -> read back and run -> weights in the file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.backends.executorch.program import METHODS
from g4tool.errors import G4Error
from g4tool.model.config import TextConfig
from g4tool.model.text import TextModel

Step = Callable[[Tensor, int], Tensor]
"""ids int64 [1, S] at a position, after all ids before it -> logits [1, vocab] after the last."""

DECODED = 8
"""Tokens decoded after each prompt."""


@dataclass(frozen=True)
class Tolerance:
    """What two neighbouring stages may differ by: `kl` in nats a token, the others of a logit.

    `margin`: how far the likeliest token may be ahead of another that is chosen in its place.
    """

    difference: float = torch.inf
    mean_difference: float = torch.inf
    kl: float = torch.inf
    margin: float = torch.inf


# Rounding to another order of summation, for logits that the softcap keeps within 30.
EXACT = Tolerance(difference=1e-4)
# What the backend rounds to bf16 at other places. Another token may win where the first was ahead
# by a few units in the last place; on the tiny models eager bf16 chooses otherwise than eager fp32
# up to 0.13.
_BF16 = Tolerance(mean_difference=0.1, kl=0.02, margin=0.5)
# Activations rounded to int8 in another kernel's order, where one of 256 steps may fall otherwise.
KERNELS = Tolerance(kl=0.02)
# Another arithmetic, not an error: quantized weights, quantized activations.
QUANTIZED = Tolerance(kl=1.0)


def bf16(config: TextConfig) -> Tolerance:
    """For programs in bf16. A router's near ties fall otherwise there, and another expert moves the
    logits of a single token by any amount: with experts only the means are bounded."""
    return _BF16 if config.moe is None else replace(_BF16, margin=torch.inf)


@dataclass(frozen=True)
class Finding:
    """One stage beside the one before it; the figures are None where it has none.

    `agree`: the share of positions with the same greedy token; `margin`: where it is another, how
    far ahead of that one it was before, at most.
    """

    stage: str
    passed: bool
    difference: float | None = None
    mean_difference: float | None = None
    kl: float | None = None
    agree: float | None = None
    note: str = ""
    margin: float | None = None

    def line(self) -> str:
        """One line for a person."""
        verdict = "ok" if self.passed else "FAILED"
        if self.difference is None:
            return f"{self.stage:<28} {verdict:<7} {self.note}"
        ahead = f" (else ahead by {self.margin:.2g})" if self.margin is not None else ""
        return (
            f"{self.stage:<28} {verdict:<7} logits max {self.difference:.2e} mean "
            f"{self.mean_difference:.2e}, greedy agreement {self.agree:.1%}{ahead}, "
            f"KL {self.kl:.2e}" + (f"  ({self.note})" if self.note else "")
        )


@dataclass(frozen=True)
class Walk:
    """A prompt and the lengths of the chunks that it is fed in; a chunk of one is decoded."""

    ids: tuple[int, ...]
    chunks: tuple[int, ...]


def walks(ids: Sequence[int], window: int, longest: int, chunk: int) -> list[Walk]:
    """Walks through a text of at least a few windows, with chunks around the window's edges.

    Every walk crosses the window, and has room for the tokens decoded after it. `longest`: what the
    cache holds; `chunk`: the longest prefill.
    """
    room = min(len(ids), longest) - DECODED
    wanted = (2, window - 1, window, window + 1, 2 * window + 1)
    sizes = sorted({max(2, min(size, chunk, room)) for size in wanted})
    found = []
    for size in sizes:
        # Small chunks are many calls: one crossing of the window will do.
        length = max(1, min(room, 4 * window + 1 if size >= window - 1 else window + window // 2))
        found.append(Walk(tuple(ids[: length + DECODED]), tuple(_cut(length, size))))
    return found


def _cut(length: int, size: int) -> Iterator[int]:
    for start in range(0, length, size):
        yield min(size, length - start)


@torch.no_grad()
def trace(step: Step, walk: Walk) -> Tensor:
    """Logits fp32 [calls, vocab] after each chunk, then after each of the walk's last tokens."""
    found, at = [], 0
    single = [1] * (len(walk.ids) - sum(walk.chunks))
    for size in (*walk.chunks, *single):
        ids = torch.tensor([walk.ids[at : at + size]])
        found.append(step(ids, at)[0].float().cpu())
        at += size
    return torch.stack(found)


def compare(
    stage: str,
    before: Sequence[Tensor],
    now: Sequence[Tensor],
    tolerance: Tolerance,
    note: str = "",
) -> Finding:
    """What `now` differs from `before` by, walk by walk together."""
    a, b = torch.cat(list(before)), torch.cat(list(now))
    apart = (a - b).abs()
    p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    difference = apart.max().item()
    # Written so that NaN fails.
    mean = apart.mean().item()
    chosen = b.argmax(-1, keepdim=True)
    other = (a.argmax(-1, keepdim=True) != chosen).flatten()
    ahead = (a.amax(-1) - a.gather(-1, chosen).flatten())[other]
    margin = ahead.max().item() if len(ahead) else None
    passed = (
        difference <= tolerance.difference
        and mean <= tolerance.mean_difference
        and kl <= tolerance.kl
        and (margin is None or margin <= tolerance.margin)
    )
    agree = 1 - other.float().mean().item()
    return Finding(stage, passed, difference, mean, kl, agree, note, margin)


def eager(model: TextModel, longest: int) -> Step:
    """The model itself, over a cache of its own."""
    model.allocate_cache(1, longest)

    def step(ids: Tensor, start: int) -> Tensor:
        place = model.device
        hidden = model.hidden(ids.to(place), torch.tensor(start, device=place))
        return model.logits(hidden[:, -1])

    return step


def in_python(modules: Mapping[str, nn.Module], device: str = "cpu") -> Step:
    """Exported or lowered methods as modules on `device`, their caches made one and empty."""
    first, second = (modules[name] for name in METHODS)
    held = dict(first.named_buffers())
    for name, buffer in list(second.named_buffers()):
        if ".cache." in name and name in held:
            held[name].zero_()
            owner, _, leaf = name.rpartition(".")
            assert buffer.shape == held[name].shape
            setattr(second.get_submodule(owner), leaf, held[name])
    return methods(first, second, device)


def methods(
    prefill: Callable[..., Tensor], decode: Callable[..., Tensor], device: str = "cpu"
) -> Step:
    """Two methods that take (tokens, start) on `device`."""

    def step(ids: Tensor, start: int) -> Tensor:
        method = decode if ids.shape[1] == 1 else prefill
        return method(ids.to(device).contiguous(), torch.tensor(start, device=device))

    return step


def require(findings: Sequence[Finding]) -> None:
    """Raise G4Error for the first stage that is out of tolerance."""
    for found in findings:
        if not found.passed:
            raise G4Error(
                f"the proof failed at the stage {found.stage!r}: {found.line()}; "
                f"nothing was exported."
            )


def to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """For export.json."""
    return [asdict(found) for found in findings]
