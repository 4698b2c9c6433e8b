"""Plots as inline SVG. Colours are CSS variables, so that one picture serves light and dark.

Every mark can be reached with the keyboard; hovering or focusing it shows its values in the line
above the plot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from g4tool.evaluate.axes import Axis, show

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 28, 30, 50
_INNER_W, _INNER_H = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


@dataclass(frozen=True)
class Point:
    """A mark at x, y; `told` is what is said of it."""

    x: float
    y: float
    told: str


def curves(series: Mapping[str, Sequence[Point]], x: Axis, y: Axis, title: str) -> str:
    """One line with marks for each series, and a legend where there are several."""
    parts = [_frame(x, y)]
    for number, points in enumerate(series.values()):
        places = [(_across(x, p.x), _up(y, p.y)) for p in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        colour = f"var(--s{number % 6})"
        parts.append(f'<polyline class="line" style="stroke:{colour}" points="{path}"/>')
        # Many points are a curve; their marks would hide it.
        size = 4.5 if len(points) <= 24 else 2.5
        for point, (a, b) in zip(points, places, strict=True):
            shape = f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{size}" style="fill:{colour}"/>'
            target = f'<circle class="target" cx="{a:.1f}" cy="{b:.1f}" r="9"/>'
            parts.append(_mark(target + shape, point.told))
    return _svg("".join(parts), title, HEIGHT) + (_legend(list(series)) if len(series) > 1 else "")


def bars(values: Sequence[tuple[str, float, str]], y: Axis, x_label: str, title: str) -> str:
    """A bar for each (label, value, what is said of it)."""
    step = _INNER_W / len(values)
    thin = max(1, round(34 / step + 0.5)) if step < 34 else 1
    parts = [_frame(None, y, x_label)]
    for index, (label, value, told) in enumerate(values):
        left = _LEFT + index * step
        top = _up(y, value)
        height = max(HEIGHT - _BOTTOM - top, 0.5)
        target = (
            f'<rect class="target" x="{left:.1f}" y="{_TOP}" width="{step:.1f}" '
            f'height="{_INNER_H}"/>'
        )
        gap = min(6.0, 0.15 * step)
        shape = (
            f'<rect class="bar" x="{left + gap:.1f}" y="{top:.1f}" '
            f'width="{step - 2 * gap:.1f}" height="{height:.1f}"/>'
        )
        parts.append(_mark(target + shape, told))
        if index % thin == 0:
            middle = left + step / 2
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{HEIGHT - _BOTTOM + 18}" '
                f'text-anchor="middle">{escape(label)}</text>'
            )
    return _svg("".join(parts), title, HEIGHT)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[str, str], tuple[float, str, str]],
    title: str,
    x_label: str,
) -> str:
    """A cell for each (row, column) with a value: its share 0..1 of full colour, text, and more."""
    left = 24 + 7.2 * max(map(len, rows))
    step = (WIDTH - left - _RIGHT) / len(columns)
    line = 26
    height = _TOP + line * len(rows) + _BOTTOM
    thin = max(1, round(30 / step + 0.5)) if step < 30 else 1
    parts = []
    for j, row in enumerate(rows):
        middle = _TOP + j * line + line / 2 + 4
        parts.append(
            f'<text class="tick" x="{left - 8:.1f}" y="{middle:.1f}" text-anchor="end">'
            f"{escape(row)}</text>"
        )
        for i, column in enumerate(columns):
            if (row, column) not in values:
                continue
            share, text, told = values[row, column]
            x, y = left + i * step, _TOP + j * line
            shape = (
                f'<rect class="cell" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{step - 2:.1f}" '
                f'height="{line - 2}" style="--share:{100 * share:.0f}%"/>'
            )
            if step >= 44:
                strong = " strong" if share > 0.55 else ""
                shape += (
                    f'<text class="value{strong}" x="{x + step / 2:.1f}" y="{middle:.1f}" '
                    f'text-anchor="middle">{escape(text)}</text>'
                )
            parts.append(_mark(shape, told))
    bottom = _TOP + line * len(rows)
    for i, column in enumerate(columns):
        if i % thin == 0:
            parts.append(
                f'<text class="tick" x="{left + (i + 0.5) * step:.1f}" y="{bottom + 18}" '
                f'text-anchor="middle">{escape(column)}</text>'
            )
    parts.append(
        f'<text class="label" x="{(left + WIDTH - _RIGHT) / 2:.1f}" y="{bottom + 40}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    return _svg("".join(parts), title, height)


def _frame(x: Axis | None, y: Axis, x_label: str = "") -> str:
    parts = []
    for tick in y.ticks:
        at = _up(y, tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{show(tick)}</text>"
        )
    base = HEIGHT - _BOTTOM
    for tick in x.ticks if x else ():
        at = _across(x, tick) if x else 0.0
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 5}"/>'
            f'<text class="tick" x="{at:.1f}" y="{base + 18}" text-anchor="middle">'
            f"{show(tick)}</text>"
        )
    middle_x, middle_y = _LEFT + _INNER_W / 2, _TOP + _INNER_H / 2
    parts.append(
        f'<text class="label" x="{middle_x}" y="{base + 40}" text-anchor="middle">'
        f"{escape(x.label if x else x_label)}</text>"
        f'<text class="label" transform="translate(14 {middle_y}) rotate(-90)" '
        f'text-anchor="middle">{escape(y.label)}</text>'
    )
    return "".join(parts)


def _mark(shape: str, told: str) -> str:
    told = escape(told)
    return (
        f'<g class="mark" tabindex="0" role="img" aria-label="{told}">{shape}'
        f'<text class="told" x="{WIDTH - _RIGHT}" y="16" text-anchor="end">{told}</text></g>'
    )


def _svg(inside: str, title: str, height: float) -> str:
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="group" '
        f'aria-label="{escape(title)}">{inside}</svg></div>'
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><span style="background:var(--s{number % 6})"></span>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _across(axis: Axis, value: float) -> float:
    return _LEFT + axis.share(value) * _INNER_W


def _up(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.share(value) * _INNER_H
