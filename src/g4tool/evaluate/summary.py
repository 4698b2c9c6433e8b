"""From values a token to the figures of a table, each with its 95 % bootstrap interval.

Tokens of one window share their text, so windows are what is drawn again, not tokens: a mean is the
ratio of two sums over the windows drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from g4tool.evaluate.corpus import Window
from g4tool.evaluate.scores import Difference, Reference

_DRAWS = 2000
_SEED = 0

Interval = tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """How well a model predicts the text. `interval` is the perplexity's; None for one window."""

    perplexity: float
    interval: Interval | None
    bits_per_byte: float


@dataclass(frozen=True)
class Fidelity:
    """How far a candidate is from its reference.

    `kl_mean` and `kl_p99` (99th percentile over positions) in nats a token; `top1` the share of
    positions with the same most likely token; `gap` the largest difference of a log-probability
    anywhere; `log_ratio` the log of the candidate's perplexity over the reference's, its interval
    from the same windows for both.
    """

    kl_mean: float
    kl_interval: Interval | None
    kl_p99: float
    top1: float
    gap: float
    log_ratio: float
    log_ratio_interval: Interval | None


def prediction(windows: Sequence[Window], losses: Sequence[Tensor]) -> Prediction:
    """Perplexity a token and bits a byte of UTF-8."""
    mean = _mean(losses)
    around = interval(losses)
    return Prediction(
        perplexity=math.exp(mean),
        interval=around and (math.exp(around[0]), math.exp(around[1])),
        bits_per_byte=_total(losses) / math.log(2) / sum(window.nbytes for window in windows),
    )


def fidelity(reference: Reference, found: Difference) -> Fidelity:
    """The figures of a comparison."""
    everywhere = torch.cat(found.kl).double()
    change = [b - a for a, b in zip(reference.losses, found.losses, strict=True)]
    return Fidelity(
        kl_mean=_mean(found.kl),
        kl_interval=interval(found.kl),
        kl_p99=float(_quantile(everywhere, 0.99)),
        top1=_mean(found.agree),
        gap=max(float(gap.max()) for gap in found.gap),
        log_ratio=_mean(change),
        log_ratio_interval=interval(change),
    )


def interval(values: Sequence[Tensor]) -> Interval | None:
    """The 95 % interval of the mean over all tokens [S] of windows; None for fewer than two."""
    if len(values) < 2:
        return None
    sums = torch.tensor([float(v.double().sum()) for v in values], dtype=torch.float64)
    counts = torch.tensor([float(v.numel()) for v in values], dtype=torch.float64)
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(len(values), (_DRAWS, len(values)), generator=generator)
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return float(_quantile(means, 0.025)), float(_quantile(means, 0.975))


def by_position(values: Sequence[Tensor], step: int) -> list[tuple[int, float]]:
    """(first position, mean) of each run of `step` positions of a window."""
    length = max(v.numel() for v in values)
    result = []
    for start in range(0, length, step):
        parts = [v[start : start + step] for v in values if v.numel() > start]
        result.append((start, _mean(parts)))
    return result


def _total(values: Sequence[Tensor]) -> float:
    return math.fsum(float(v.double().sum()) for v in values)


def _mean(values: Sequence[Tensor]) -> float:
    return _total(values) / sum(v.numel() for v in values)


def _quantile(values: Tensor, share: float) -> Tensor:
    # torch.quantile refuses more than 2**24 values.
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
