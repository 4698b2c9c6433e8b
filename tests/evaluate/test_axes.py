"""Round ticks that enclose the values."""

import pytest

from g4tool.evaluate.axes import linear, logarithmic, show


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 4.2, (0, 1, 2, 3, 4, 5)),
        (1.75, 2.86, (1.75, 2.0, 2.25, 2.5, 2.75, 3.0)),
        (0, 0, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_linear(low: float, high: float, ticks: tuple[float, ...]) -> None:
    axis = linear(low, high, "x")
    assert axis.ticks == pytest.approx(ticks)
    assert axis.low <= low <= high <= axis.high


@pytest.mark.parametrize(
    ("low", "high"), [(0.5, 4.6), (0.0013, 0.0014), (1e-5, 3.0), (1.0, 1.0), (0.2, 0.5)]
)
def test_logarithmic(low: float, high: float) -> None:
    axis = logarithmic(low, high, "y")
    assert axis.low <= low * (1 + 1e-9)
    assert axis.high >= high * (1 - 1e-9)
    assert 2 <= len(axis.ticks) <= 7
    assert axis.share(axis.low) == 0
    assert axis.share(axis.high) == 1
    assert axis.share((axis.low * axis.high) ** 0.5) == pytest.approx(0.5)


def test_numbers_fit_beside_an_axis() -> None:
    values = (0, 0.0005, 1.25, 12.0, 3.4e-06, 1234567)
    assert [show(v) for v in values] == ["0", "0.0005", "1.25", "12", "3.4e-6", "1,234,567"]
