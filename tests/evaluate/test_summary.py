"""Means over tokens, intervals over windows."""

import math

import numpy as np
import pytest
import torch

from g4tool.evaluate.corpus import Window
from g4tool.evaluate.scores import Difference, Reference
from g4tool.evaluate.summary import by_position, fidelity, interval, prediction

WINDOWS = [Window("a", (2, 5, 6, 7), 10), Window("a", (2, 8), 4)]


def test_perplexity_weighs_tokens_not_windows() -> None:
    losses = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])]
    found = prediction(WINDOWS, losses)
    assert found.perplexity == pytest.approx(math.exp(12 / 4))
    assert found.bits_per_byte == pytest.approx(12 / math.log(2) / 14)


def test_figures_of_a_comparison() -> None:
    losses = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0]))
    kl = (torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0]))
    agree = (torch.tensor([True, False, True]), torch.tensor([True]))
    reference = Reference(None, tuple(WINDOWS), (), losses)  # type: ignore[arg-type]
    gap = (torch.tensor([0.5, 0.7, 0.6]), torch.tensor([0.9]))
    shifted = tuple(x + 0.5 for x in losses)
    found = fidelity(reference, Difference(shifted, kl, agree, gap))
    assert found.gap == pytest.approx(0.9)
    assert found.kl_mean == pytest.approx(0.4)
    assert found.kl_p99 == pytest.approx(np.quantile([0.1, 0.2, 0.3, 1.0], 0.99), rel=1e-6)
    assert found.top1 == 0.75
    assert found.log_ratio == pytest.approx(0.5)
    # The same shift everywhere has no noise, whatever the texts are like.
    assert found.log_ratio_interval == pytest.approx((0.5, 0.5))


def test_interval_covers_the_mean_of_fresh_samples() -> None:
    generator = torch.Generator().manual_seed(1)
    hits = 0
    for _ in range(100):
        # Tokens of a window share a common part, so windows are what counts.
        shared = torch.randn(40, 1, generator=generator)
        values = 3 + shared + 0.1 * torch.randn(40, 16, generator=generator)
        low, high = interval(list(values))  # type: ignore[misc]
        hits += low <= 3 <= high
        assert 0.3 < high - low < 1.2  # 4 standard errors of 40 windows are 0.63
    assert hits >= 85


def test_one_window_has_no_interval() -> None:
    assert interval([torch.ones(5)]) is None


def test_intervals_are_the_same_every_time() -> None:
    values = [torch.randn(8) for _ in range(10)]
    assert interval(values) == interval(values)


def test_means_by_position_skip_windows_that_ended() -> None:
    values = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0])]
    assert by_position(values, 2) == [(0, 2.0), (2, 3.5)]
