"""The page: well formed, self-contained, with every figure, and safe with any name."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from g4tool.evaluate.evaluation import Evaluation, evaluate, evaluate_beside
from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.report import page, write_report
from g4tool.evaluate.sweep import DEFAULT, sweep
from g4tool.quantize.policy import plan

from .conftest import GetTiny


@pytest.fixture(scope="module")
def found(tiny: GetTiny) -> Evaluation:
    made = tiny("tiny-26b-a4b")
    candidate, _ = quantized(made.model, made.checkpoint, plan(made.checkpoint, DEFAULT))
    result = evaluate_beside(made.reference, candidate, "the <bundle>", "tiny-26b-a4b")
    tried = [("int4-hqq", DEFAULT), ("int4-hqq", replace(DEFAULT, group_size=128))]
    rows = sweep(made.reference, made.checkpoint, tried)
    return replace(result, rows=tuple(rows), notes=("A & B.",))


class Balance(HTMLParser):
    """Fails on tags that do not match; collects what would be fetched."""

    void = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(value) for key, value in attrs if key in ("src", "href")]
        assert tag not in ("script", "link", "iframe")
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is opened."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_well_formed_and_self_contained(found: Evaluation) -> None:
    text = page(found)
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert parser.fetched == []
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert "the &lt;bundle&gt;" in text
    assert "<bundle>" not in text
    assert "A &amp; B." in text


def test_every_plot_has_its_marks_with_words(found: Evaluation) -> None:
    text = page(found)
    plots = [
        ElementTree.fromstring(part[: part.index("</svg>") + 6])
        for part in ("<svg" + rest for rest in text.split("<svg")[1:])
    ]
    titles = [plot.get("aria-label") for plot in plots]
    assert titles == [
        "Size against mean KL",
        "Relative weight error by matrix and layer",
        "KL when one layer alone is quantized",
        "Output SQNR by layer",
        "KL by position in the window",
    ]
    marks = [plot.findall(".//g[@class='mark']") for plot in plots]
    assert found.beside is not None
    wanted = (2, len(found.beside.weights), 4, 3, len(found.beside.positions))
    assert tuple(map(len, marks)) == wanted
    for mark in (mark for group in marks for mark in group):
        assert mark.get("tabindex") == "0"
        assert mark.get("aria-label") == mark.find("text[@class='told']").text
    for plot in plots:
        width, height = map(float, (plot.get("viewBox") or "").split()[2:])
        for shape in plot.iter("text"):
            if shape.get("x"):
                assert 0 <= float(shape.get("x")) <= width
                assert 0 <= float(shape.get("y")) <= height


def test_without_a_reference_only_the_table(tiny: GetTiny, tmp_path: Path) -> None:
    made = tiny("tiny-31b")
    result = evaluate(made.model, made.windows, "tiny-31b")
    write_report(result, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<svg" not in text
    assert "bits per byte" in text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
