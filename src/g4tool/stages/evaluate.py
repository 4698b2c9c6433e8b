"""From folders to an evaluation: loads what is named, and measures what can be measured of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.errors import G4Error, UsageError
from g4tool.progress import Report, silent
from g4tool.stages.loading import load_folder

if TYPE_CHECKING:
    import torch

    from g4tool.backends.executorch.runtime import ExportedModel
    from g4tool.evaluate.corpus import Text, Window
    from g4tool.evaluate.evaluation import Evaluation
    from g4tool.evaluate.scores import Reference
    from g4tool.evaluate.sweep import Row
    from g4tool.generate.tokenizer import Tokenizer
    from g4tool.model.text import TextModel
    from g4tool.quantize.options import QuantizeOptions


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer; `name` as the user wrote it, `folder` where it lies."""

    name: str
    folder: Path
    model: "TextModel | ExportedModel"
    tokenizer: "Tokenizer"
    is_bundle: bool

    @property
    def eager(self) -> "TextModel":
        """The canonical model. Raises UsageError for an exported program."""
        from g4tool.model.text import TextModel

        if not isinstance(self.model, TextModel):
            raise UsageError(f"{self.name} is an exported program: give what it was made from.")
        return self.model


@dataclass(frozen=True)
class Assigned:
    """Measured bits for each matrix: the options, and the row that measuring the result gave."""

    options: "QuantizeOptions"
    row: "Row"


def load_subject(
    name: str, folder: Path, dtype: "torch.dtype", device: str, report: Report = silent
) -> Loaded:
    """The model in a folder that `load_folder` reads, and its tokenizer."""
    from g4tool.formats.bundle import is_bundle
    from g4tool.generate.tokenizer import Tokenizer

    model, files = load_folder(folder, dtype, device, report)
    return Loaded(name, folder, model, Tokenizer(files), is_bundle(folder))


def account_note(subject: Loaded) -> str | None:
    """What a bundle holds in 16 bit that its own recipe does not exempt; None if nothing.

    Another maker's weights have no recipe that is known.
    """
    from g4tool.evaluate.parity import quantized_check
    from g4tool.formats.bundle import lineage_of

    recipe = lineage_of(subject.folder).get("recipe", {})
    exempt = [rule["match"] for rule in recipe.get("rules", []) if rule["scheme"] == "keep"]
    if "keep" in (recipe.get("scheme"), recipe.get("head")):
        exempt.append("." if recipe["scheme"] == "keep" else r"^lm_head\.")
    check = quantized_check(subject.eager, exempt)
    return None if check.passed else f"{subject.name}: {check.detail}"


def measure(
    subject: Loaded,
    reference: Loaded | None,
    texts: "Sequence[Text]",
    tokens: int | None = None,
    sweep: bool = False,
    report: Report = silent,
) -> "Evaluation":
    """Everything that `g4 eval` says.

    A sweep quantizes the reference, or the subject itself where there is none; then the scheme
    int4-hqq with groups of 32 stands in for the candidate. Raises G4Error for two vocabularies,
    UsageError for a sweep without a checkpoint to quantize.
    """
    from g4tool.evaluate import evaluation
    from g4tool.evaluate.scores import observe

    base = reference or subject
    if sweep and base.is_bundle:
        raise UsageError(
            f"--sweep quantizes a checkpoint anew, and {base.name} is a bundle: give --against "
            f"with the checkpoint it was made from."
        )
    if sweep:
        _ = base.eager  # raises before anything is measured
    windows = _windows(subject, reference, texts, tokens)
    if reference is None and not sweep:
        return evaluation.evaluate(subject.model, windows, subject.name, report)
    known = observe(base.model, windows, report)
    if reference is None:
        found = _default_candidate(subject, known, report)
    else:
        found = evaluation.evaluate_beside(
            known, subject.model, subject.name, reference.name, report
        )
    if not sweep:
        return found
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.evaluate.sweep import sweep as run_sweep

    return replace(found, rows=tuple(run_sweep(known, open_checkpoint(base.folder), report=report)))


def find_assignment(
    base: Loaded,
    texts: "Sequence[Text]",
    *,
    bits_per_weight: float | None = None,
    nbytes: int | None = None,
    tokens: int = 8192,
    report: Report = silent,
) -> Assigned:
    """Bits for each matrix of the checkpoint `base`, for a size of the text model.

    See `g4tool.evaluate.assign`; `g4tool.stages.assign.recipe_of` makes a recipe of the options.
    """
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.evaluate.assign import assign
    from g4tool.evaluate.scores import observe
    from g4tool.evaluate.sensitivity import sensitivities
    from g4tool.evaluate.sweep import measure as measure_row

    if base.is_bundle:
        raise UsageError(f"{base.name} is a bundle: bits are chosen for a checkpoint.")
    checkpoint = open_checkpoint(base.folder)
    known = observe(base.model, _windows(base, None, texts, tokens), report)
    matrices = sensitivities(known, checkpoint, report)
    found = assign(checkpoint, matrices, bits_per_weight=bits_per_weight, nbytes=nbytes)
    return Assigned(
        found.options, measure_row(known, checkpoint, found.options, "assigned", report)
    )


def _default_candidate(subject: Loaded, known: "Reference", report: Report) -> "Evaluation":
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.evaluate.evaluation import evaluate_beside
    from g4tool.evaluate.inmemory import quantized
    from g4tool.evaluate.sweep import DEFAULT
    from g4tool.quantize.policy import plan

    checkpoint = open_checkpoint(subject.folder)
    candidate, _ = quantized(subject.eager, checkpoint, plan(checkpoint, DEFAULT), report)
    name = f"{subject.name} as {DEFAULT.scheme} g{DEFAULT.group_size}"
    return evaluate_beside(known, candidate, name, subject.name, report)


def _windows(
    subject: Loaded, reference: Loaded | None, texts: "Sequence[Text]", tokens: int | None
) -> "list[Window]":
    from g4tool.evaluate.corpus import cut, window_length

    length = window_length(subject.model.config)
    if reference is None:
        return cut(texts, subject.tokenizer, length, tokens)
    sizes = [side.model.config.vocab_size for side in (subject, reference)]
    if sizes[0] != sizes[1]:
        raise G4Error(
            f"{subject.name} has a vocabulary of {sizes[0]} entries and {reference.name} of "
            f"{sizes[1]}: only models of one vocabulary can be compared."
        )
    length = min(length, window_length(reference.model.config))
    windows = cut(texts, subject.tokenizer, length, tokens)
    if cut(texts, reference.tokenizer, length, tokens) != windows:
        raise G4Error(
            f"{subject.name} and {reference.name} have different tokenizers: only models of one "
            f"vocabulary can be compared."
        )
    return windows
