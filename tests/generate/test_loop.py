"""Generation against transformers' generate, on random models with a window of 8."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from g4tool.errors import G4Error, UsageError
from g4tool.generate.figures import Figures, peak_memory
from g4tool.generate.loop import Session, generate
from g4tool.generate.sampler import Sampling
from g4tool.model.text import TextModel
from tests.model.oracle import FAMILIES, VOCAB, WINDOW, config_of, hf_model, random_ids, text_model

NEW = 12


def _pair(family: str) -> tuple[Any, TextModel]:
    """transformers' model and ours, same weights, whose greedy text is no constant.

    With a tied head the last token's own embedding wins, unless the layers outweigh it.
    """
    reference = hf_model(family)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if name.endswith(
                ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
            ):
                weight.mul_(20)
    return reference, text_model(reference, config_of(family))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, TextModel]:
    return _pair(request.param)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return _pair("dense")[1]


def _reference(reference: Any, prompt: list[int], new: int = NEW, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": None, **options},
    )
    return out[0, len(prompt) :].tolist()


def _rows(steps: Iterator[list[int | None]], count: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(count)]
    for step in steps:
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def _prompt(length: int, seed: int = 1) -> list[int]:
    return random_ids(1, length, seed)[0].tolist()


@pytest.mark.parametrize("chunk", [1, 5, WINDOW, WINDOW + 1, 1024])
def test_long_prompt_equals_transformers(pair: tuple[Any, TextModel], chunk: int) -> None:
    reference, model = pair
    prompt = _prompt(4 * WINDOW + 7)
    expected = _reference(reference, prompt)
    steps = generate(model, [prompt], max_new_tokens=NEW, prefill_chunk=chunk)
    assert _rows(steps, 1) == [expected]
    assert len(set(expected)) > 3  # not a constant that any model would repeat


@pytest.mark.parametrize("chunk", [6, 1024])
def test_left_padded_batch_equals_each_prompt_alone(
    pair: tuple[Any, TextModel], chunk: int
) -> None:
    reference, model = pair
    prompts = [_prompt(n, seed=n) for n in (3, 4 * WINDOW + 5, 17, 1)]
    steps = generate(model, prompts, max_new_tokens=NEW, prefill_chunk=chunk)
    assert _rows(steps, len(prompts)) == [_reference(reference, p) for p in prompts]


def test_every_end_id_ends_its_row(pair: tuple[Any, TextModel]) -> None:
    reference, model = pair
    prompts = [_prompt(n, seed=n) for n in (20, 5)]
    free = [_reference(reference, prompt) for prompt in prompts]
    ends = [free[0][2], free[1][5]]
    expected = [_reference(reference, prompt, eos_token_id=ends) for prompt in prompts]
    steps = list(generate(model, prompts, max_new_tokens=NEW, end_ids=ends))
    assert _rows(iter(steps), 2) == expected
    assert all(row[-1] in ends for row in expected)
    assert len(steps) == max(map(len, expected))


def test_sampling_is_repeatable_and_follows_the_seed(model: TextModel) -> None:
    prompt = _prompt(9)

    def run(seed: int) -> list[list[int]]:
        sampling = Sampling(1.5, top_k=50, top_p=0.95, seed=seed)
        return _rows(generate(model, [prompt], sampling=sampling, max_new_tokens=NEW), 1)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_session_continues_from_its_cache(model: TextModel) -> None:
    session = Session(model, 256)
    first = _prompt(3 * WINDOW)
    (answer,) = _rows(session.generate([first], max_new_tokens=6), 1)
    assert session.cached == [first + answer[:-1]]  # the last token was never fed

    second = first + answer + _prompt(5, seed=7)
    (continued,) = _rows(session.generate([second], max_new_tokens=6), 1)
    assert session.figures.prefill_tokens == len(first) + 6
    assert session.figures.decode_tokens == 10
    assert [continued] == _rows(generate(model, [second], max_new_tokens=6), 1)


def test_session_starts_over_for_another_prompt(model: TextModel) -> None:
    session = Session(model, 256)
    first, other = _prompt(20), _prompt(20, seed=5)
    list(session.generate([first], max_new_tokens=4))
    for prompt in (other, other, first[:7]):  # different, equal, and shorter than what is cached
        before = session.figures.prefill_tokens
        (rows,) = _rows(session.generate([prompt], max_new_tokens=4), 1)
        assert session.figures.prefill_tokens - before == len(prompt)
        assert rows == _fresh(prompt)
    session.close()
    assert model.cache_size is None


def _fresh(prompt: list[int]) -> list[int]:
    return _rows(generate(_pair("dense")[1], [prompt], max_new_tokens=4), 1)[0]


def test_session_after_an_abandoned_answer(model: TextModel) -> None:
    session = Session(model, 256)
    prompt = _prompt(11)
    answer = session.generate([prompt], max_new_tokens=50)
    given = [next(answer)[0] for _ in range(3)]
    assert session.cached == [[*prompt, *given[:2]]]
    (rows,) = _rows(session.generate([[*prompt, *given, 9]], max_new_tokens=4), 1)
    assert rows == _fresh([*prompt, *given, 9])


def test_session_after_an_interrupt_trusts_nothing(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(model, 256)
    prompt = _prompt(11)
    answer = session.generate([prompt], max_new_tokens=50)
    next(answer)

    def interrupted(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
    assert session.cached == []
    assert _rows(session.generate([prompt], max_new_tokens=4), 1) == [_fresh(prompt)]


def test_generate_frees_the_cache_even_when_abandoned(model: TextModel) -> None:
    steps = generate(model, [_prompt(4)], max_new_tokens=9)
    next(steps)
    assert model.cache_size == (1, 13)
    steps.close()  # type: ignore[attr-defined]
    assert model.cache_size is None


def test_figures_count_without_padding(model: TextModel) -> None:
    figures = Figures()
    list(generate(model, [_prompt(4), _prompt(30)], max_new_tokens=5, figures=figures))
    assert (figures.prefill_tokens, figures.decode_tokens) == (34, 8)
    assert figures.prefill_rate == 34 / figures.prefill_seconds > 0
    assert figures.decode_rate == 8 / figures.decode_seconds > 0
    assert Figures().prefill_rate == Figures().decode_rate == 0


def test_peak_memory_is_in_bytes() -> None:
    held = peak_memory(torch.device("cpu"))
    block = torch.ones(1 << 26, dtype=torch.uint8)
    grown = peak_memory(torch.device("cpu"))
    assert 50 << 20 < held <= grown < 1 << 40
    assert len(block) == 1 << 26


def test_the_context_bounds_prompt_and_answer(model: TextModel) -> None:
    limit = model.config.max_position_embeddings
    with pytest.raises(G4Error, match="has 1024 tokens and there is room for 1023"):
        next(generate(model, [_prompt(limit)]))
    assert len(list(generate(model, [_prompt(limit - 2)], max_new_tokens=50))) == 2
    with pytest.raises(G4Error, match="has 16 tokens and there is room for 15"):
        Session(model, 16).generate([_prompt(16)])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[5], []], {}, "prompt is empty"),
        ([[5, VOCAB]], {}, f"token id {VOCAB}, but the model's vocabulary has {VOCAB}"),
        ([[-1]], {}, "token id -1"),
        ([[5]], {"max_new_tokens": 0}, "max-new-tokens is 0"),
        ([[5]], {"prefill_chunk": 0}, "prefill-chunk is 0"),
    ],
)
def test_what_cannot_be_generated(
    model: TextModel, prompts: list[list[int]], options: dict[str, int], message: str
) -> None:
    with pytest.raises(G4Error, match=message):
        next(generate(model, prompts, **options))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 prompts for a batch of 1"):
        Session(model, 9).generate([[5], [6]])


class _Fake:
    """The methods generation may use, and nothing else; the next token is the last plus one."""

    device = torch.device("cpu")

    def __init__(self, bad_at: int = 1000) -> None:
        self.config = config_of("dense")
        self.calls: list[tuple[int, int]] = []
        self.bad_at = bad_at

    def hidden(
        self, input_ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor:
        assert start is not None
        self.calls.append((int(start), input_ids.shape[1]))
        return input_ids[..., None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        logits = nn.functional.one_hot(hidden[..., 0].long() + 1, VOCAB).float()
        return logits.masked_fill(hidden >= self.bad_at, math.nan)

    def allocate_cache(self, batch: int, length: int) -> None:
        self.cache = (batch, length)

    def reset_cache(self) -> None: ...

    def drop_cache(self) -> None: ...


def test_positions_and_chunks_given_to_the_model() -> None:
    fake = _Fake()
    assert _rows(generate(fake, [[10] * 7], max_new_tokens=3, prefill_chunk=3), 1) == [[11, 12, 13]]
    assert fake.calls == [(0, 3), (3, 3), (6, 1), (7, 1), (8, 1)]
    assert fake.cache == (1, 10)


def test_scores_that_are_not_finite_stop_with_a_reason() -> None:
    steps = generate(_Fake(bad_at=12), [[10]])
    assert [next(steps), next(steps)] == [[11], [12]]
    with pytest.raises(G4Error, match="not finite"):
        next(steps)
