"""From a recipe to stages: what is part of an identity, and what is not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.tiny import tiny_folder, write_tiny
from g4tool.errors import UsageError
from g4tool.formats.load import load_bundle
from g4tool.kernels.int4 import dequantize_int4, unpack_int4
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.store import Store
from g4tool.recipe.load import load_recipe
from g4tool.stages.build import build
from g4tool.stages.checkpoints import TINY_MODELS, checkpoint_stage
from g4tool.stages.environment import choose_device


def test_the_tiny_models_named_here_are_those_that_exist() -> None:
    from g4tool.checkpoint.tiny import TINY

    assert tuple(TINY) == TINY_MODELS


def test_a_name_is_a_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checkpoint_stage("tiny-31b") == Source(tiny_folder("tiny-31b"))
    write_tiny("tiny-e2b", tmp_path / "owner" / "name")
    source = checkpoint_stage("owner/name")
    assert source.files is not None
    assert "config.json" in source.files


@pytest.mark.parametrize("model", ["nowhere", "a/b/c", "./missing/folder", "~/missing/folder"])
def test_what_is_no_model_is_said(model: str) -> None:
    with pytest.raises(UsageError, match="is no folder, no Hub id"):
        checkpoint_stage(model)


def test_threads_are_no_part_of_an_identity_and_bytes_do_not_depend_on_them(
    tmp_path: Path,
) -> None:
    recipe = load_recipe("tiny-31b")
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            artifact = Store(tmp_path / str(threads)).ensure(build(recipe, "cpu").stages[-1])
            found.append((artifact.identity, artifact.files))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "override",
    ["quantize.group_size=64", "quantize.solver=rtn", "quantize.head=int8", "model=tiny-e2b"],
)
def test_what_shapes_the_bytes_is_part_of_the_identity(tmp_path: Path, override: str) -> None:
    store = Store(tmp_path)

    def identity(*overrides: str) -> str:
        return store.identity(build(load_recipe("tiny-31b", overrides), "cpu").stages[-1])

    assert identity(override) != identity()
    assert identity("name=another", "upload.repo=a/b") == identity()


def test_device_class_and_versions_are_part_of_the_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    stage = build(load_recipe("tiny-31b"), "cpu").stages[-1]
    first = store.identity(stage)
    monkeypatch.setattr("g4tool.stages.quantize.device_class", lambda _: "cuda sm_90")
    assert store.identity(stage) != first


def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="give cpu or cuda"):
        choose_device("tpu")


def test_a_checkpoint_trained_for_q4_0_keeps_its_codes(tmp_path: Path) -> None:
    """The grid d * k with k in -8..7, as bf16, comes back exactly from the bundle."""
    folder = tmp_path / "tiny-31b-qat-q4_0-unquantized"
    write_tiny("tiny-31b", folder)
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (512, 4, 32), generator=random)
    codes[..., 0] = -8
    steps = (torch.rand(512, 4, 1, generator=random) * 0.02 + 0.001).half().float()
    trained = (codes * steps).bfloat16().view(512, 128)
    tensors[name] = trained
    save_file(tensors, path, metadata={"format": "pt"})

    recipe = load_recipe("tiny-31b", [f"model={folder}", "quantize.group_size=128"])
    artifact = Store(tmp_path / "home").ensure(build(recipe, "cpu").stages[-1])
    entry = next(t for t in artifact.manifest["facts"]["tensors"] if t["hf_name"] == name)
    assert (entry["solver"], entry["group_size"], entry["off_grid"]) == ("grid", 32, 0.0)
    assert "keeps the grid it was trained on, which has groups of 32, not 128" in entry["reason"]
    # Every other matrix is random, on no grid, and that is said.
    assert "not on the grid they were trained on" in artifact.manifest["facts"]["notes"][-1]
    linear = load_bundle(artifact.path, torch.float32).get_submodule("layers.1.mlp.up_proj")

    assert torch.equal(unpack_int4(linear.qdata).view(512, 4, 32).int() - 8, codes.int())
    restored = dequantize_int4(linear.qdata, linear.scale, linear.zero, torch.bfloat16)
    # bf16 rounds three times: the trained weight, the stored scale, their product.
    difference = (restored.float() - trained.float()).abs()
    assert (difference <= trained.float().abs() * 3 * 2**-8).all()


def test_a_copied_checkpoint_has_the_same_identity(tmp_path: Path) -> None:
    write_tiny("tiny-31b", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store = Store(tmp_path / "home")
    identities = {
        store.identity(build(load_recipe("tiny-31b", [f"model={tmp_path / x}"]), "cpu").convert)
        for x in "ab"
    }
    assert len(identities) == 1
