import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from g4tool.checkpoint.materialize import materialize
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.errors import G4Error

from .conftest import load_all

Make = Callable[..., Path]


def test_published_layout_comes_back_byte_equal(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    source = tiny_folders["tiny-26b-a4b"]
    written = materialize(open_checkpoint(source), tmp_path / "new", shard_bytes=2_000_000)
    assert sorted(path.name for path in written) == sorted(p.name for p in source.iterdir())
    for path in source.iterdir():
        assert (tmp_path / "new" / path.name).read_bytes() == path.read_bytes(), path.name


def test_bare_names_single_experts_and_dead_tensors_are_put_right(
    make_folder: Make, tmp_path: Path, tiny_tensors: dict[str, dict[str, torch.Tensor]]
) -> None:
    def change(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        for key in list(tensors):
            value = tensors.pop(key)
            name = key.removeprefix("model.")
            if ".experts." not in name:
                tensors[name] = value
                continue
            stem, matrix = name.rsplit(".", 1)
            for expert, part in enumerate(value):
                tensors[f"{stem}.{expert}.{matrix}.weight"] = part
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
        tensors["vision_tower.std_bias"] = torch.ones(3)

    folder = make_folder("tiny-26b-a4b", change)
    materialize(open_checkpoint(folder), tmp_path / "new")
    written = load_file(tmp_path / "new" / "model.safetensors")
    assert written.pop("vision_tower.std_bias").equal(torch.ones(3))
    expected = tiny_tensors["tiny-26b-a4b"]
    assert set(written) == set(expected)
    assert all(value.equal(expected[key]) for key, value in written.items())


def test_dtype_is_converted_and_said(
    make_folder: Make, tmp_path: Path, tiny_tensors: dict[str, dict[str, torch.Tensor]]
) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.vision_tower.count"] = torch.tensor([3])
        config["torch_dtype"] = config["dtype"]

    folder = make_folder("tiny-e2b", change)
    (folder / "chat_template.jinja").write_text("kept")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("kept too")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    materialize(open_checkpoint(folder), tmp_path / "new", dtype=torch.float16)
    written = load_all(tmp_path / "new")
    assert written.pop("model.vision_tower.count").equal(torch.tensor([3]))
    for key, value in tiny_tensors["tiny-e2b"].items():
        assert written[key].equal(value.to(torch.float16)), key
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("float16", "float16")
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == "kept"
    assert (tmp_path / "new" / "additional_chat_templates" / "tools.jinja").exists()
    assert not (tmp_path / "new" / "pytorch_model.bin").exists()


@pytest.mark.parametrize(
    ("source", "target", "value", "advice"),
    [
        (
            torch.bfloat16,
            torch.float16,
            70_000.0,
            "float16 cannot hold; choose bfloat16 or float32",
        ),
        (
            torch.float32,
            torch.float16,
            -65_520.0,
            "float16 cannot hold; choose bfloat16 or float32",
        ),
        (torch.float32, torch.bfloat16, 3.4e38, "bfloat16 cannot hold; choose float32"),
    ],
)
def test_a_value_the_dtype_cannot_hold_is_an_error(
    make_folder: Make,
    tmp_path: Path,
    source: torch.dtype,
    target: torch.dtype,
    value: float,
    advice: str,
) -> None:
    key = "model.layers.1.mlp.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        tensors[key] = tensors[key].to(source, copy=True)
        tensors[key][3, 5] = value

    checkpoint = open_checkpoint(make_folder("tiny-31b", change))
    checkpoint.check_finite()
    with pytest.raises(G4Error) as error:
        materialize(checkpoint, tmp_path / "new", dtype=target)
    assert str(error.value) == (
        f"{tmp_path / 'new' / 'model.safetensors'}: {key} has values that {advice}."
    )
    assert not list((tmp_path / "new").glob("*.safetensors*"))


def test_infinite_bounds_of_a_tower_stay_infinite(make_folder: Make, tmp_path: Path) -> None:
    key = "model.audio_tower.layers.0.self_attn.k_proj.input_max"

    def change(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        tensors[key] = torch.tensor(float("inf"), dtype=torch.bfloat16)
        tensors["model.vision_tower.largest"] = torch.tensor([65_504.0, 65_519.0])

    folder = make_folder("tiny-31b", change)
    materialize(open_checkpoint(folder), tmp_path / "new", dtype=torch.float16)
    written = load_all(tmp_path / "new")
    assert written[key].item() == float("inf")
    assert written["model.vision_tower.largest"].tolist() == [65_504.0, 65_504.0]
