"""g4 on a checkpoint that somebody else quantized."""

import shutil
from pathlib import Path

import pytest
import torch

import g4tool
from g4tool.checkpoint.tiny import tiny_folder
from tests.cli.conftest import G4
from tests.formats.foreign import Packing, packed_checkpoint

PROMPT = "Tell me about the sea and the ships that sail on it."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts as Google names and packs it, beside its tokenizer."""
    source, folder = Path(tiny_folder("tiny-26b-a4b")), tmp_path_factory.mktemp("ct") / "google"
    packed_checkpoint(source, folder, Packing())
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not (folder / path.name).exists():
            shutil.copy(path, folder)
    return folder


def test_it_runs_and_loads(g4: G4, folder: Path) -> None:
    ran = g4("run", folder, PROMPT, "--max-new-tokens", "6", "--dtype", "fp32", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["text"]
    logits = g4tool.load(str(folder), dtype=torch.float32)(torch.arange(9)[None])
    reference = g4tool.load("tiny-26b-a4b", dtype=torch.float32)(torch.arange(9)[None])
    assert 1e-4 < (logits - reference).abs().mean() < 3.0


def test_it_is_evaluated_beside_its_original(g4: G4, folder: Path) -> None:
    ran = g4("eval", folder, "--against", "tiny-26b-a4b", "--tokens", "256", "--json")
    assert ran.code == 0, ran.err
    assert not any("left in 16 bit" in note for note in ran.json["notes"])
    alone = g4("eval", folder, "--tokens", "256", "--json")
    assert alone.code == 0, alone.err
    assert any("Perplexity only" in note for note in alone.json["notes"])


@pytest.mark.parametrize("command", [("convert",), ("quantize", "int4-hqq", "--model")])
def test_it_is_no_source_to_quantize(g4: G4, folder: Path, command: tuple[str, ...]) -> None:
    ran = g4(*command, folder)
    assert ran.code == 1
    assert "quantized already (quant_method 'compressed-tensors')" in ran.err
    assert "`g4 run`" in ran.err
