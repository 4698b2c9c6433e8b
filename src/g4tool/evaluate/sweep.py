"""Schemes and group sizes side by side: what each takes and what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.scores import Reference, compare
from g4tool.evaluate.summary import Fidelity, Prediction, fidelity, prediction
from g4tool.progress import Report, silent
from g4tool.quantize.account import TensorAccount, bits_per_weight
from g4tool.quantize.options import QuantizeOptions, Rule, Scheme, Solver
from g4tool.quantize.policy import plan

# Embeddings cannot be 4 bit, and in 16 bit they would hide what the schemes differ in.
RULES = (Rule(r"^embed_tokens(_per_layer)?\.weight$", "int8"),)

DEFAULT = QuantizeOptions(scheme="int4-hqq", group_size=32, rules=RULES)


@dataclass(frozen=True)
class Row:
    """One scheme: size of the text model in bytes and bits a weight, and what was measured."""

    scheme: str
    group_size: int | None
    nbytes: int
    bits_per_weight: float
    prediction: Prediction
    fidelity: Fidelity

    @property
    def label(self) -> str:
        """`int4-hqq g32`."""
        return self.scheme + (f" g{self.group_size}" if self.group_size else "")


def schemes() -> list[tuple[str, QuantizeOptions]]:
    """What is tried, by name; the hqq package's own solver where it is installed."""
    found = [("int8", _options("int8", 32))]
    found += [("int4-hqq", _options("int4-hqq", group)) for group in (32, 64, 128)]
    names: tuple[Scheme, ...] = ("int4-rtn", "int4-sym")
    found += [(name, _options(name, group)) for name in names for group in (32, 64, 128)]
    if find_spec("hqq"):
        found += [
            ("reference hqq", _options("int4-hqq", group, "reference")) for group in (32, 64, 128)
        ]
    return found


def sweep(
    reference: Reference,
    checkpoint: Checkpoint,
    tried: Sequence[tuple[str, QuantizeOptions]] | None = None,
    report: Report = silent,
) -> list[Row]:
    """A row for the reference itself, then one for each scheme, all over the same windows."""
    plain = plan(checkpoint, QuantizeOptions(scheme="keep"))
    kept = quantized(reference.eager, checkpoint, plain)[1]
    dtype = checkpoint.info("norm.weight").dtype
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    scheme = names[str(dtype).removeprefix("torch.")]
    rows = [_row(scheme, None, kept, prediction(reference.windows, reference.losses), _SAME)]
    for name, options in schemes() if tried is None else tried:
        label = f"{name} g{options.group_size}" if options.scheme != "int8" else name
        rows.append(measure(reference, checkpoint, options, name, report, label))
    return rows


def measure(
    reference: Reference,
    checkpoint: Checkpoint,
    options: QuantizeOptions,
    name: str,
    report: Report = silent,
    job: str = "candidate",
) -> Row:
    """Quantize as `options` say and compare with the reference."""
    model, accounts = quantized(reference.eager, checkpoint, plan(checkpoint, options))
    found = compare(reference, model, report, job)
    return _row(
        name,
        options.group_size if options.scheme.startswith("int4") else None,
        accounts,
        prediction(reference.windows, found.losses),
        fidelity(reference, found),
    )


_SAME = Fidelity(0.0, None, 0.0, 1.0, 0.0, 0.0, None)


def _row(
    name: str,
    group: int | None,
    accounts: list[TensorAccount],
    predicted: Prediction,
    faithful: Fidelity,
) -> Row:
    nbytes = sum(account.nbytes for account in accounts)
    return Row(name, group, nbytes, bits_per_weight(accounts), predicted, faithful)


def _options(scheme: Scheme, group: int, solver: Solver | None = None) -> QuantizeOptions:
    return QuantizeOptions(scheme=scheme, group_size=group, solver=solver, rules=RULES)
