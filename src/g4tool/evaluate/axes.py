"""Axes of a plot: round tick values, and from a value to a place in the picture."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A range of values with its ticks; `share` maps a value to 0..1 along it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    label: str
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """How far along the axis the value lies; values outside end at its ends."""
        change: Callable[[float], float] = math.log10 if self.logarithmic else float
        value = min(max(value, self.low), self.high)
        low, high = change(self.low), change(self.high)
        return (change(value) - low) / (high - low)


def linear(low: float, high: float, label: str, count: int = 5) -> Axis:
    """An axis over low..high, widened to whole ticks, about `count` of them."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, label)


def logarithmic(low: float, high: float, label: str) -> Axis:
    """An axis over positive low..high with ticks at 1, 2 and 5 times powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    below = max(value for value in every if value <= low * (1 + 1e-9))
    above = min(value for value in (*every, 10.0 ** (last + 1)) if value >= high * (1 - 1e-9))
    if above <= below:
        above = 10 * below
    inside = [value for value in every if below <= value <= above]
    if len(inside) > 7:
        inside = [v for v in inside if abs(math.log10(v) - round(math.log10(v))) < 1e-9]
    return Axis(below, above, tuple(inside), label, logarithmic=True)


def show(value: float) -> str:
    """A number short enough for a tick: 0.0005, 12, 3.4e-06."""
    if value and abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.2g}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * (1 - 1e-9))
