"""An evaluation as one HTML page: no script, no network, light and dark, printable."""

from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from g4tool import __version__
from g4tool.evaluate import words
from g4tool.evaluate.axes import linear, logarithmic
from g4tool.evaluate.evaluation import Beside, Evaluation
from g4tool.evaluate.svg import Point, bars, curves, heat_map
from g4tool.evaluate.sweep import Row
from g4tool.files import write_text

_OUTSIDE = "outside"


def write_report(found: Evaluation, path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    write_text(path, page(found))


def page(found: Evaluation) -> str:
    """The page's HTML."""
    template = resources.files("g4tool.evaluate") / "templates" / "report.html.jinja"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    beside = found.beside
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        version=__version__,
        found=found,
        figures=words.figures(found),
        plots={name: Markup(svg) for name, svg in _plots(found).items()},
        part_header=words.PART_HEADER,
        parts=words.parts(beside) if beside else [],
        sweep_header=words.SWEEP_HEADER,
        sweep=[words.sweep_line(row) for row in found.rows],
    )


def _plots(found: Evaluation) -> dict[str, str]:
    plots = {"sizes": _sizes(found.rows)} if len(found.rows) > 1 else {}
    if found.beside and found.beside.alone:
        plots["weights"] = _weights(found.beside)
        plots["noise"] = _noise(found.beside)
        plots["alone"] = _alone(found.beside)
    if found.beside:
        plots["positions"] = _positions(found.beside)
    return plots


def _sizes(rows: Sequence[Row]) -> str:
    """Size against KL; group sizes of one scheme are joined by a line."""
    series: dict[str, list[Point]] = defaultdict(list)
    measured = [row for row in rows if row.fidelity.kl_mean > 0]
    if not measured:
        return ""
    unit = 1e9 if max(row.nbytes for row in measured) >= 1e9 else 1e6
    for row in sorted(measured, key=lambda row: row.nbytes):
        told = (
            f"{row.label}: {words.stored_size(row.nbytes)}, {row.bits_per_weight:.2f} bits/weight, "
            f"KL {words.around(row.fidelity.kl_mean, row.fidelity.kl_interval)}"
        )
        series[row.scheme].append(Point(row.nbytes / unit, row.fidelity.kl_mean, told))
    order = list(dict.fromkeys(row.scheme for row in measured))
    sizes = [row.nbytes / unit for row in measured]
    kls = [row.fidelity.kl_mean for row in measured]
    x = linear(min(sizes), max(sizes), f"size of the text model ({'GB' if unit == 1e9 else 'MB'})")
    y = logarithmic(min(kls), max(kls), "mean KL (nats/token, log scale)")
    return curves({name: series[name] for name in order}, x, y, "Size against mean KL")


def _weights(beside: Beside) -> str:
    largest = max((w.error for w in beside.weights), default=0.0) or 1.0
    values = {}
    rows, columns = [], []
    for weight in beside.weights:
        column = _OUTSIDE if weight.layer is None else str(weight.layer)
        told = f"{weight.name}: {weight.scheme}, relative error {100 * weight.error:.3f} %"
        values[weight.kind, column] = (weight.error / largest, f"{100 * weight.error:.1f}", told)
        rows.append(weight.kind)
        columns.append(column)
    return heat_map(
        list(dict.fromkeys(rows)),
        list(dict.fromkeys(columns)),
        values,
        "Relative weight error by matrix and layer",
        f"layer (relative error in %; full colour is {100 * largest:.1f} %)",
    )


def _noise(beside: Beside) -> str:
    known = [noise.sqnr for noise in beside.noise if noise.sqnr is not None]
    y = linear(min([0.0, *known]), max([1.0, *known]), "output SQNR (dB)")
    values = [
        (
            str(noise.layer),
            y.high if noise.sqnr is None else noise.sqnr,
            f"layer {noise.layer}: " + ("exact" if noise.sqnr is None else f"{noise.sqnr:.2f} dB"),
        )
        for noise in beside.noise
    ]
    return bars(values, y, "layer", "Output SQNR by layer")


def _alone(beside: Beside) -> str:
    y = linear(0.0, max(item.kl for item in beside.alone), "mean KL (nats/token)")
    values = [
        (
            item.part.removeprefix("layer ").removesuffix(" the layers"),
            max(item.kl, 0.0),
            f"{item.part} alone: KL {words.number(item.kl)} nats/token",
        )
        for item in beside.alone
    ]
    return bars(values, y, "the only quantized layer", "KL when one layer alone is quantized")


def _positions(beside: Beside) -> str:
    points = [
        Point(start, kl, f"from position {start}: KL {words.number(kl)} nats/token")
        for start, kl in beside.positions
    ]
    x = linear(0, max(point.x for point in points), "position in the window (tokens)")
    y = linear(0, max(point.y for point in points), "mean KL (nats/token)")
    return curves({"KL": points}, x, y, "KL by position in the window")
