"""How long two models say the same: greedy continuations of prompts from the text, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from g4tool.evaluate.corpus import Window, spread
from g4tool.generate.loop import LanguageModel, generate
from g4tool.model.text import TextModel

PROMPTS = 8
PROMPT_TOKENS = 64
NEW_TOKENS = 64


@dataclass(frozen=True)
class Divergence:
    """For each prompt the number of new tokens that agree before the first that does not.

    `new_tokens` where all do.
    """

    new_tokens: int
    agreed: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Mean number of agreeing tokens."""
        return mean(self.agreed)

    @property
    def equal(self) -> int:
        """How many continuations are the same to the end."""
        return sum(count == self.new_tokens for count in self.agreed)


def divergence(
    reference: LanguageModel,
    candidate: LanguageModel,
    windows: Sequence[Window],
    new_tokens: int = NEW_TOKENS,
) -> Divergence:
    """Continue the beginnings of some windows with both models; end tokens do not stop them."""
    room = reference.config.max_position_embeddings - PROMPT_TOKENS
    new_tokens = min(new_tokens, room)
    prompts = [window.ids[:PROMPT_TOKENS] for window in spread(windows, PROMPTS)]
    new_tokens = min(new_tokens, candidate.config.max_position_embeddings - PROMPT_TOKENS)
    first = _continue(reference, prompts, new_tokens)
    second = _continue(candidate, prompts, new_tokens)
    agreed = tuple(
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(first, second, strict=True)
    )
    return Divergence(new_tokens, agreed)


def _continue(
    model: LanguageModel, prompts: Sequence[Sequence[int]], count: int
) -> list[tuple[int | None, ...]]:
    if not isinstance(model, TextModel):
        # An exported program takes one prompt at a time.
        return [
            tuple(step[0] for step in generate(model, [prompt], max_new_tokens=count))
            for prompt in prompts
        ]
    steps = generate(model, prompts, end_ids=(), max_new_tokens=count)
    return list(zip(*steps, strict=True))
