"""Prompt ids in, new ids out: chunked prefill, then one token a step over the model's cache.

Knows `TextModel` by its methods only, so a quantized or compiled twin runs just as well. Per token
there is one transfer to the host, of the chosen ids; positions and sampling stay on the device.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from g4tool.errors import G4Error, UsageError
from g4tool.generate.figures import Figures, clock
from g4tool.generate.sampler import GREEDY, NOT_FINITE, Sampling, choose, make_generator
from g4tool.kernels.register import runs_triton
from g4tool.model.config import TextConfig
from g4tool.model.text import TextModel

if TYPE_CHECKING:
    from g4tool.generate.cuda_graph import Recorded

PREFILL_CHUNK = 1024
CUDA_PREFILL_CHUNK = 3072
"""On a CUDA device, where each chunk dequantizes all weights once."""

_PAD = 0

Ids = Sequence[int]
Step = list[int | None]
"""One new id a row; None for rows that ended before."""


class LanguageModel(Protocol):
    """What generation needs of a model: `TextModel`'s methods; see there."""

    config: TextConfig

    @property
    def device(self) -> torch.device: ...

    def hidden(
        self, input_ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def allocate_cache(self, batch: int, length: int) -> None: ...

    def reset_cache(self) -> None: ...

    def drop_cache(self) -> None: ...


@runtime_checkable
class Samples(Protocol):
    """A model that can choose the next token itself; see `ExportedModel.next_ids`."""

    samples: bool

    def next_ids(
        self, input_ids: Tensor, start: Tensor, sampling: Sampling, uniform: float
    ) -> Tensor: ...


class Session:
    """A model with a cache of `length` tokens a row for `batch` rows, used turn after turn.

    A prompt that continues what the cache holds costs only its new tokens (batch 1); any other
    starts over. `cached` is what the cache holds: ids of each row, without padding. A model's cache
    serves one session, and one of its iterators, at a time; `close` frees it. `figures` adds up
    all turns. A single row of a model that `cuda_graph` takes is decoded by it; recording the graph
    is in no figure.
    """

    def __init__(self, model: LanguageModel, length: int, batch: int = 1) -> None:
        self.model = model
        self.length = min(length, model.config.max_position_embeddings)
        self.batch = batch
        self.device = model.device
        self.figures = Figures()
        self.cached: list[list[int]] = []
        self._steps: dict[Sampling, Recorded] = {}
        model.allocate_cache(batch, self.length)

    def close(self) -> None:
        """Frees the model's cache; the session cannot be used afterwards."""
        self.cached = []
        self._steps.clear()
        self.model.drop_cache()

    def generate(
        self,
        prompts: Sequence[Ids],
        *,
        sampling: Sampling = GREEDY,
        end_ids: Collection[int] = (),
        max_new_tokens: int = 256,
        prefill_chunk: int | None = None,
    ) -> Iterator[Step]:
        """One step per new token, until every row has given an end id or the room is used up.

        An end id is given like any other token, then the row is silent. `max_new_tokens` is cut to
        what the cache holds beyond the longest prompt. `prefill_chunk` tokens of the prompt run at
        once [1024, on CUDA 3072]. Raises G4Error (before the first step) for a prompt that is
        empty, too long, or has ids outside the vocabulary; when the logits turn
        NaN or infinite; UsageError for sizes below 1.
        """
        if prefill_chunk is None:
            prefill_chunk = CUDA_PREFILL_CHUNK if self.device.type == "cuda" else PREFILL_CHUNK
        self._check(prompts, max_new_tokens, prefill_chunk)
        return self._run(prompts, sampling, frozenset(end_ids), max_new_tokens, prefill_chunk)

    def _run(
        self,
        prompts: Sequence[Ids],
        sampling: Sampling,
        end_ids: frozenset[int],
        max_new_tokens: int,
        chunk: int,
    ) -> Iterator[Step]:
        rows = [list(prompt) for prompt in prompts]
        known = self._reusable(rows)
        width = max(map(len, rows))
        room = min(max_new_tokens, self.length - width)
        generator = make_generator(sampling, self.device)
        missing = [width - len(row) for row in rows]
        pad = torch.tensor(missing, device=self.device) if any(missing) else None
        padded = [[_PAD] * count + row for count, row in zip(missing, rows, strict=True)]
        ids = torch.tensor(padded, device=self.device)[:, known:]

        # While the model writes to its cache nothing in it counts; an interrupt leaves it so.
        self.cached = []
        began = clock(self.device)
        tokens = _prefill(self.model, ids, known, pad, chunk, sampling, generator)
        step = _to_host(tokens)
        self.figures.prefill_seconds += clock(self.device) - began
        self.figures.prefill_tokens += sum(map(len, rows)) - known
        self.cached = rows

        recorded = self._recorded(sampling, width) if room > 1 else None
        if recorded is not None:
            recorded.begin(tokens, width, sampling)
            recorded.launch()
        position = torch.tensor(width, device=self.device)
        done = [False] * len(rows)
        for left in range(room - 1, -1, -1):
            yield [None if end else token for end, token in zip(done, step, strict=True)]
            done = [end or token in end_ids for end, token in zip(done, step, strict=True)]
            if all(done) or not left:
                return
            self.cached = []
            for row, token in zip(rows, step, strict=True):
                row.append(token)
            if recorded is not None:
                # The device may be a step ahead: nothing here waits for more than the id.
                began = time.perf_counter()
                step = _checked(recorded.take(more=left > 1))
                self.figures.decode_seconds += time.perf_counter() - began
            else:
                began = clock(self.device)
                tokens = _next(self.model, tokens[:, None], position, pad, sampling, generator)
                step = _to_host(tokens)
                self.figures.decode_seconds += clock(self.device) - began
            self.figures.decode_tokens += done.count(False)
            self.cached = rows
            position = position + 1

    def _recorded(self, sampling: Sampling, start: int) -> "Recorded | None":
        """The step as a CUDA graph, recorded once a way of sampling; None where it cannot be."""
        if self.batch > 1 or not runs_triton(self.device):
            return None
        from g4tool.generate import cuda_graph

        if not cuda_graph.takes(self.model):
            return None
        key = replace(sampling, seed=None)
        if key not in self._steps:
            self._steps[key] = cuda_graph.record(cast(TextModel, self.model), key, start)
        return self._steps[key]

    def _reusable(self, rows: list[list[int]]) -> int:
        if self.batch == 1 and self.cached:
            (held,) = self.cached
            if len(held) < len(rows[0]) and rows[0][: len(held)] == held:
                return len(held)
        self.model.reset_cache()
        return 0

    def _check(self, prompts: Sequence[Ids], max_new_tokens: int, prefill_chunk: int) -> None:
        for name, value in (("max-new-tokens", max_new_tokens), ("prefill-chunk", prefill_chunk)):
            if value < 1:
                raise UsageError(f"{name} is {value}: give at least 1.")
        if len(prompts) != self.batch:
            raise UsageError(f"{len(prompts)} prompts for a batch of {self.batch}: give as many.")
        for prompt in prompts:
            check_prompt(prompt, self.length - 1, self.model.config.vocab_size)


def generate(
    model: LanguageModel,
    prompts: Sequence[Ids],
    *,
    sampling: Sampling = GREEDY,
    end_ids: Collection[int] = (),
    max_new_tokens: int = 256,
    prefill_chunk: int | None = None,
    figures: Figures | None = None,
) -> Iterator[Step]:
    """`Session.generate` for prompts of any lengths, with a cache that lasts as long as it runs.

    Shorter prompts are padded on the left. Errors come with the first step. `figures` is added to.
    """
    limit = model.config.max_position_embeddings
    if not prompts:
        raise UsageError("there is no prompt: give at least one.")
    for prompt in prompts:
        check_prompt(prompt, limit - 1, model.config.vocab_size)
    length = max(map(len, prompts)) + max(max_new_tokens, 1)
    session = Session(model, length, batch=len(prompts))
    session.figures = figures or session.figures
    try:
        yield from session.generate(
            prompts,
            sampling=sampling,
            end_ids=end_ids,
            max_new_tokens=max_new_tokens,
            prefill_chunk=prefill_chunk,
        )
    finally:
        session.close()


def check_prompt(prompt: Ids, most: int, vocab: int) -> None:
    """Raises G4Error for no ids, more than `most`, or an id that is none of `vocab`'s."""
    if not prompt:
        raise G4Error("the prompt is empty: give at least one token, if only BOS.")
    if len(prompt) > most:
        raise G4Error(
            f"the prompt has {len(prompt)} tokens and there is room for {most} and an answer:"
            " shorten it."
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        wrong = next(i for i in prompt if not 0 <= i < vocab)
        raise G4Error(
            f"the prompt holds token id {wrong}, but the model's vocabulary has {vocab} entries:"
            " the tokenizer belongs to another model."
        )


def _prefill(
    model: LanguageModel,
    ids: Tensor,
    start: int,
    pad: Tensor | None,
    chunk: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Tensor:
    """The first new token of each row: int64 [B]."""
    width = ids.shape[1]
    last = (width - 1) // chunk * chunk
    with torch.no_grad():
        for begin in range(0, last, chunk):
            position = torch.tensor(start + begin, device=ids.device)
            model.hidden(ids[:, begin : begin + chunk], position, pad)
    position = torch.tensor(start + last, device=ids.device)
    return _next(model, ids[:, last:], position, pad, sampling, generator)


@torch.no_grad()
def _next(
    model: LanguageModel,
    ids: Tensor,
    start: Tensor,
    pad: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Tensor:
    """The token after ids [B, S] at position `start`: int64 [B]."""
    if isinstance(model, Samples) and model.samples:
        # The random source is on the device of the logits; the program's own takes a number.
        uniform = (
            0.0
            if generator is None
            else torch.rand((), generator=generator, device=generator.device).item()
        )
        return model.next_ids(ids, start, sampling, uniform)
    hidden = model.hidden(ids, start, pad)
    return choose(model.logits(hidden[:, -1:])[:, 0], sampling, generator)


def _to_host(tokens: Tensor) -> list[int]:
    return _checked(tokens.tolist())


def _checked(ids: list[int]) -> list[int]:
    if NOT_FINITE in ids:
        raise G4Error(
            "the model's scores are not finite (NaN or infinity): its weights are damaged, or"
            " float16 overflowed; use bfloat16 or float32."
        )
    return ids
