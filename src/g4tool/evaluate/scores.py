"""What a model makes of each token: its loss, and how far its prediction is from a reference's.

Scores over the vocabulary are made and forgotten for a block of positions at a time: at 262,144
entries a window's would be gigabytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from g4tool.errors import G4Error, UsageError
from g4tool.evaluate.corpus import Window
from g4tool.generate.loop import LanguageModel
from g4tool.model.text import TextModel
from g4tool.progress import Progress, Report, silent

# Scores held at once, in elements; a comparison has a few temporaries of that size in fp32.
_BLOCK = 2**24


@dataclass(frozen=True)
class Reference:
    """A model's final states [S, d] of every window, and its losses fp32 [S] in nats a token.

    Its scores are made again from the states as they are needed.
    """

    model: LanguageModel
    windows: tuple[Window, ...]
    states: tuple[Tensor, ...]
    losses: tuple[Tensor, ...]

    @property
    def eager(self) -> TextModel:
        """The model, whose layers can be looked at. Raises UsageError for an exported program."""
        if not isinstance(self.model, TextModel):
            raise UsageError("an exported program shows no layers: give what it was made from.")
        return self.model


@dataclass(frozen=True)
class Difference:
    """A candidate beside a reference, fp32 [S] or bool [S] a window.

    `losses` in nats a token; `kl` is KL(reference || candidate) in nats a position; `agree` says
    whether both have the same most likely token, `gap` is the largest difference of a
    log-probability over the vocabulary.
    """

    losses: tuple[Tensor, ...]
    kl: tuple[Tensor, ...]
    agree: tuple[Tensor, ...]
    gap: tuple[Tensor, ...]


@torch.inference_mode()
def observe(
    model: LanguageModel, windows: Sequence[Window], report: Report = silent, job: str = "reference"
) -> Reference:
    """Run the model over all windows. Raises G4Error when its scores are not finite."""
    states, losses = [], []
    for done, window in enumerate(windows, start=1):
        hidden = _states(model, window)
        states.append(hidden)
        losses.append(
            torch.cat(
                [
                    _loss(_log_probs(model, part), ids)
                    for part, ids in _blocks(model, hidden, window)
                ]
            )
        )
        report(Progress(job, done, len(windows), "windows"))
    return Reference(model, tuple(windows), tuple(states), tuple(losses))


@torch.inference_mode()
def compare(
    reference: Reference, candidate: LanguageModel, report: Report = silent, job: str = "candidate"
) -> Difference:
    """Run the candidate over the reference's windows and compare position by position.

    Both log-softmaxes are in fp32. Raises G4Error when the candidate's scores are not finite.
    """
    losses: list[Tensor] = []
    kl: list[Tensor] = []
    agree: list[Tensor] = []
    gap: list[Tensor] = []
    for done, (window, known) in enumerate(
        zip(reference.windows, reference.states, strict=True), start=1
    ):
        hidden = _states(candidate, window)
        parts = [
            _differ(_log_probs(reference.model, a), _log_probs(candidate, b), ids)
            for (a, ids), (b, _) in zip(
                _blocks(reference.model, known, window),
                _blocks(candidate, hidden, window),
                strict=True,
            )
        ]
        for whole, pieces in zip((losses, kl, agree, gap), zip(*parts, strict=True), strict=True):
            whole.append(torch.cat(pieces))
        report(Progress(job, done, len(reference.windows), "windows"))
    return Difference(tuple(losses), tuple(kl), tuple(agree), tuple(gap))


def _states(model: LanguageModel, window: Window) -> Tensor:
    ids = torch.tensor([window.ids[:-1]], device=model.device)
    return model.hidden(ids)[0]


def _blocks(
    model: LanguageModel, hidden: Tensor, window: Window
) -> Iterator[tuple[Tensor, Tensor]]:
    """States and the ids that follow them, a block of positions at a time."""
    step = max(1, _BLOCK // model.config.vocab_size)
    following = torch.tensor(window.ids[1:], device=hidden.device)
    return zip(torch.split(hidden, step), torch.split(following, step), strict=True)


def _log_probs(model: LanguageModel, hidden: Tensor) -> Tensor:
    result = F.log_softmax(model.logits(hidden).float(), dim=-1)
    if not result[:, 0].isfinite().all():
        raise G4Error(
            "the model's scores are not finite (NaN or infinity): its weights are damaged, or "
            "float16 overflowed; use bfloat16 or float32."
        )
    return result


def _loss(log_probs: Tensor, following: Tensor) -> Tensor:
    return -log_probs.gather(1, following[:, None])[:, 0].cpu()


def _differ(a: Tensor, b: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    same = a.argmax(-1) == b.argmax(-1)
    loss = _loss(b, following)
    apart = b.sub_(a).neg_()
    gap = torch.maximum(apart.amax(-1), -apart.amin(-1))
    kl = apart.mul_(a.exp_()).sum(-1)
    return loss, kl.cpu(), same.cpu(), gap.cpu()
