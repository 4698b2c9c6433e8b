"""Everything that is measured of one model, or of one beside another."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from g4tool.evaluate.corpus import Window, spread
from g4tool.evaluate.greedy import Divergence, divergence
from g4tool.evaluate.layers import (
    Alone,
    LayerNoise,
    WeightError,
    alone,
    layer_noise,
    weight_errors,
)
from g4tool.evaluate.scores import Reference, compare, observe
from g4tool.evaluate.summary import Fidelity, Prediction, by_position, fidelity, prediction
from g4tool.evaluate.sweep import Row
from g4tool.generate.loop import LanguageModel
from g4tool.model.text import TextModel
from g4tool.progress import Report, silent

# Tokens for what takes a pass for each layer.
LAYER_TOKENS = 4096
# Points of the curve of KL by position.
_POINTS = 64

_OTHER_SHAPE = "Nothing is said by layer: the two models have different shapes."
_PROGRAM = "Nothing is said by layer: an exported program shows no layers."


@dataclass(frozen=True)
class Beside:
    """A candidate beside its reference.

    `positions` are (position in the window, mean KL in nats a token). `weights`, `noise` and
    `alone`, measured over `alone_tokens` tokens, are empty for models of different shapes.
    """

    reference: Prediction
    fidelity: Fidelity
    divergence: Divergence
    positions: tuple[tuple[int, float], ...]
    weights: tuple[WeightError, ...]
    noise: tuple[LayerNoise, ...]
    alone: tuple[Alone, ...]
    alone_tokens: int


@dataclass(frozen=True)
class Evaluation:
    """One run of `g4 eval`. `beside` is None without a reference, `rows` empty without a sweep."""

    model: str
    reference: str | None
    texts: tuple[str, ...]
    tokens: int
    windows: int
    window_length: int
    prediction: Prediction
    beside: Beside | None = None
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


def to_json(found: Evaluation) -> dict[str, Any]:
    """The evaluation as JSON values."""
    result = asdict(found)
    for row, table in zip(found.rows, result["rows"], strict=True):
        table["label"] = row.label
    if found.beside:
        result["beside"]["divergence"]["mean"] = found.beside.divergence.mean
    return result


def evaluate(
    model: LanguageModel, windows: Sequence[Window], name: str, report: Report = silent
) -> Evaluation:
    """A model's perplexity alone."""
    return _evaluation(
        name, None, windows, prediction(windows, observe(model, windows, report).losses)
    )


def evaluate_beside(
    reference: Reference,
    candidate: LanguageModel,
    name: str,
    reference_name: str,
    report: Report = silent,
) -> Evaluation:
    """A candidate beside a reference: all figures."""
    windows = reference.windows
    found = compare(reference, candidate, report)
    length = max(window.scored for window in windows)
    few = select(reference, spread(windows, max(1, LAYER_TOKENS // length)))
    layered = isinstance(reference.model, TextModel) and isinstance(candidate, TextModel)
    other = cast(TextModel, candidate)  # only looked into where it is one
    alike = layered and _same_shape(reference.eager, other)
    beside = Beside(
        reference=prediction(windows, reference.losses),
        fidelity=fidelity(reference, found),
        divergence=divergence(reference.model, candidate, windows),
        positions=tuple(by_position(found.kl, max(1, length // _POINTS))),
        weights=tuple(weight_errors(reference.eager, other)) if alike else (),
        noise=tuple(layer_noise(few, other, report)) if alike else (),
        alone=tuple(alone(few, other, report)) if alike else (),
        alone_tokens=sum(window.scored for window in few.windows),
    )
    own = prediction(windows, found.losses)
    result = _evaluation(name, reference_name, windows, own, beside)
    return result if alike else replace(result, notes=(_OTHER_SHAPE if layered else _PROGRAM,))


def select(reference: Reference, windows: Sequence[Window]) -> Reference:
    """The reference over some of its windows."""
    places = [reference.windows.index(window) for window in windows]
    return Reference(
        reference.model,
        tuple(windows),
        tuple(reference.states[index] for index in places),
        tuple(reference.losses[index] for index in places),
    )


def _same_shape(reference: TextModel, candidate: TextModel) -> bool:
    # A bundle may have a head of its own where its source's is tied.
    return replace(reference.config, tie_word_embeddings=True) == replace(
        candidate.config, tie_word_embeddings=True
    )


def _evaluation(
    name: str,
    reference: str | None,
    windows: Sequence[Window],
    predicted: Prediction,
    beside: Beside | None = None,
) -> Evaluation:
    return Evaluation(
        model=name,
        reference=reference,
        texts=tuple(dict.fromkeys(window.source for window in windows)),
        tokens=sum(window.scored for window in windows),
        windows=len(windows),
        window_length=max(window.scored for window in windows),
        prediction=predicted,
        beside=beside,
    )
