"""Sampling inside a program beside sampling outside of it."""

import pytest
import torch

from g4tool.backends.executorch.sampling import next_id
from g4tool.generate.sampler import Sampling, filtered

VOCAB = 50


def sample(logits: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    knobs = (
        torch.tensor(sampling.temperature),
        torch.tensor(sampling.top_k),
        torch.tensor(sampling.top_p),
        torch.tensor(uniform),
    )
    found = next_id(logits, *knobs)
    assert (found.dtype, found.shape) == (torch.int64, (1, 1))
    return int(found)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.3),
        Sampling(1.0, top_k=5),
        Sampling(1.5, top_p=0.6),
        Sampling(0.8, top_k=9, top_p=0.5),
        Sampling(1.0, top_k=VOCAB + 7),
        Sampling(1.0, top_p=1e-6),
    ],
)
def test_each_token_gets_its_share_of_the_unit_interval(sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, VOCAB) * 2
    steps = 4000
    drawn = torch.tensor([sample(logits, sampling, (i + 0.5) / steps) for i in range(steps)])
    shares = torch.bincount(drawn, minlength=VOCAB) / steps
    wanted = filtered(logits, sampling).softmax(-1)[0]
    # An interval's ends may each gain or lose one point.
    assert (shares - wanted).abs().max() <= 2 / steps


def test_the_ends_of_the_unit_interval() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    assert sample(logits, Sampling(1.0), 0.0) == 0
    assert sample(logits, Sampling(1.0), 1 - 2**-24) == 1


def test_temperature_zero_is_greedy_and_broken_logits_are_told() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, VOCAB)
    assert sample(logits, Sampling(), 0.99) == int(logits.argmax())
    for value in (torch.nan, torch.inf):
        logits[0, 7] = value
        assert sample(logits, Sampling(), 0.5) == -1
        assert sample(logits, Sampling(1.0), 0.5) == -1
