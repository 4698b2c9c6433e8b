"""Figures in words: the cells of the tables that the terminal and the page show."""

from g4tool.evaluate.evaluation import Beside, Evaluation
from g4tool.evaluate.layers import part_of
from g4tool.evaluate.summary import Interval
from g4tool.evaluate.sweep import Row

SWEEP_HEADER = (
    "scheme",
    "size",
    "bits/weight",
    "perplexity",
    "mean KL [95 %] (nats/token)",
    "KL p99",
    "top-1",
)
PART_HEADER = ("part", "KL alone (nats/token)", "output SQNR (dB)", "mean weight error")


def number(value: float) -> str:
    """Four digits: 12.34, 0.001234, 1.234e-05."""
    return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3e}"


def stored_size(nbytes: int) -> str:
    """1.967 MB, 19.38 GB."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.3f} MB"


def around(value: float, interval: Interval | None) -> str:
    """A value with its interval, if there is one."""
    if interval is None:
        return number(value)
    return f"{number(value)} [{number(interval[0])}, {number(interval[1])}]"


def figures(found: Evaluation) -> list[tuple[str, str]]:
    """Name and value of each headline figure; intervals are 95 %."""
    own = found.prediction
    lines = [
        ("model", found.model),
        ("text", f"{', '.join(found.texts)}: {found.tokens:,} tokens in {found.windows} windows"),
        ("perplexity (per token)", around(own.perplexity, own.interval)),
        ("bits per byte", number(own.bits_per_byte)),
    ]
    return lines + (_beside(found, found.beside) if found.beside else [])


def _beside(found: Evaluation, beside: Beside) -> list[tuple[str, str]]:
    faithful, parted = beside.fidelity, beside.divergence
    reference = beside.reference
    worst = max(beside.alone, key=lambda item: item.kl, default=None)
    lines = [
        ("reference", found.reference or ""),
        ("reference's perplexity", around(reference.perplexity, reference.interval)),
        ("log perplexity ratio", around(faithful.log_ratio, faithful.log_ratio_interval)),
        (
            "mean KL(reference || model), nats/token",
            around(faithful.kl_mean, faithful.kl_interval),
        ),
        ("99th-percentile KL, nats/token", number(faithful.kl_p99)),
        ("top-1 agreement", f"{100 * faithful.top1:.2f} %"),
        ("largest log-probability difference", number(faithful.gap)),
        (
            "greedy text agrees for",
            f"{parted.mean:.1f} of {parted.new_tokens} tokens "
            f"({parted.equal} of {len(parted.agreed)} to the end)",
        ),
    ]
    if worst:
        lines.append(("hurts most alone", f"{worst.part}: KL {number(worst.kl)} nats/token"))
    return lines


def parts(beside: Beside) -> list[tuple[str, str, str, str]]:
    """A line for what is outside the layers and for each layer, as `PART_HEADER` says."""
    noise = {f"layer {n.layer}": n.sqnr for n in beside.noise}
    result = []
    for item in beside.alone:
        errors = [w.error for w in beside.weights if item.part == part_of(w.layer) and w.error > 0]
        sqnr = noise.get(item.part)
        result.append(
            (
                item.part,
                number(item.kl),
                "" if item.part not in noise else "exact" if sqnr is None else f"{sqnr:.1f}",
                f"{100 * sum(errors) / len(errors):.2f} %" if errors else "0",
            )
        )
    return result


def sweep_line(row: Row) -> tuple[str, ...]:
    """The cells of a scheme, as `SWEEP_HEADER` says."""
    faithful = row.fidelity
    return (
        row.label,
        stored_size(row.nbytes),
        f"{row.bits_per_weight:.3f}",
        number(row.prediction.perplexity),
        around(faithful.kl_mean, faithful.kl_interval),
        number(faithful.kl_p99),
        f"{100 * faithful.top1:.2f} %",
    )
