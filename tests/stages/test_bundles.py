"""One pass over the weights, several formats: the same bytes however it goes, nothing lost."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.tiny import tiny_folder
from g4tool.errors import UsageError
from g4tool.kernels.int4 import dequantize_int4
from g4tool.kernels.int8 import dequantize_int8
from g4tool.pipeline import journal
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.store import Store
from g4tool.quantize import driver
from g4tool.recipe.load import load_recipe
from g4tool.recipe.model import Recipe
from g4tool.stages.build import build
from g4tool.stages.quantize import QuantizeStage
from tests.cli.conftest import G4, g4, home  # noqa: F401 (fixtures)
from tests.formats.made import make, recipe_of, tiny_bundle
from tests.formats.multimodal import DEAD, write_multimodal
from tests.formats.packed import fused, tensors, weights

ALL = ["torchao", "compressed-tensors", "executorch"]
PACKED = "compressed-tensors"
TINY = ["tiny-31b", "tiny-26b-a4b"]


def content(artifact: Artifact, folder: str = "") -> dict[str, bytes]:
    """Name -> bytes of the artifact's files, or of those in one of its folders."""
    return {
        name.removeprefix(folder): artifact.locate(name).read_bytes()
        for name in artifact.files
        if name.startswith(folder)
    }


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny_bundle("tiny-31b", tmp_path_factory)


@pytest.mark.parametrize("name", TINY)
def test_a_format_is_the_same_beside_others_and_alone(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    beside = tiny_bundle(name, tmp_path_factory)
    alone = make(recipe_of(name, [PACKED]), tmp_path / "a")
    assert content(alone) == content(beside, f"{PACKED}/")
    plain = make(recipe_of(name, ["torchao"]), tmp_path / "b")
    assert content(plain) == {n: c for n, c in content(beside).items() if "/" not in n}
    assert len({alone.identity, beside.identity, plain.identity}) == 3
    assert alone.manifest["facts"]["formats"].keys() == {PACKED}


def test_every_weight_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TINY:
        found: Counter[str] = Counter()
        real = Checkpoint.read

        def counted(
            self: Checkpoint,
            name: str,
            start: int = 0,
            stop: int | None = None,
            pinned: bool = False,
            found: Counter[str] = found,
            real: Callable[..., torch.Tensor] = real,
        ) -> torch.Tensor:
            values = real(self, name, start, stop, pinned)
            found[name] += len(values) if values.dim() else 1
            return values

        recipe = recipe_of(name, ALL if name == "tiny-31b" else ALL[:2])
        stage = build(recipe, "cpu").quantize
        assert stage is not None
        store = Store(tmp_path / name)
        store.ensure(stage.convert)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "read", counted)
            made = store.ensure(stage)
        shapes = {t["name"]: t["shape"] for t in made.manifest["facts"]["tensors"]}
        assert found == {n: shape[0] if shape else 1 for n, shape in shapes.items()}


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("after", [0, 1, 9, 16])
def test_killed_anywhere_it_ends_with_the_same_bytes(
    whole: Artifact, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("tiny-31b", ["torchao", PACKED, "executorch"])
    Store(tmp_path).ensure(_stage(recipe).convert)
    left = [after]
    real = journal.append

    def append(partial: Path, entry: journal.Entry) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        real(partial, entry)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "append", append)
        with pytest.raises(Killed):
            make(recipe, tmp_path)
    solved: list[str] = []
    quantize = driver.quantize_unit
    monkeypatch.setattr(
        driver,
        "quantize_unit",
        lambda checkpoint, unit, *a, **k: (
            solved.append(unit.file) or quantize(checkpoint, unit, *a, **k)
        ),
    )
    again = make(recipe, tmp_path)
    assert again.identity == whole.identity
    assert content(again) == content(whole)
    assert len(solved) == max(0, 7 - (after + 1) // 2)


def _stage(recipe: Recipe) -> QuantizeStage:
    stage = build(recipe, "cpu").quantize
    assert stage is not None
    return stage


def test_a_file_damaged_meanwhile_is_made_again_alone(
    whole: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("tiny-31b", ALL)

    def fail(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("g4tool.formats.executorch_file.write_file", fail)
        with pytest.raises(Killed):
            make(recipe, tmp_path)
    (shard,) = (p for p in tmp_path.rglob("model-00002-of-*") if p.parent.name == "files")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert content(make(recipe, tmp_path)) == content(whole)


def test_several_files_at_a_time_are_the_same(
    whole: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuantizeStage, "files_at_once", lambda self: 3)
    assert content(make(recipe_of("tiny-31b", ALL), tmp_path)) == content(whole)


def _predicted(name: str, shape: torch.Size, experts: bool) -> int:
    """Bytes of a weight in this format, by hand."""
    count = shape.numel()
    embedding = "embed_tokens" in name
    if len(shape) < 2 or embedding or "router" in name or "vision" in name:
        return 2 * count
    rows = shape[0] * (2 if "gate_up" in name else 1) if experts else 1
    return count // 2 + count // 32 * 2 + 16 * rows


def test_nothing_is_lost_and_nothing_doubled(tmp_path: Path) -> None:
    source = write_multimodal(tmp_path / "source")
    given = load_file(source / "model.safetensors")
    recipe = load_recipe("tiny-31b", [f"model={source}"])
    assert recipe.quantize is not None
    formats = recipe.quantize.model_copy(update={"formats": ALL[:2]})
    made = make(recipe.model_copy(update={"quantize": formats}), tmp_path / "home")
    assert not any("lm_head" in name for name in given)
    alive = {name: value for name, value in given.items() if name not in DEAD}
    assert len(alive) == len(given) - len(DEAD) == len(given) - 6

    folder = made.path / PACKED
    stored = tensors(folder)
    _check_index(folder, stored)
    found = fused(weights(stored))
    assert {name.removesuffix(".weight") for name in found} == {
        name.removesuffix(".weight") for name in alive
    }
    predicted = sum(_predicted(n, v.shape, v.dim() == 3) for n, v in alive.items())
    assert predicted == sum(value.nbytes for value in stored.values())
    assert made.manifest["facts"]["formats"][PACKED]["nbytes"] == predicted
    towers = [name for name in alive if "vision" in name]
    assert len(towers) > 20
    assert all(torch.equal(stored[name], alive[name]) for name in towers)

    _check_index(made.path, tensors(made.path))
    side = {p.name for p in source.iterdir()} - {"config.json", "model.safetensors"}
    assert {"chat_template.jinja", "processor_config.json", "preprocessor_config.json"} <= side
    for place in (made.path, folder):
        assert all((place / n).read_bytes() == (source / n).read_bytes() for n in side)
        facts = json.loads((place / "g4.json").read_text())
        assert sorted(facts["dropped"]) == sorted(DEAD)
        assert {t["hf_name"].removesuffix(".weight") for t in facts["tensors"]} == {
            name.removesuffix(".weight") for name in alive
        }


def _check_index(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    """The index names every tensor once, in the file that has it, and the size of them all."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {n: f.name for f in folder.glob("*.safetensors") for n in load_file(f)}
    assert sum(len(load_file(file)) for file in folder.glob("*.safetensors")) == len(held)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())


def test_a_trained_grid_is_kept_bit_for_bit_in_both(tmp_path: Path) -> None:
    source = tmp_path / "tiny-31b-qat-q4_0-unquantized"
    shutil.copytree(tiny_folder("tiny-31b"), source)
    trained: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        values = load_file(file)
        for name, value in values.items():
            if re.search(r"_proj\.weight$", name):
                values[name] = trained[name] = _on_grid(value)
        save_file(values, file, {"format": "pt"})
    recipe = load_recipe("tiny-31b", [f"model={source}"])
    assert recipe.quantize is not None
    quantize = recipe.quantize.model_copy(update={"formats": ALL[:2], "rules": []})
    made = make(recipe.model_copy(update={"quantize": quantize}), tmp_path / "home")
    ours, packed = tensors(made.path), weights(tensors(made.path / PACKED))
    assert len(trained) == 6 * 7 - 1  # the full layer has no v_proj
    for name, value in trained.items():
        module, _, _ = name.rpartition(".")
        parts = [ours[f"{module}._weight_{part}"] for part in ("qdata", "scale", "zero_point")]
        mine = dequantize_int4(*parts, torch.float32)
        assert torch.equal(packed[name], mine)
        assert torch.equal(packed[name].bfloat16(), value)


def _on_grid(weight: torch.Tensor) -> torch.Tensor:
    """The weight as training for Q4_0 would leave it: d * k in bf16, d with a sign."""
    groups = weight.float().unflatten(1, (-1, 32))
    place = groups.abs().argmax(-1, keepdim=True)
    d = (groups.gather(-1, place) / -8).bfloat16().float()
    levels = (groups / d).round().clamp(-8, 7)
    return (levels * d).flatten(1).bfloat16()


def test_the_command_and_what_it_refuses(g4: G4) -> None:  # noqa: F811
    ran = g4("quantize", "int4-hqq", "--model", "tiny-31b", "--format", PACKED, "--json")
    assert ran.code == 0, ran.out
    assert ran.json["formats"].keys() == {PACKED}
    assert (
        json.loads((Path(ran.json["path"]) / "config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        == PACKED
    )
    several = [part for name in ALL for part in ("--format", name)]
    ran = g4("quantize", "int4-hqq", "--model", "tiny-31b", *several)
    assert re.search(r"compressed-tensors: 2\.\d MB, .* in the folder compressed-tensors/", ran.err)
    assert "in the folder executorch/" in ran.err
    ran = g4("quantize", "--model", "tiny-31b", "--format", "executorch")
    assert ran.code == 2
    assert "name torchao too" in ran.err
    ran = g4("quantize", "--model", "tiny-31b", "--format", PACKED, "--format", PACKED)
    assert ran.code == 2
    assert "named twice" in ran.err
    assert g4("quantize", "--format", "hqq").code == 2
    # The presets' rules quantize the embedding, which this format does not.
    ran = g4("quantize", "keep", "--model", "tiny-31b", "--format", PACKED)
    assert ran.code == 2
    assert "would hold no quantized matrix" in ran.err


def test_executorch_refuses_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="per-layer embeddings"):
        make(recipe_of("tiny-e2b", ALL), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_int8_embeddings_and_heads_stay_16_bit_in_the_packed_format(whole: Artifact) -> None:
    ours, packed = tensors(whole.path), tensors(whole.path / PACKED)
    embedding = packed["model.embed_tokens.weight"]
    assert embedding.dtype == torch.bfloat16
    parts = [ours[f"model.embed_tokens._weight_{part}"] for part in ("qdata", "scale")]
    error = (dequantize_int8(*parts, torch.float32) - embedding.float()).norm()
    assert error < 0.01 * embedding.float().norm()
    assert not any("lm_head" in name for name in packed)
