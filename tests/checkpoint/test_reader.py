import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.folder import side_files
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error
from g4tool.progress import Progress

Tensors = dict[str, torch.Tensor]
Make = Callable[..., Path]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", TINY)
def test_values_are_what_safetensors_reads(
    name: str, tiny_folders: dict[str, Path], tiny_tensors: dict[str, Tensors]
) -> None:
    checkpoint = open_checkpoint(tiny_folders[name])
    assert checkpoint.config == TINY[name]
    assert checkpoint.names == list(text_tensors(TINY[name]))
    assert checkpoint.extras == []
    assert checkpoint.dropped == {}
    assert {checkpoint.hf_name(n) for n in checkpoint.names} == set(tiny_tensors[name])
    for tensor in checkpoint.names:
        expected = tiny_tensors[name][checkpoint.hf_name(tensor)]
        assert checkpoint.info(tensor).shape == expected.shape
        assert checkpoint.read(tensor).equal(expected)
    rows = checkpoint.read("embed_tokens.weight", 100, 164)
    assert rows.equal(tiny_tensors[name]["model.embed_tokens.weight"][100:164])
    assert all(path.suffix == ".safetensors" for path in checkpoint.files)


def test_read_is_fresh_memory(tiny_folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_folders["tiny-31b"])
    checkpoint.read("norm.weight").zero_()
    assert checkpoint.read("norm.weight").abs().min() > 0


@pytest.mark.parametrize("prefix", ["model.language_model.", ""])
def test_other_prefixes(prefix: str, make_folder: Make, tiny_tensors: dict[str, Tensors]) -> None:
    """`Gemma4ForCausalLM` beside multimodal keys: transformers loads nothing and only logs."""

    def rename(tensors: Tensors, _: dict[str, Any]) -> None:
        for key in list(tensors):
            tensors[key.replace("model.", prefix, 1)] = tensors.pop(key)

    checkpoint = open_checkpoint(make_folder("tiny-e2b", rename))
    assert checkpoint.hf_name("norm.weight") == f"{prefix}norm.weight"
    for name in checkpoint.names:
        assert checkpoint.read(name).equal(tiny_tensors["tiny-e2b"][f"model.{name}"])


@pytest.mark.parametrize("split", [True, False])
def test_experts_one_by_one(
    split: bool, make_folder: Make, tiny_tensors: dict[str, Tensors]
) -> None:
    def unfuse(tensors: Tensors, _: dict[str, Any]) -> None:
        for key in [k for k in tensors if ".experts." in k]:
            stem, matrix = key.rsplit(".", 1)
            for expert, value in enumerate(tensors.pop(key)):
                if split and matrix == "gate_up_proj":
                    gate, up = value.chunk(2)
                    tensors[f"{stem}.{expert}.gate_proj.weight"] = gate
                    tensors[f"{stem}.{expert}.up_proj.weight"] = up
                else:
                    tensors[f"{stem}.{expert}.{matrix}.weight"] = value

    checkpoint = open_checkpoint(make_folder("tiny-26b-a4b", unfuse))
    for name in ("layers.1.experts.gate_up_proj.weight", "layers.2.experts.down_proj.weight"):
        expected = tiny_tensors["tiny-26b-a4b"]["model." + name.removesuffix(".weight")]
        assert checkpoint.hf_name(name) == "model." + name.removesuffix(".weight")
        assert checkpoint.info(name).shape == expected.shape
        assert checkpoint.read(name).equal(expected)
        assert checkpoint.read(name, 3, 5).equal(expected[3:5])
        assert len(checkpoint.pieces(name)) == 8 * (2 if split and "gate" in name else 1)
        with pytest.raises(ValueError, match="rows 7:9"):
            checkpoint.read(name, 7, 9)


def test_one_missing_expert_is_named(make_folder: Make) -> None:
    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        experts = tensors.pop("model.layers.1.experts.down_proj")
        for expert, value in enumerate(experts[:7]):
            tensors[f"model.layers.1.experts.{expert}.down_proj.weight"] = value.clone()

    with pytest.raises(G4Error, match=r"nobody reads .*experts\.0\.down_proj\.weight \(and 6 more"):
        open_checkpoint(make_folder("tiny-26b-a4b", change))


def test_dead_keys_and_values_of_shared_layers_are_dropped(make_folder: Make) -> None:
    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        for layer, head in ((3, 32), (4, 64)):
            stem = f"model.layers.{layer}.self_attn"
            tensors[f"{stem}.k_proj.weight"] = torch.ones(head, 128)
            tensors[f"{stem}.v_proj.weight"] = torch.ones(head, 128)
            tensors[f"{stem}.k_norm.weight"] = torch.ones(head)

    checkpoint = open_checkpoint(make_folder("tiny-e2b", change))
    assert checkpoint.names == list(text_tensors(TINY["tiny-e2b"]))
    assert len(checkpoint.dropped) == 6
    reason = checkpoint.dropped["model.layers.4.self_attn.k_norm.weight"]
    assert reason == "layer 4 reads the keys and values of 2"


def test_a_tied_head_is_dropped_and_an_own_one_read(make_folder: Make) -> None:
    def add_head(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    checkpoint = open_checkpoint(make_folder("tiny-31b", add_head))
    assert checkpoint.dropped == {"lm_head.weight": "the head is tied to the embedding"}

    def untie(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = torch.full((4096, 128), 2.0)
        config["tie_word_embeddings"] = False

    checkpoint = open_checkpoint(make_folder("tiny-31b", untie))
    assert checkpoint.hf_name("lm_head.weight") == "lm_head.weight"
    assert checkpoint.read("lm_head.weight", 0, 1).eq(2).all()


def test_tied_embedding_dropped_by_a_saver_is_missed(make_folder: Make) -> None:
    def keep_head_only(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    with pytest.raises(G4Error, match=r"no file has the embedding; looked for model\.language"):
        open_checkpoint(make_folder("tiny-31b", keep_head_only))


def test_towers_are_carried_through(make_folder: Make) -> None:
    keys = [
        "model.vision_tower.std_bias",
        "model.vision_embedder.pos_embedding",
        "model.audio_tower.layers.0.self_attn.k_proj.input_max",
        "model.embed_vision.embedding_projection.weight",
        "model.embed_audio.embedding_projection.weight",
    ]

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        for number, key in enumerate(keys):
            tensors[key] = torch.tensor([float(number)])
        tensors[keys[2]] = torch.tensor(float("inf"))

    checkpoint = open_checkpoint(make_folder("tiny-31b", change))
    assert sorted(checkpoint.extras) == sorted(keys)
    assert checkpoint.hf_name(keys[0]) == keys[0]
    assert checkpoint.read(keys[3]).item() == 3
    assert checkpoint.info(keys[2]).shape == ()
    # No bound is what the clipped linear's infinite buffer says.
    checkpoint.check_finite()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.rotary_emb.inv_freq", torch.ones(4), "nobody reads the tensor model.rotary"),
        ("model.layers.6.norm.weight", torch.ones(4), "nobody reads the tensor model.layers.6"),
        ("model.layers.5.self_attn.v_proj.weight", torch.ones(2, 2), "nobody reads"),
        ("model.layers.0.layer_scalar", None, "no file has the tensor model.layers.0.layer_scalar"),
        ("model.layers.5.mlp.up_proj.weight", None, "no file has the tensor model.layers.5.mlp"),
        (
            "model.layers.5.self_attn.k_proj.weight",
            torch.ones(64, 128),
            "has the shape [64, 128], but config.json asks for [128, 128]",
        ),
        ("model.norm.weight", torch.ones(128, dtype=torch.int64), "model.norm.weight is int64"),
        ("model.norm.weight", torch.ones(1, 128), "has the shape [1, 128]"),
    ],
)
def test_each_failure_names_the_tensor(
    key: str, value: torch.Tensor | None, message: str, make_folder: Make
) -> None:
    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value

    folder = make_folder("tiny-31b", change)
    with pytest.raises(G4Error) as error:
        open_checkpoint(folder)
    assert message in str(error.value)
    assert str(folder if value is None else folder / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("name", ["layer_scalar", "router.scale", "router.per_expert_scale"])
def test_what_other_loaders_skip_is_asked_for(name: str, make_folder: Make) -> None:
    folder = make_folder("tiny-26b-a4b", lambda t, _: [t.pop(f"model.layers.2.{name}")])
    with pytest.raises(G4Error, match=rf"no file has the tensor model\.layers\.2\.{name}"):
        open_checkpoint(folder)


def test_post_attention_norm_is_not_the_norm_before_the_feed_forward(
    make_folder: Make, tiny_tensors: dict[str, Tensors]
) -> None:
    checkpoint = open_checkpoint(make_folder("tiny-31b"))
    names = ("post_attention_layernorm", "pre_feedforward_layernorm")
    read = [checkpoint.read(f"layers.0.{name}.weight") for name in names]
    assert not read[0].equal(read[1])
    for name, value in zip(names, read, strict=True):
        assert value.equal(tiny_tensors["tiny-31b"][f"model.layers.0.{name}.weight"])


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("-inf"), "infinite")])
def test_nan_and_infinity_are_named(value: float, kind: str, make_folder: Make) -> None:
    key = "model.layers.3.mlp.down_proj.weight"

    def change(tensors: Tensors, _: dict[str, Any]) -> None:
        tensors[key] = tensors[key].clone()
        tensors[key][77, 500] = value

    folder = make_folder("tiny-31b", change)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(G4Error) as error:
        checkpoint.check_finite()
    assert kind in str(error.value)
    assert key in str(error.value)
    assert str(folder / "model.safetensors") in str(error.value)


def test_check_finite_reports_all_bytes(tiny_folders: dict[str, Path]) -> None:
    seen: list[Progress] = []
    open_checkpoint(tiny_folders["tiny-e2b"]).check_finite(seen.append)
    assert seen[-1].done == seen[-1].total == 2 * (3_141_280 + 5)


@pytest.fixture
def sharded(tmp_path: Path, tiny_folders: dict[str, Path]) -> Path:
    """A copy of tiny-31b that may be damaged."""
    return Path(shutil.copytree(tiny_folders["tiny-31b"], tmp_path / "sharded"))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def error_of(folder: Path) -> str:
    with pytest.raises(G4Error) as error:
        open_checkpoint(folder)
    return str(error.value)


def test_missing_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    message = error_of(sharded)
    assert message.startswith(f"{shard} does not exist, but {INDEX} says that model.layers")


def test_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 2)
    message = error_of(sharded)
    assert message.startswith(f"{shard} is truncated: model.layers")


def test_index_copied_from_elsewhere_names_an_absent_tensor(sharded: Path) -> None:
    shard = "model-00003-of-00003.safetensors"
    edit_index(sharded, lambda m: m.update({"lm_head.weight": shard}))
    assert (
        error_of(sharded) == f"{sharded / shard} has no tensor lm_head.weight, but {INDEX} says so."
    )


def test_index_that_does_not_name_a_tensor(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.pop("model.norm.weight"))
    shard = sharded / "model-00003-of-00003.safetensors"
    assert error_of(sharded).startswith(f"{shard}: {INDEX} does not name the tensor model.norm")


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, last = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 3))
    tensors = load_file(first)
    tensors["model.norm.weight"] = torch.ones(128)
    save_file(tensors, first)
    assert error_of(sharded) == (
        f"{first} has the tensor model.norm.weight, which {INDEX} says is in {last.name}."
    )


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 5, ""])
def test_index_may_name_files_of_its_folder_only(shard: Any, sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"model.norm.weight": shard}))
    assert "model.norm.weight is said to be in" in error_of(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "[", "[]"])
def test_bad_index(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    assert error_of(sharded).startswith(str(sharded / INDEX))


def test_folders_that_are_no_checkpoint(tmp_path: Path, sharded: Path) -> None:
    assert error_of(tmp_path / "absent") == f"{tmp_path / 'absent'} is not a folder."
    (sharded / INDEX).unlink()
    assert error_of(sharded).startswith(f"{sharded / INDEX} does not exist, nor model.safetensors")
    for path in sharded.glob("*.safetensors"):
        path.unlink()
    assert "has no weights" in error_of(sharded)
    (sharded / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickle files only, which g4 never loads" in error_of(sharded)
    (sharded / "config.json").write_text("{")
    assert error_of(sharded).startswith(f"{sharded / 'config.json'} is not valid JSON")
    (sharded / "config.json").unlink()
    assert error_of(sharded).startswith(f"{sharded / 'config.json'} does not exist")


def test_index_and_single_file_side_by_side(sharded: Path) -> None:
    save_file({"x": torch.ones(1)}, sharded / "model.safetensors")
    assert "has both model.safetensors and" in error_of(sharded)


@pytest.mark.parametrize("inner", [False, True])
def test_somebody_elses_quantization_is_named(inner: bool, make_folder: Make) -> None:
    def change(_: Tensors, config: dict[str, Any]) -> None:
        quantization = {"quantization_config": {"quant_method": "compressed-tensors"}}
        if inner:
            config["text_config"] = {**config, **quantization}
            config["model_type"] = "gemma4"
        else:
            config.update(quantization)

    message = error_of(make_folder("tiny-31b", change))
    assert "quant_method 'compressed-tensors'" in message
    assert "not a plain checkpoint" in message


def test_config_errors_name_the_file(make_folder: Make) -> None:
    folder = make_folder("tiny-31b", lambda _, config: config.update(hidden_size=None))
    assert error_of(folder) == f"{folder / 'config.json'}: hidden_size is missing."


def test_a_shard_that_is_a_folder_is_named(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.mkdir()
    assert error_of(sharded) == f"{shard} is a folder, not a safetensors file."
    (sharded / INDEX).unlink()
    (sharded / "model.safetensors").mkdir()
    assert "model.safetensors is a folder" in error_of(sharded)
    (sharded / "config.json").unlink()
    (sharded / "config.json").mkdir()
    assert error_of(sharded) == f"{sharded / 'config.json'} cannot be read: Is a directory."


@pytest.mark.parametrize("name", ["a" * 3000, "é" * 128, "a\0b", "../a", ""])
def test_the_index_names_what_can_be_no_file(name: str, sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"x": name}))
    message = error_of(sharded)
    assert message.startswith(f"{sharded / INDEX}: x is said to be in '{name[:2]}".split("\0")[0])
    assert message.endswith("not a file's name.")
    assert len(message) < len(str(sharded)) + 250


def test_a_dangling_shard_is_missing(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(sharded / "nothing")
    assert error_of(sharded).startswith(f"{shard} does not exist, but {INDEX} says that")


def test_hidden_files_are_ignored(sharded: Path) -> None:
    for path in list(sharded.iterdir()):
        (sharded / f"._{path.name}").write_bytes(b"\0\5\x16\7" * 20)
    open_checkpoint(sharded).check_finite()
    assert not any(name.startswith(".") for name in side_files(sharded))
    for path in [*sharded.glob("model*"), sharded / INDEX]:
        path.unlink(missing_ok=True)
    assert "has no weights" in error_of(sharded)


def test_side_files_leave_out_what_work_left_behind(sharded: Path) -> None:
    before = side_files(sharded)
    for name in ("run.log", "log.txt", "nohup.out", "config.json~", "a.swp", ".env", "._a.json"):
        (sharded / name).write_text("x")
    kept = ["vocab.txt", "merges.txt", "logo.png", "my_log.txt", "tokenizer.model", "NOTICE"]
    for name in kept:
        (sharded / name).write_text("x")
    templates = sharded / "additional_chat_templates"
    templates.mkdir()
    for name in ("tools.jinja", "tools.jinja~", "._tools.jinja"):
        (templates / name).write_text("x")
    expected = sorted([*before, *kept, "additional_chat_templates/tools.jinja"])
    assert side_files(sharded) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"\\ud800"', "has half a surrogate pair in a string"),
        ("NaN", "has NaN or infinity as a number"),
        ("[-Infinity]", "has NaN or infinity as a number"),
        ("1e999", "has NaN or infinity as a number"),
        ("9" * 5000, "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_config_that_could_not_be_written_again(text: str, message: str, sharded: Path) -> None:
    path = sharded / "config.json"
    path.write_text(f'{{"note": {text}, {path.read_text().lstrip()[1:]}')
    assert error_of(sharded).startswith(f"{path} {message}")


def test_a_mistaken_number_of_experts_is_found_at_once(make_folder: Make) -> None:
    folder = make_folder("tiny-26b-a4b", lambda _, config: config.update(num_experts=65_536))
    start = time.monotonic()
    assert "config.json asks for [65536, " in error_of(folder)

    def many(tensors: Tensors, config: dict[str, Any]) -> None:
        config.update(num_experts=65_536, num_hidden_layers=2000, layer_types=None)

    assert "no file has the tensor model.layers." in error_of(make_folder("tiny-26b-a4b", many))
    assert time.monotonic() - start < 10
