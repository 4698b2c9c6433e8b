"""g4 build, quantize, convert and cache on the tiny models, through one shared store."""

import errno
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.reader import open_checkpoint
from tests.cli.conftest import G4

TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")


@pytest.fixture
def checkpoint(g4: G4, tmp_path: Path) -> Path:
    """A copy of tiny-31b's checkpoint that a test may spoil."""
    ran = g4("download", "tiny-31b", "--output", str(tmp_path / "model"), "--json")
    assert ran.code == 0, ran.err
    return tmp_path / "model"


def spoil(folder: Path, name: str, change: float) -> Path:
    """Set one value of tensor `name`, wherever it lies; returns its file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    tensors[name].view(-1)[7] = change
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("preset", TINY)
def test_build_makes_a_bundle_then_says_cached(g4: G4, preset: str) -> None:
    first = g4("build", preset)
    assert first.code == 0, first.err
    bundle = Path(first.out.strip())
    assert (bundle / "g4.json").is_file()

    began = time.monotonic()
    second = g4("build", preset, "--json")
    assert second.code == 0
    assert [s["action"] for s in second.json["stages"]] == ["reuse"] * 2
    assert second.json["path"] == str(bundle)
    print(f"second build of {preset}: {time.monotonic() - began:.2f} s")

    again = g4("build", preset)
    lines = again.err.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["convert", "cached"], ["quantize", "cached"]
    ]  # fmt: skip
    for line, stage in zip(lines, second.json["stages"], strict=True):
        assert line.split()[2] == stage["identity"][:12]


def test_a_pruned_input_is_not_made_again_for_a_cached_result(g4: G4, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    made = g4("build", "tiny-31b", "--json", *home).json
    view = made["stages"][0]["identity"]
    assert g4("cache", "prune", view[:12], *home).code == 0
    again = g4("build", "tiny-31b", *home)
    assert "convert    not needed" in again.err
    assert not (tmp_path / "artifacts" / "convert" / view).exists()


def test_dry_run_names_each_stage_its_fate_and_why(g4: G4, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    fresh = g4("build", "tiny-31b", "--dry-run", "--json", *home).json["plan"]
    assert [(p["stage"], p["action"]) for p in fresh] == [
        ("convert", "make"), ("quantize", "make")
    ]  # fmt: skip
    assert not list((tmp_path / "artifacts").glob("*/*"))

    assert g4("build", "tiny-31b", *home).code == 0
    changed = g4(
        "build", "tiny-31b", "--dry-run", "--set", "quantize.group_size=64", "--json", *home
    ).json["plan"]
    assert [p["action"] for p in changed] == ["reuse", "make"]
    assert "quantize.group_size 32 -> 64" in changed[1]["reason"]


def test_until_stops_early_and_output_places_the_result(g4: G4, tmp_path: Path) -> None:
    ran = g4("build", "tiny-e2b", "--until", "convert", "--json")
    assert [s["stage"] for s in ran.json["stages"]] == ["convert"]
    placed = g4("build", "tiny-e2b", "--output", str(tmp_path / "out"))
    assert placed.out.strip() == str(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    refused = g4("build", "tiny-31b", "--output", str(tmp_path / "out"))
    assert refused.code == 2
    assert "already holds other files" in refused.err


def test_what_this_machine_cannot_make_is_said_with_exit_3(g4: G4, tmp_path: Path) -> None:
    recipe = tmp_path / "g4.yaml"
    recipe.write_text("name: x\nmodel: tiny-31b\nquantize: {}\nexport-cuda: {}\n")
    ran = g4("build", str(recipe))
    assert ran.code == 3
    assert "export-cuda: lowering to CUDA needs an NVIDIA GPU" in ran.err
    assert Path(ran.out.strip(), "g4.json").is_file()
    said = g4("build", str(recipe), "--json")
    assert said.code == 3
    assert said.json["incomplete"] == ["export-cuda"]
    assert said.json["path"] == ran.out.strip()
    planned = g4("build", str(recipe), "--dry-run")
    assert planned.code == 0
    assert planned.out.splitlines()[-1].split()[:2] == ["export-cuda", "none"]
    assert g4("build", str(recipe), "--dry-run", "--json").json["incomplete"] == ["export-cuda"]
    assert "incomplete" not in g4("build", str(recipe), "--until", "quantize", "--json").json


def test_quantize_word_for_word_in_either_order(g4: G4, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("g4.yaml").write_text("name: here\nmodel: tiny-31b\n")
    first = g4("quantize", "--layerwise", "int4-hqq", "--json")
    assert first.code == 0, first.out
    second = g4("--json", "quantize", "int4-hqq", "--layerwise")
    assert second.json["identity"] == first.json["identity"]
    schemes = {t["name"]: t["scheme"] for t in first.json["tensors"]}
    assert schemes["layers.0.mlp.down_proj.weight"] == "int4-hqq"
    assert schemes["layers.0.input_layernorm.weight"] == "keep"
    whole = g4("quantize", "--no-layerwise", "int4-hqq", "--json").json
    assert sorted(p.name for p in Path(whole["path"]).glob("*.safetensors")) == [
        "model.safetensors"
    ]


def test_the_default_recipe_never_downloads_unasked(
    g4: G4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commit = "a" * 40
    monkeypatch.setattr("g4tool.hub.download.resolve", lambda *_, **__: commit)
    files = [("model-00001-of-00002.safetensors", 50_000_000_000), ("config.json", 900)]
    monkeypatch.setattr("g4tool.hub.download.missing", lambda *_, **__: files)
    ran = g4("quantize", "--layerwise", "int4-hqq")
    assert ran.code == 2
    assert "google/gemma-4-31B-it must be downloaded first: 50.0 GB in 2 files" in ran.err
    assert "--yes" in ran.err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.2.mlp.up_proj.weight", float("nan"), "NaN"),
        ("model.layers.0.self_attn.q_norm.weight", float("inf"), "infinite"),
    ],
)
def test_a_damaged_value_names_file_and_tensor(
    g4: G4, checkpoint: Path, name: str, value: float, said: str
) -> None:
    path = spoil(checkpoint, name, value)
    copied = ("convert", "--materialize", str(checkpoint))
    for command in (("build", "--model", str(checkpoint), "tiny-31b"), copied):
        ran = g4(*command)
        assert ran.code == 1
        assert said in ran.err
        assert path.name in ran.err
        assert name in ran.err


def test_a_truncated_or_missing_shard_is_named(g4: G4, checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    ran = g4("convert", str(checkpoint))
    assert ran.code == 1
    assert shard.name in ran.err
    shard.unlink()
    ran = g4("convert", str(checkpoint))
    assert ran.code == 1
    assert shard.name in ran.err


def test_a_changed_source_is_a_new_artifact_and_a_moved_one_is_not(
    g4: G4, checkpoint: Path, tmp_path: Path
) -> None:
    def build(folder: Path) -> str:
        return g4("build", "tiny-31b", "--model", str(folder), "--json").json["stages"][-1]

    first = build(checkpoint)
    moved = shutil.move(checkpoint, tmp_path / "elsewhere")
    assert build(Path(moved))["identity"] == first["identity"]
    spoil(Path(moved), "model.layers.1.mlp.up_proj.weight", 0.125)
    assert build(Path(moved))["identity"] != first["identity"]


@pytest.mark.parametrize("command", ["convert", "build"])
def test_a_view_for_output_is_one_that_can_be_used(
    g4: G4, checkpoint: Path, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "view"
    given = {
        "convert": ("convert", str(checkpoint)),
        "build": ("build", "tiny-31b", "--until", "convert", "--model", str(checkpoint)),
    }[command]
    for _ in range(2):
        ran = g4(*given, "--output", str(out), "--json", "--home", str(tmp_path / "home"))
        assert ran.code == 0, ran.out
        assert ran.json["path"] == str(out)
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "view.json", "where.json"]
    view, original = open_checkpoint(out), open_checkpoint(checkpoint)
    assert view.names == original.names
    assert view.folder == checkpoint
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(view.read(name), original.read(name))


def test_a_cached_build_imports_no_torch_and_reads_no_weights(g4: G4, home: Path) -> None:
    assert g4("build", "tiny-31b").code == 0
    code = (
        "import sys; from g4tool.pipeline import hashes\n"
        "hashes._read = lambda path, *_: sys.exit(f'read {path}')\n"
        "from g4tool.cli.main import main\n"
        "sys.argv = ['g4', '--home', sys.argv[1], 'build', 'tiny-31b', '--json']\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    # The shipped files were hashed when they had been at rest for long enough.
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(home)], capture_output=True, text=True, check=False
    )
    assert done.stderr.split() == ["0", "False"]
    assert time.monotonic() - began < 3


def test_a_view_copies_nothing_and_materialize_converts(g4: G4, tmp_path: Path) -> None:
    view = g4("convert", "tiny-31b", "--json").json
    assert not list(Path(view["path"]).glob("*.safetensors"))
    copy = g4(
        "convert", "tiny-31b", "--materialize", "--dtype", "float32",
        "--output", str(tmp_path / "copy"), "--json",
    ).json  # fmt: skip
    assert copy["tensors"] == view["tensors"]
    shards = list((tmp_path / "copy").glob("*.safetensors"))
    assert {t.dtype for s in shards for t in load_file(s).values()} == {torch.float32}


def test_cache_finds_what_was_changed_behind_its_back(g4: G4, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    bundle = Path(g4("build", "tiny-31b", *home).out.strip())
    assert g4("cache", "verify", *home).code == 0
    shard = sorted(bundle.glob("*.safetensors"))[2]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ran = g4("cache", "verify", *home)
    assert ran.code == 1
    assert f"{shard.name} has changed" in ran.err
    planned = g4("build", "tiny-31b", "--dry-run", "--json", *home).json["plan"][-1]
    assert planned["reason"] == f"made again: its file {shard.name} has changed"
    listing = g4("cache", "list", "--json", *home).json["artifacts"]
    assert {entry["stage"] for entry in listing} == {"convert", "quantize"}
    shown = g4("cache", "show", bundle.name[:10], *home)
    assert shard.name in shown.out


def test_prune_asks_before_it_removes_what_is_finished(g4: G4, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    assert g4("build", "tiny-31b", *home).code == 0
    for option in (("--older-than", "0"), ("--all",)):
        ran = g4("cache", "prune", *option, *home)
        assert ran.code == 2
        assert "2 finished artifact(s) with " in ran.err
        assert "Add --yes" in ran.err
    for days in ("nan", "-1", "inf"):
        ran = g4("cache", "prune", "--older-than", days, "--yes", *home)
        assert ran.code == 2
        assert "give a number of days from 0 on" in ran.err
    assert g4("cache", "prune", "--older-than", "1", *home).out.strip() == "0 B freed"
    assert g4("cache", "verify", *home).code == 0
    assert (
        len(g4("cache", "prune", "--older-than", "0", "--yes", "--json", *home).json["pruned"]) == 2
    )


def test_prune_says_what_an_interrupted_run_would_go_on_with(
    g4: G4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from g4tool.quantize import driver

    home = ("--home", str(tmp_path))
    real = driver.quantize_unit

    def full(checkpoint, unit, path, *rest, **more):  # type: ignore[no-untyped-def]
        if "00004-of" in unit.file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(checkpoint, unit, path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "quantize_unit", full)
        ran = g4("build", "tiny-31b", *home)
    assert ran.code == 1
    assert "what is finished is kept" in ran.err
    pruned = g4("cache", "prune", *home)
    assert "1 unfinished artifact(s) with " in pruned.err
    assert "--partial removes them" in pruned.err
    assert "resuming" in g4("build", "tiny-31b", *home).err


def test_no_file_of_a_bundle_names_this_machine(g4: G4, home: Path) -> None:
    bundle = Path(g4("build", "tiny-e2b").out.strip())
    for path in bundle.iterdir():
        content = path.read_bytes()
        assert str(home).encode() not in content, path.name
        assert str(Path.home()).encode() + b"/" not in content, path.name
