"""g4 run on checkpoints, views and bundles of the tiny models."""

import io
from pathlib import Path

import pytest
import torch

import g4tool
from tests.cli.conftest import G4

PROMPT = "Tell me about the sea and the ships that sail on it."


@pytest.mark.parametrize("model", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_checkpoint_view_and_python_agree(g4: G4, model: str) -> None:
    options = ("--dtype", "fp32", "--max-new-tokens", "12", "--json")
    plain = g4("run", model, PROMPT, *options)
    assert plain.code == 0, plain.out
    view = g4("convert", model, "--json").json["path"]
    assert g4("run", view, PROMPT, *options).json["text"] == plain.json["text"]
    assert plain.json["decode_tokens"] <= 11
    assert plain.json["peak_memory_bytes"] > 1e6


def test_a_bundle_streams_and_ends_with_one_line_of_figures(g4: G4) -> None:
    bundle = g4("build", "tiny-31b").out.strip()
    ran = g4("run", bundle, PROMPT, "--max-new-tokens", "8")
    assert ran.code == 0, ran.err
    assert ran.out.endswith("\n")
    figures = ran.err.splitlines()[-1]
    for word in ("load ", "prefill ", "decode ", "tok/s", "peak memory "):
        assert word in figures


def test_load_gives_the_same_logits_as_run_uses(g4: G4) -> None:
    bundle = g4("build", "tiny-31b").out.strip()
    ids = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    model = g4tool.load(bundle, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids)
    assert logits.shape == (2, 40, 4096)
    assert logits.isfinite().all()
    reference = g4tool.load("tiny-31b", dtype=torch.float32)
    with torch.no_grad():
        difference = (reference(ids) - logits).abs()
    # Close to the 16-bit model, and not the 16-bit model.
    assert 1e-4 < difference.mean() < 3.0


def test_sampling_repeats_with_a_seed(g4: G4) -> None:
    def text(seed: str) -> str:
        ran = g4(
            "run", "tiny-31b", PROMPT, "--temperature", "1.5", "--top-k", "50", "--top-p", "0.95",
            "--seed", seed, "--max-new-tokens", "12", "--json",
        )  # fmt: skip
        return str(ran.json["text"])

    assert text("1") == text("1")
    assert text("1") != text("2")


def test_the_prompt_comes_from_stdin(g4: G4, monkeypatch: pytest.MonkeyPatch) -> None:
    given = g4("run", "tiny-31b", "the same words", "--raw", "--max-new-tokens", "6", "--json")
    monkeypatch.setattr("sys.stdin", io.StringIO("the same words"))
    piped = g4("run", "tiny-31b", "--raw", "--max-new-tokens", "6", "--json")
    assert piped.json["text"] == given.json["text"]


def test_chat_takes_several_turns(g4: G4, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\n\nAnd then?\n/exit\nnever read\n"))
    ran = g4("run", "tiny-31b", "--chat", "--max-new-tokens", "5")
    assert ran.code == 0, ran.err
    assert len(ran.out.splitlines()) >= 2


def test_a_chat_goes_on_after_a_turn_that_fails(g4: G4, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = ["Hello.", "word " * 2000, *["And then? " * 120] * 3]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(turns)))
    ran = g4("run", "tiny-31b", "--chat", "--max-new-tokens", "10")
    assert ran.code == 0, ran.err
    assert ran.err.count("tokens and there is room for 1023") == 1
    assert "warning: the conversation no longer fits into the model's 1024 tokens" in ran.err
    assert ran.err.splitlines()[-1].startswith("load ")


def test_a_chat_ends_when_nobody_can_read_it(g4: G4, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\nAnd then?\n"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        ran = g4("run", "tiny-31b", "--chat", "--max-new-tokens", "5")
    assert ran.code == 1
    assert ran.err.count("g4: ") == 1
    assert "standard output takes no more" in ran.err


def test_an_empty_input_is_no_prompt(g4: G4, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    ran = g4("run", "tiny-31b")
    assert ran.code == 2
    assert "there is no prompt" in ran.err


def test_a_prompt_longer_than_the_model_allows(g4: G4, tmp_path: Path) -> None:
    ran = g4("run", "tiny-31b", "word " * 2000, "--raw")
    assert ran.code == 1
    assert "tokens and there is room for 1023" in ran.err


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "line 1"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
        (lambda folder: (folder / "g4.json").unlink(), "g4.json"),
    ],
)
def test_damaged_small_files_are_named(g4: G4, tmp_path: Path, spoil, said: str) -> None:
    folder = tmp_path / "bundle"
    assert g4("build", "tiny-31b", "--output", str(folder)).code == 0
    spoil(folder)
    ran = g4("run", str(folder), "hello")
    assert ran.code == 1
    assert said in ran.err
    assert "Traceback" not in ran.err
