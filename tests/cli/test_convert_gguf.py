"""g4 convert to GGUF, and GGUF files as the model of other commands."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import g4tool
from g4tool.checkpoint.folder import open_files
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import tiny_folder
from tests.cli.conftest import G4

PROMPT = "Tell me about the sea and the ships that sail on it."
RUN = ("--dtype", "fp32", "--max-new-tokens", "12", "--json")


def test_there_and_back_gives_the_same_text(g4: G4, tmp_path: Path) -> None:
    made = g4("convert", "tiny-e2b", "--to", "gguf", "--output", str(tmp_path / "out"))
    path = tmp_path / "out" / "model.gguf"
    assert made.code == 0, made.err
    assert made.out.startswith(f"{path}  (6.4 MB: 44 BF16, 40 F32)")
    text = g4("run", "tiny-e2b", PROMPT, *RUN).json["text"]
    ran = g4("run", str(path), PROMPT, *RUN)
    assert ran.json["text"] == text

    assert f"give {path} itself" in g4("run", str(path.parent), PROMPT).err
    assert g4("download", str(path)).err.strip().endswith("there is nothing to download.")
    view = g4("convert", str(path), "--json").json
    assert list(view["source"]["files"]) == ["model.gguf"]
    assert view["tensors"] == len(open_checkpoint(view["path"]).names)
    assert g4("run", view["path"], PROMPT, *RUN).json["text"] == text
    # Nothing was copied: the files of the view are small, and name the one they are of.
    assert sum(file.stat().st_size for file in Path(view["path"]).iterdir()) < 500_000
    assert g4("convert", view["path"], "--json").json["identity"] == view["identity"]
    assert g4tool.load(path, dtype=torch.float32).config.per_layer_dim == 64

    path.write_bytes(path.read_bytes()[:-1])
    assert "model.gguf has 6" in g4("run", view["path"], PROMPT).err
    broken = g4("run", str(path), PROMPT)
    assert broken.code == 1
    assert "is truncated: " in broken.err


def test_quantizing_a_gguf_file_gives_the_checkpoints_codes(g4: G4, tmp_path: Path) -> None:
    path = g4("convert", "tiny-26b-a4b", "--to", "gguf", "--json").json["path"]
    bundles = {}
    for model in ("tiny-26b-a4b", path):
        ran = g4("quantize", "int4-rtn", "--model", model, "--json")
        assert ran.code == 0, ran.out
        folder = Path(ran.json["path"])
        assert (folder / "tokenizer.json").is_file()
        bundles[model] = open_files(folder)
    compared = 0
    for name, file in bundles["tiny-26b-a4b"].items():
        other = bundles[path][name]
        assert set(file.tensors) == set(other.tensors)
        for key in file.tensors:
            if key.endswith(("_qdata", "_scale", "_zero_point")):
                assert torch.equal(file.read(key), other.read(key))
                compared += 1
    assert compared > 60


def test_a_bundle_becomes_q4_1(g4: G4) -> None:
    bundle = g4("quantize", "int4-rtn", "--model", "tiny-31b", "--json").json["path"]
    made = g4("convert", bundle, "--to", "gguf", "--json").json
    assert made["types"] == {"F32": 43, "Q4_1": 41, "Q8_0": 1}
    assert 0 < made["error"] < 0.01
    assert made["bytes"] == Path(made["path"]).stat().st_size < 2_300_000
    again = g4("convert", bundle, "--to", "gguf")
    assert "cached" in again.err
    assert "rounded by 0." in again.out


def test_towers_are_left_out_and_said_to_be(g4: G4, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("tiny-31b"), tmp_path / "seeing")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    checkpoint = open_checkpoint(tiny_folder("tiny-31b"))
    tensors = {checkpoint.hf_name(name): checkpoint.read(name) for name in checkpoint.names}
    tensors["model.vision_tower.std_bias"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    made = g4("convert", str(folder), "--to", "gguf")
    assert made.out.strip().endswith("42 BF16, 43 F32; 1 tensors of towers left out)")


def test_a_view_is_none_of_the_files_it_was_made_of(g4: G4, tmp_path: Path) -> None:
    made = g4("convert", "tiny-31b", "--to", "gguf", "--json").json["path"]
    path = tmp_path / "moved.gguf"
    shutil.copy(made, path)
    view = Path(g4("convert", str(path), "--json", "--output", str(tmp_path / "v")).json["path"])
    assert json.loads((view / "where.json").read_text()) == {"moved.gguf": str(path)}
    path.unlink()
    ran = g4("run", str(view), PROMPT)
    assert ran.code == 1
    assert f"{path} is gone, but the view" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-31b", "--to", "onnx"), "--to onnx: the formats are gguf."),
        (("tiny-31b", "--to", "gguf", "--materialize"), "leave it out with --to gguf"),
        (("tiny-31b", "--to", "gguf", "--dtype", "int8"), "--dtype int8: give one of bfloat16"),
        (("none/such.gguf",), "none/such.gguf does not exist."),
    ],
)
def test_wrong_usage(g4: G4, arguments: tuple[str, ...], message: str) -> None:
    ran = g4("convert", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in " ".join(ran.err.split())
