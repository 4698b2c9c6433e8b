"""The sampler against transformers' logits processors."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from g4tool.errors import UsageError
from g4tool.generate.sampler import (
    GREEDY,
    NOT_FINITE,
    Sampling,
    choose,
    filtered,
    make_generator,
)

CPU = torch.device("cpu")


def _transformers(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers(torch.empty(len(logits), 0), logits)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 1.0])
def test_filters_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    sampling = Sampling(temperature, top_k, top_p)
    logits = torch.randn(5, 300) * 4
    logits[1] = torch.randint(0, 4, (300,)).float()  # many ties
    logits[2, 10:] = -80.0
    expected = _transformers(logits, sampling).softmax(-1)
    assert torch.equal(filtered(logits, sampling).softmax(-1), expected)


def test_draws_follow_the_filtered_distribution() -> None:
    sampling = Sampling(1.0, top_k=3, seed=5)
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0]]).expand(20_000, 4)
    tokens = choose(logits, sampling, make_generator(sampling, CPU))
    share = torch.bincount(tokens, minlength=4) / len(tokens)
    assert torch.allclose(share, filtered(logits[:1], sampling).softmax(-1)[0], atol=0.015)
    assert share[3] == 0


def test_seed_repeats_and_seeds_differ() -> None:
    logits = torch.zeros(1, 4096)

    def draw(seed: int | None) -> list[int]:
        sampling = Sampling(1.0, seed=seed)
        generator = make_generator(sampling, CPU)
        return [int(choose(logits, sampling, generator)) for _ in range(8)]

    assert draw(3) == draw(3)
    assert len({tuple(draw(seed)) for seed in (3, 4, None, None)}) == 4


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(6, 50)
    sampling = Sampling(0.0, top_k=5, top_p=0.1, seed=1)
    assert make_generator(sampling, CPU) is None
    assert torch.equal(choose(logits, sampling, None), logits.argmax(-1))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 4, 0.9, seed=0)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_marked(sampling: Sampling, bad: float) -> None:
    logits = torch.zeros(3, 9)
    logits[:, 2] = 50
    logits[1, 4] = bad
    tokens = choose(logits, sampling, make_generator(sampling, CPU))
    assert tokens.tolist() == [2, NOT_FINITE, 2]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1e-30}, r"temperature is 1e-30: give 0 \(greedy\) or 1e-05 to 100000"),
        ({"temperature": 1e300}, "temperature is 1e\\+300"),
        ({"seed": 2**64}, "seed is 18446744073709551616: give a whole number of at most 64 bits"),
        ({"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.01}, "top-p is 1.01"),
    ],
)
def test_values_out_of_range(settings: dict[str, float], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Sampling(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-5, 1e5])
@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_the_ends_of_the_ranges_work(temperature: float, seed: int) -> None:
    sampling = Sampling(temperature, seed=seed)
    logits = torch.tensor([[-1e4, 1e4, -math.inf, 9e3]])
    drawn = {
        int(choose(logits, sampling, make_generator(sampling, logits.device))) for _ in range(5)
    }
    assert len(drawn) == 1
    assert drawn <= {0, 1, 3}
    if temperature < 1:
        assert drawn == {1}
