"""`g4 eval`: what it compares with, what it prints, and what is wrong with its input."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import G4

TOKENS = ("--tokens", "512")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundles(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture
def bundle(g4: G4, bundles: Path) -> Path:
    """A bundle of tiny-31b, made once."""
    folder = bundles / "tiny-31b"
    if not folder.exists():
        ran = g4("quantize", "--recipe", "tiny-31b", "--output", str(folder))
        assert ran.code == 0, ran.err
    return folder


def test_a_checkpoint_alone_has_a_perplexity(g4: G4) -> None:
    ran = g4("eval", "tiny-31b", "--json", *TOKENS)
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["reference"] is None
    assert found["beside"] is None
    assert (found["tokens"], found["windows"], found["window_length"]) == (512, 2, 256)
    low, high = found["prediction"]["interval"]
    assert low <= found["prediction"]["perplexity"] <= high


def test_a_bundle_is_compared_with_its_source(g4: G4, bundle: Path, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    ran = g4("eval", str(bundle), *TOKENS, "--report", str(report), "--json")
    assert ran.code == 0, ran.err
    found = ran.json
    assert found["reference"] == "tiny-31b"
    fidelity = found["beside"]["fidelity"]
    assert 0 < fidelity["kl_mean"] < fidelity["kl_p99"]
    assert 0 <= fidelity["top1"] < 1
    assert len(found["beside"]["noise"]) == 6
    assert len(found["beside"]["alone"]) == 7
    assert found["report"] == str(report)
    assert report.read_text().startswith("<!doctype html>")


def test_the_table_says_the_same(g4: G4, bundle: Path) -> None:
    ran = g4("eval", str(bundle), "--against", "tiny-31b", *TOKENS)
    assert ran.code == 0, ran.err
    again = g4("eval", str(bundle), *TOKENS, "--json").json
    kl = again["beside"]["fidelity"]["kl_mean"]
    assert f"{kl:.4g}" in ran.out
    worst = max(again["beside"]["alone"], key=lambda item: item["kl"])
    assert f"hurts most alone                         {worst['part']}: KL" in ran.out
    for words in ("perplexity (per token)", "top-1 agreement", "layer 5", "KL alone"):
        assert words in ran.out


def test_a_model_against_itself_is_exactly_equal(g4: G4) -> None:
    found = g4("eval", "tiny-e2b", "--against", "tiny-e2b", *TOKENS, "--json").json
    fidelity = found["beside"]["fidelity"]
    assert (fidelity["kl_mean"], fidelity["top1"], fidelity["log_ratio"]) == (0, 1, 0)
    assert {noise["sqnr"] for noise in found["beside"]["noise"]} == {None}
    assert found["beside"]["divergence"]["mean"] == 64


def test_models_of_different_shapes_are_compared_as_a_whole(g4: G4) -> None:
    found = g4("eval", "tiny-e2b", "--against", "tiny-31b", *TOKENS, "--json").json
    assert found["beside"]["fidelity"]["kl_mean"] > 0
    assert found["beside"]["alone"] == []
    assert found["notes"] == ["Nothing is said by layer: the two models have different shapes."]


def test_a_sweep_lists_every_scheme(g4: G4, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    ran = g4("eval", "tiny-26b-a4b", "--sweep", *TOKENS, "--report", str(report), "--json")
    assert ran.code == 0, ran.err
    labels = [row["label"] for row in ran.json["rows"]]
    assert labels[:5] == ["bf16", "int8", "int4-hqq g32", "int4-hqq g64", "int4-hqq g128"]
    assert "int4-sym g128" in labels
    assert ran.json["model"] == "tiny-26b-a4b as int4-hqq g32"
    assert "Size against mean KL" in report.read_text()


def test_a_bundle_whose_source_is_not_at_hand(g4: G4, bundle: Path, tmp_path: Path) -> None:
    for path in bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    facts = json.loads((tmp_path / "g4.json").read_text())
    facts["source"] = {"stage": "download", "repo": "google/gemma-4-E2B", "commit": "0" * 40}
    (tmp_path / "g4.json").write_text(json.dumps(facts))
    ran = g4("eval", str(tmp_path), *TOKENS)
    assert ran.code == 0
    assert "Perplexity only" in ran.err
    assert "google/gemma-4-E2B at 000000000000, which is not in the store" in ran.err
    assert "KL" not in ran.out


def test_one_sentence_for_what_cannot_be(g4: G4, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Only a few words.")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 500)
    other = tmp_path / "other"
    ran = g4("convert", "tiny-31b", "--materialize", "--output", str(other))
    assert ran.code == 0, ran.err
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    cases = [
        (["tiny-31b", "--text", str(tmp_path / "nowhere.txt")], 2, "cannot be read: No such file"),
        (["tiny-31b", "--text", str(tmp_path / "empty.txt")], 1, "empty.txt is empty"),
        (["tiny-31b", "--text", str(tmp_path / "latin.txt")], 1, "latin.txt is not UTF-8"),
        (["tiny-31b", "--text", str(tmp_path / "short.txt")], 1, "do not fill one window of 256"),
        (["tiny-31b", "--tokens", "100"], 2, "100 tokens are less than one window"),
        (["tiny-31b", "--against", str(other)], 1, "have different tokenizers"),
        (["tiny-31b", "--report", str(tmp_path / "no" / "page.html")], 2, "does not exist"),
        (["tiny-31b", "--dtype", "int3"], 2, "dtype 'int3' is none of"),
        ([str(bundle), "--against", str(bundle), "--sweep"], 2, "is a bundle: give --against"),
        (["tiny-31"], 2, "Did you mean tiny-31b?"),
    ]
    for arguments, code, said in cases:
        ran = g4("eval", *arguments)
        assert (ran.code, ran.out) == (code, ""), (arguments, ran.err)
        assert said in ran.err
        assert "Traceback" not in ran.err
