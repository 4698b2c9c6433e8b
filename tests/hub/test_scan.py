"""Nothing of this machine is published: each thing in each kind of file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from g4tool.errors import G4Error
from g4tool.hub import scan
from g4tool.hub.scan import check_file, machine_marks

TOKEN = "hf_" + "a1B2" * 9


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, str]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/people/anna"))
    monkeypatch.setattr(scan.platform, "node", lambda: "anna-workstation")
    return machine_marks([tmp_path / "store"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("/srv/people/anna/models", "a path of this machine"),
        ("made on anna-workstation", "this machine's name"),
        (TOKEN, "an access token"),
        ("hf_" + "Z" * 34, "an access token"),
        ("/home/bob/checkpoints/x", "a path of somebody's home folder"),
        ("/Users/bob/x", "a path of somebody's home folder"),
        (r"C:\Users\bob", "a path of somebody's home folder"),
        ("/root/.cache/x", "a path of somebody's home folder"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "README.md", "export-cpu/model.pte"])
def test_what_is_found(
    tmp_path: Path, marks: dict[bytes, str], name: str, text: str, kind: str
) -> None:
    path = tmp_path / "file"
    content = json.dumps({"_name_or_path": text}) if name.endswith(".json") else text
    # Far into the file, across the border of two blocks as they are read.
    path.write_bytes(b" " * (scan._BLOCK - 12) + content.encode())
    with pytest.raises(G4Error, match=f"{name} holds {kind}") as caught:
        check_file(name, path, marks)
    assert text not in str(caught.value)


def test_the_store_and_the_current_folder(tmp_path: Path, marks: dict[bytes, str]) -> None:
    path = tmp_path / "g4.json"
    for place in (tmp_path / "store" / "artifacts", Path.cwd() / "x"):
        path.write_text(str(place))
        with pytest.raises(G4Error, match="a path of this machine"):
            check_file("g4.json", path, marks)


def test_what_is_no_machine(tmp_path: Path, marks: dict[bytes, str]) -> None:
    path = tmp_path / "file"
    texts = (
        "see https://huggingface.co/google/gemma-4-31B-it, /tmp/x, a root/leaf, home/ and hf_xet",
        "layers.0.self_attn.q_proj.weight  hf_short",
    )
    for text in texts:
        path.write_text(text)
        check_file("README.md", path, marks)
    # A vocabulary holds every word, but no token of anybody's.
    path.write_text('{"/home/bob/": 1, "/root/x": 2, "/srv/people/anna/": 3}')
    check_file("tokenizer.json", path, marks)
    path.write_text(TOKEN)
    with pytest.raises(G4Error, match="an access token"):
        check_file("tokenizer.json", path, marks)


def test_of_weights_the_header_is_read(tmp_path: Path, marks: dict[bytes, str]) -> None:
    path = tmp_path / "model.safetensors"
    numbers = torch.frombuffer(bytearray(b"/home/bob/x/"), dtype=torch.uint8)
    save_file({"x": numbers}, path, {"format": "pt"})
    check_file("model.safetensors", path, marks)
    save_file({"x": numbers}, path, {"format": "pt", "made_from": "/home/bob/x"})
    with pytest.raises(G4Error, match="somebody's home folder"):
        check_file("model.safetensors", path, marks)
