"""How much each matrix's error costs: the KL of the model in which it alone is quantized.

For small errors the KL grows with the square of a weight's error, so one forward pass a matrix is
enough: it is measured where the error is largest and stands out of the noise, and the KL of every
other choice follows from that choice's error, which needs no pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.evaluate.inmemory import solve, stored_bytes
from g4tool.evaluate.leaves import swapped, twin
from g4tool.evaluate.scores import Reference, compare
from g4tool.evaluate.summary import fidelity
from g4tool.model.text import TextModel
from g4tool.progress import Progress, Report, silent
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.policy import TensorPlan, plan
from g4tool.quantize.solvers import workers

# From the smallest to the largest.
CHOICES = (
    Rule("", "int4-hqq", 128),
    Rule("", "int4-hqq", 64),
    Rule("", "int4-hqq", 32),
    Rule("", "int8"),
    Rule("", "keep"),
)


@dataclass(frozen=True)
class Choice:
    """One way to store a matrix: `plan` with its size in bytes and the KL expected of it alone."""

    plan: TensorPlan
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Matrix:
    """A matrix and its choices, by size."""

    name: str
    choices: tuple[Choice, ...]


def sensitivities(
    reference: Reference, checkpoint: Checkpoint, report: Report = silent
) -> list[Matrix]:
    """The choices of every matrix that may be quantized, in model order.

    Choices that a matrix cannot have (embeddings: 4 bit; a group that does not divide its rows)
    are left out.
    """
    possible = _possible(checkpoint)
    model = twin(reference.eager)
    result = []
    for done, (name, plans) in enumerate(possible.items(), start=1):
        result.append(_measure(reference, checkpoint, name, plans, model))
        report(Progress("sensitivity", done, len(possible), "matrices", name))
    return result


def _measure(
    reference: Reference,
    checkpoint: Checkpoint,
    name: str,
    plans: Sequence[TensorPlan],
    model: TextModel,
) -> Matrix:
    path = name.removesuffix(".weight")
    module = model.get_submodule(path)
    probe, largest = None, 0.0
    errors = []
    device = reference.states[0].device
    with workers(device) as crew:
        for item in plans:
            error = 0.0
            if item.scheme != "keep":
                made, error = solve(checkpoint, item, crew, module)
                if error > largest:
                    probe, largest = made, error
            errors.append(error)
    kl = 0.0
    if probe is not None:
        with swapped(model, {path: probe.to(device)}):
            # Rounding can leave it a little below zero.
            kl = max(0.0, fidelity(reference, compare(reference, model)).kl_mean)
    choices = [
        Choice(item, stored_bytes(item), kl * (error / largest) ** 2 if largest else 0.0)
        for item, error in zip(plans, errors, strict=True)
    ]
    return Matrix(name, tuple(sorted(choices, key=lambda choice: choice.nbytes)))


def _possible(checkpoint: Checkpoint) -> dict[str, list[TensorPlan]]:
    """Name -> its plans, those that only repeat another left out."""
    result: dict[str, list[TensorPlan]] = {}
    for choice in CHOICES:
        embedding = "int8" if choice.scheme.startswith("int4") else choice.scheme
        rules = (Rule(r"^embed_tokens(_per_layer)?\.weight$", embedding),)
        group = choice.group_size or 32
        options = QuantizeOptions(scheme=choice.scheme, group_size=group, rules=rules)
        for item in plan(checkpoint, options):
            if item.name not in checkpoint.names:
                continue
            seen = result.setdefault(item.name, [])
            if all((o.scheme, o.group_size) != (item.scheme, item.group_size) for o in seen):
                seen.append(item)
    return {name: plans for name, plans in result.items() if len(plans) > 1}
