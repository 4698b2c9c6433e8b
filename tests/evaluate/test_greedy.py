"""Where greedy continuations part."""

from torch import Tensor

from g4tool.evaluate.greedy import PROMPT_TOKENS, divergence
from g4tool.evaluate.leaves import twin

from .conftest import GetTiny

NEW = 12


def test_a_model_agrees_with_itself(tiny: GetTiny) -> None:
    found = tiny("tiny-e2b")
    same = divergence(found.model, twin(found.model), found.windows, NEW)
    assert same.agreed == (NEW,) * len(found.windows)
    assert same.equal == len(found.windows)
    assert same.mean == NEW


def test_the_first_other_token_is_found(tiny: GetTiny) -> None:
    found = tiny("tiny-31b")
    other = twin(found.model)
    right = other.hidden
    calls = 0

    def hidden(ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        states = right(ids, start, pad)
        # The prompt is the first call; the sixth gives the new token of index 5.
        return -states if calls == 6 else states

    other.hidden = hidden  # type: ignore[method-assign]
    parted = divergence(found.model, other, found.windows, NEW)
    assert parted.agreed == (5,) * len(found.windows)
    assert parted.equal == 0


def test_prompts_cross_the_sliding_window(tiny: GetTiny) -> None:
    assert tiny("tiny-31b").model.config.sliding_window < PROMPT_TOKENS
