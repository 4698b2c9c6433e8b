"""From logits to the next token: greedy, temperature, top-k, top-p.

The filters mean, and come in, what `transformers` calls its warpers: temperature, then top-k, then
top-p on what is left. Everything stays on the logits' device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from g4tool.errors import UsageError

NOT_FINITE = -1
"""Stands in the place of a token whose logits hold NaN or infinity."""


_TEMPERATURES = (1e-5, 1e5)
"""Beyond these the scores divided by it leave fp32's range."""

_SEEDS = (-(2**63), 2**64 - 1)
"""What torch's generators take."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 is greedy, whatever the rest says; otherwise it is 1e-5 to 1e5. `top_k` 0 keeps
    every token; `top_p` 1 keeps every token. `seed` None draws a fresh one. Raises UsageError for a
    value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        low, high = _TEMPERATURES
        if not (self.temperature == 0 or low <= self.temperature <= high):
            raise UsageError(
                f"temperature is {self.temperature}: give 0 (greedy) or {low:g} to {high:g}."
            )
        if self.top_k < 0:
            raise UsageError(f"top-k is {self.top_k}: give 0 (every token) or more.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}: give more than 0 and at most 1.")
        if self.seed is not None and not _SEEDS[0] <= self.seed <= _SEEDS[1]:
            raise UsageError(f"seed is {self.seed}: give a whole number of at most 64 bits.")


GREEDY = Sampling()


def make_generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """The random source on `device`, seeded as `sampling` says; None for greedy."""
    if sampling.temperature == 0:
        return None
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [B, V] in fp32 with the temperature applied and excluded tokens at -inf.

    Top-k keeps ties with its last token. Top-p keeps the fewest most likely tokens whose
    probabilities reach `top_p`, at least one. Temperature must be above 0.
    """
    scores = logits.float() / sampling.temperature
    vocab = scores.shape[-1]
    if 0 < sampling.top_k < vocab:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        excluded = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        excluded[:, -1] = False
        scores = scores.masked_fill(excluded.scatter(1, order, excluded), -math.inf)
    return scores


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """The next token of each row: int64 [B] from logits [B, V].

    Rows that hold NaN or +inf give NOT_FINITE, so that the host learns of it with the tokens
    instead of waiting for the device once more.
    """
    broken = ~logits.amax(dim=-1).isfinite()
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        usable = logits.masked_fill(broken[:, None], 0)
        probabilities = filtered(usable, sampling).softmax(dim=-1)
        tokens = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return tokens.masked_fill(broken, NOT_FINITE)
