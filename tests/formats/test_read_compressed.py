import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, write_tiny
from g4tool.errors import G4Error
from g4tool.formats.bundle import BUNDLE, FINGERPRINT, is_bundle, layout_of
from g4tool.formats.load import load_bundle
from g4tool.formats.weights import QuantizedWeights, open_weights
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8Linear
from g4tool.stages.loading import load_folder

from .foreign import (
    PREFIX,
    Packing,
    pack_weight,
    packed_checkpoint,
    quantized,
    read_all,
    save,
)
from .made import tiny_bundle
from .packed import text_model

PLAIN = Packing()
PACKINGS = {
    "sym": ("tiny-31b", PLAIN),
    "asym": ("tiny-e2b", Packing(symmetric=False)),
    "channel": ("tiny-31b", Packing(group=None)),
    "asym-channel": ("tiny-31b", Packing(group=None, symmetric=False)),
    "int8": ("tiny-31b", Packing(bits=8, group=None)),
    "int8-groups": ("tiny-e2b", Packing(bits=8, group=64)),
    "fp16": ("tiny-31b", Packing(scale=torch.float16, group=64)),
    "fp32": ("tiny-31b", Packing(scale=torch.float32)),
    "experts": ("tiny-26b-a4b", PLAIN),
    "asym-experts": ("tiny-26b-a4b", Packing(symmetric=False)),
    "int8-experts": ("tiny-26b-a4b", Packing(bits=8, group=None)),
    "paired-experts": ("tiny-26b-a4b", Packing(experts="pairs")),
    "fused-experts": ("tiny-26b-a4b", Packing(experts="fused", symmetric=False)),
    "dotted-experts": ("tiny-26b-a4b", Packing(experts="dotted")),
}
QUERY = f"{PREFIX}layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        write_tiny(name, root / name)
    return {name: root / name for name in TINY}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "checkpoint"
    packed_checkpoint(sources["tiny-31b"], folder, PLAIN)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


@pytest.mark.parametrize("which", list(PACKINGS))
def test_weights_are_bit_for_bit_what_the_files_mean(
    which: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    name, how = PACKINGS[which]
    wanted = packed_checkpoint(sources[name], tmp_path / "checkpoint", how)
    weights = open_weights(tmp_path / "checkpoint")
    assert isinstance(weights, QuantizedWeights)
    found = read_all(weights)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
    leaf = weights.leaves["layers.0.self_attn.q_proj.weight"]
    assert leaf.specs["scale"][0] == how.scale
    # By rows, as a rank reads them.
    for key in ("layers.0.mlp.up_proj.weight", "layers.0.experts.gate_up_proj.weight"):
        leaf = weights.leaves.get(key, leaf)
    for part, (_, shape) in leaf.specs.items():
        start, stop = min(1, shape[0] - 1), min(3, shape[0])
        assert torch.equal(leaf.read(part, start, stop), leaf.read(part)[start:stop]), part
    weights.close()


def dense_checkpoint(source: Path, folder: Path, weights: dict[str, Tensor]) -> Path:
    """The source's folder with fp32 `weights`, by canonical name."""
    checkpoint = open_checkpoint(source)
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save(folder, {checkpoint.hf_name(name): value for name, value in weights.items()})
    return folder


@pytest.mark.parametrize("which", ["sym", "asym", "experts", "int8-groups"])
def test_logits_are_those_of_transformers_on_the_same_weights(
    which: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle")
    name, how = PACKINGS[which]
    weights = packed_checkpoint(sources[name], tmp_path / "checkpoint", how)
    dense = dense_checkpoint(sources[name], tmp_path / "dense", weights)
    other = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    ids = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = other(ids).logits
        found = load_bundle(tmp_path / "checkpoint", torch.float32)(ids)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


def test_leaves_stay_packed(sources: dict[str, Path], tmp_path: Path) -> None:
    packed_checkpoint(sources["tiny-26b-a4b"], tmp_path / "checkpoint", PLAIN)
    model = load_bundle(tmp_path / "checkpoint")
    layer = model.layers[0]
    assert type(layer.self_attn.q_proj) is Int4Linear
    assert type(layer.experts.gate_up_proj) is Int4ExpertLinear
    assert type(layer.router.proj) is torch.nn.Linear
    raw = load_file(tmp_path / "checkpoint" / "a.safetensors")[f"{QUERY}.weight_packed"]
    assert layer.self_attn.q_proj.qdata.numpy().tobytes() == raw.numpy().tobytes()


def test_the_layout_is_seen_in_the_content(
    folder: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    assert layout_of(folder) == "compressed-tensors"
    assert not is_bundle(sources["tiny-31b"])
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(G4Error, match=r"config\.json has no quantization_config, but .* packed"):
        load_bundle(folder)
    config["text_config"]["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    load_bundle(folder)


def test_a_quantized_checkpoint_is_no_source(folder: Path) -> None:
    with pytest.raises(G4Error, match=r"quantized already .*compressed-tensors.*`g4 run`"):
        open_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(G4Error, match=r"quantized already .*compressed-tensors.*`g4 run`"):
        open_checkpoint(folder)


def test_a_section_without_a_method_says_how_plain_weights_were_trained(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["tiny-31b"], tmp_path / "qat"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"weights": {"num_bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    assert not is_bundle(folder)
    open_checkpoint(folder).close()


@pytest.mark.parametrize("method", ["hqq", "gptq", "gemma"])
def test_other_methods_are_named_not_loaded(
    method: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["tiny-31b"], tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(G4Error, match=rf"quantized already \(quant_method '{method}'\)"):
        load_folder(folder, torch.float32, "cpu")


def test_an_index_that_names_what_no_file_has_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"{QUERY}.weight"] = "a.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(G4Error, match=r"a\.safetensors has no tensor .*q_proj\.weight, but"):
        load_bundle(folder)


@pytest.mark.parametrize("name", ["tiny-e2b", "tiny-26b-a4b"])
def test_our_own_folder_is_read_as_anybody_elses(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_bundle(name, tmp_path_factory).path / "compressed-tensors"
    weights = open_weights(folder)
    assert isinstance(weights, QuantizedWeights)
    found, wanted = read_all(weights), text_model(folder).state_dict()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def test_without_g4_json_the_files_must_be_of_one_bundle(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = tiny_bundle("tiny-31b", tmp_path_factory).path / "compressed-tensors"
    folder = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (folder / BUNDLE).unlink()
    ids = torch.arange(2, 20)[None]
    assert torch.equal(load_bundle(folder)(ids), load_bundle(bundle)(ids))
    other = folder / "model-00003-of-00007.safetensors"
    save_file(load_file(other), other, {"format": "pt"})
    with pytest.raises(G4Error, match=f"{other.name} belongs to another bundle than model-00001"):
        load_bundle(folder)


def test_a_file_of_another_bundle_is_noticed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tiny_bundle("tiny-e2b", tmp_path_factory).path / "compressed-tensors"
    folder = Path(shutil.copytree(made, tmp_path / "bundle"))
    facts = json.loads((folder / BUNDLE).read_text())
    (folder / BUNDLE).write_text(json.dumps({**facts, FINGERPRINT: "other"}))
    with pytest.raises(G4Error, match="belongs to another bundle"):
        load_bundle(folder)


def _head(tensors: dict[str, Tensor], table: Tensor) -> None:
    tensors |= {f"lm_head.weight_{part}": t for part, t in pack_weight(table, PLAIN).items()}


def test_a_packed_head_is_read_though_config_json_ties_it(folder: Path) -> None:
    tensors = _tensors(folder)
    table = tensors[f"{PREFIX}embed_tokens.weight"]
    _head(tensors, table)
    save(folder, tensors)
    edit(folder, lambda section: section["ignore"].remove("lm_head"))
    model = load_bundle(folder, torch.float32)
    assert type(model.lm_head) is Int4Linear
    assert not model.config.tie_word_embeddings
    codes, _, _ = quantized(table, PLAIN)
    assert int(model.lm_head.qdata[0, 0]) % 16 - 8 == int(codes[0, 0])


def test_a_plain_copy_of_the_embedding_is_left_out(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors["lm_head.weight"] = tensors[f"{PREFIX}embed_tokens.weight"].clone()
    save(folder, tensors)
    assert load_bundle(folder).config.tie_word_embeddings


def test_a_packed_embedding_becomes_8_bit(folder: Path) -> None:
    tensors = _tensors(folder)
    table = tensors.pop(f"{PREFIX}embed_tokens.weight")
    key = f"{PREFIX}embed_tokens.weight"
    tensors |= {f"{key}_{part}": t for part, t in pack_weight(table, PLAIN).items()}
    save(folder, tensors)

    def change(section: dict[str, Any]) -> None:
        section["ignore"].remove("re:.*embed.*")
        section["config_groups"]["group_0"]["targets"].append("Embedding")

    edit(folder, change)
    model = load_bundle(folder, torch.float32)
    assert type(model.embed_tokens) is Int8Embedding
    codes, scale, _ = quantized(table, PLAIN)
    rows = codes[7].float() * scale[7].float().repeat_interleave(32)
    assert torch.equal(model.embed_tokens(torch.tensor([7]))[0], rows)

    # A run in bf16 does not round finer scales.
    tensors[f"{key}_scale"] = scale.float() * (1 + 2**-9)
    save(folder, tensors)
    found = load_bundle(folder).embed_tokens(torch.tensor([7]))[0]
    rows = codes[7].float() * tensors[f"{key}_scale"][7].repeat_interleave(32)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rows.bfloat16())


def test_dead_matrices_of_shared_layers_are_left_out(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    packed_checkpoint(sources["tiny-e2b"], folder, PLAIN)
    tensors = _tensors(folder)
    living = f"{PREFIX}layers.0.self_attn.k_proj.weight"
    for part in ("packed", "scale", "shape"):
        dead = living.replace("layers.0", "layers.4")
        tensors[f"{dead}_{part}"] = tensors[f"{living}_{part}"].clone()
    save(folder, tensors)
    assert not hasattr(load_bundle(folder).layers[4].self_attn, "k_proj")


def test_weights_of_mlx_are_named(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sources["tiny-31b"], tmp_path / "mlx"))
    save_file({"model.embed_tokens.scales": torch.ones(2)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(G4Error, match=r"quantized already \(MLX\)"):
        load_folder(folder, torch.float32, "cpu")


def test_groups_are_chosen_by_name_then_regex_then_class(folder: Path) -> None:
    tensors = _tensors(folder)
    wide = torch.randn(128, 512, generator=torch.Generator().manual_seed(2))
    how = Packing(bits=8, group=None)
    key = f"{PREFIX}layers.1.mlp.down_proj.weight"
    tensors |= {f"{key}_{part}": t for part, t in pack_weight(wide, how).items()}
    save(folder, tensors)

    def change(section: dict[str, Any], target: str) -> None:
        first = section["config_groups"]["group_0"]
        weights = {**first["weights"], "num_bits": 8, "strategy": "channel", "group_size": None}
        section["config_groups"]["group_1"] = {**first, "targets": [target], "weights": weights}

    edit(folder, lambda section: change(section, r"re:.*layers\.1\.mlp\.down_proj$"))
    assert type(load_bundle(folder).layers[1].mlp.down_proj) is Int8Linear
    edit(folder, lambda section: change(section, key.removesuffix(".weight")))
    assert type(load_bundle(folder).layers[1].mlp.down_proj) is Int8Linear
    edit(folder, lambda section: change(section, "Linear"))
    with pytest.raises(G4Error, match=r"says in two ways how .* is packed"):
        load_bundle(folder)
    edit(folder, lambda section: section["config_groups"].pop("group_1"))
    with pytest.raises(G4Error, match=r"down_proj\.weight_packed is .*\[128, 128\], .*\[128, 64\]"):
        load_bundle(folder)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {
        k: v for name in ("a", "b") for k, v in load_file(folder / f"{name}.safetensors").items()
    }


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the `quantization_config` of a folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def _group(section: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = section["config_groups"]["group_0"]
    return group


SECTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "activations": (
        lambda s: _group(s).update(input_activations={"num_bits": 8, "type": "int"}),
        "quantized activations",
    ),
    "sparsity": (lambda s: s.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity"),
    "rotations": (lambda s: s.update(transform_config={"config_groups": {"a": {}}}), "transform"),
    "actorder": (lambda s: _group(s)["weights"].update(actorder="group"), "order of activations"),
    "format": (
        lambda s: _group(s).update(format="nvfp4-pack-quantized"),
        "nvfp4-pack-quantized",
    ),
    "float": (lambda s: _group(s)["weights"].update(type="float"), "of type float"),
    "width": (lambda s: _group(s)["weights"].update(num_bits=3), "3-bit"),
    "no group": (lambda s: s.update(config_groups={}), "no config_groups"),
    "no target": (lambda s: _group(s).update(targets=["re:nothing"]), "does not say how .* packed"),
    "targets": (lambda s: _group(s).update(targets="Linear"), "'Linear', not by a list"),
    "regex": (lambda s: s["ignore"].append("re:*x"), r"re:\*x in quantization_config is no regex"),
    "ignored": (lambda s: s["ignore"].append(QUERY), "q_proj is in the ignore list"),
    "group size": (lambda s: _group(s)["weights"].update(group_size=64), r"q_proj\.weight_scale"),
    "misfit": (lambda s: _group(s)["weights"].update(group_size=48), "groups of 48 do not fit"),
    "asymmetric": (
        lambda s: _group(s)["weights"].update(symmetric=False),
        "no file has the zero_point of .*q_proj",
    ),
}


@pytest.mark.parametrize("which", list(SECTIONS))
def test_what_config_json_asks_for_in_vain_is_refused(folder: Path, which: str) -> None:
    change, says = SECTIONS[which]
    edit(folder, change)
    with pytest.raises(G4Error, match=says) as error:
        load_bundle(folder)
    assert str(folder) in str(error.value)


def _cut(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scale": (lambda t: t.pop(f"{QUERY}.weight_scale"), "no file has the scale of .*q_proj"),
    "no shape": (lambda t: t.pop(f"{QUERY}.weight_shape"), "no file has the shape of .*q_proj"),
    "no words": (lambda t: t.pop(f"{QUERY}.weight_packed"), "no file has the packed of .*q_proj"),
    "nothing": (
        lambda t: [t.pop(f"{QUERY}.weight_{p}") for p in ("packed", "scale", "shape")],
        r"no file has the tensor model\.language_model\.layers\.0\.self_attn\.q_proj\.weight",
    ),
    "rows": (
        _cut(f"{QUERY}.weight_packed"),
        r"q_proj\.weight_packed is .*\[511, 16\].*\[512, 16\]",
    ),
    "scales": (_cut(f"{QUERY}.weight_scale"), r"q_proj\.weight_scale is .*\[511, 4\]"),
    "dtype": (
        lambda t: t.update({f"{QUERY}.weight_packed": t[f"{QUERY}.weight_packed"].float()}),
        r"q_proj\.weight_packed is torch\.float32",
    ),
    "float64": (
        lambda t: t.update({f"{QUERY}.weight_scale": t[f"{QUERY}.weight_scale"].double()}),
        r"q_proj\.weight_scale is torch\.float64, not a 16 or 32 bit float",
    ),
    "shape": (
        lambda t: t.update({f"{QUERY}.weight_shape": torch.tensor([512, 120])}),
        r"q_proj\.weight_shape says \[512, 120\], but .*\[512, 128\]",
    ),
    "order": (
        lambda t: t.update({f"{QUERY}.weight_g_idx": torch.zeros(128, dtype=torch.int32)}),
        r"q_proj\.weight_g_idx says .*actorder",
    ),
    "twice": (
        lambda t: t.update({f"{QUERY}.weight": torch.zeros(512, 128)}),
        r"belongs to a weight that is there unpacked",
    ),
    "zeros": (
        lambda t: t.update({f"{QUERY}.weight_zero_point": torch.zeros(64, 4, dtype=torch.int32)}),
        r"says nothing of .*q_proj\.weight_zero_point",
    ),
    "stray": (
        lambda t: t.update({"model.stray.weight": torch.zeros(3)}),
        r"a\.safetensors: nobody reads the tensor model\.stray\.weight",
    ),
}


@pytest.mark.parametrize("which", list(TENSORS))
def test_files_that_do_not_fit_are_refused(folder: Path, which: str) -> None:
    change, says = TENSORS[which]
    tensors = _tensors(folder)
    change(tensors)
    save(folder, tensors)
    with pytest.raises(G4Error, match=says) as error:
        load_bundle(folder)
    assert str(folder) in str(error.value)


def test_8_bit_with_zero_points_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    how = Packing(bits=8, symmetric=False)
    packed_checkpoint(sources["tiny-31b"], tmp_path / "checkpoint", how)
    with pytest.raises(G4Error, match=r"has zero points, which g4 runs in 4 bit matrices alone"):
        load_bundle(tmp_path / "checkpoint")


def test_experts_of_a_layer_are_alike(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    packed_checkpoint(sources["tiny-26b-a4b"], folder, PLAIN)
    tensors = _tensors(folder)
    name = f"{PREFIX}layers.0.experts.3.up_proj.weight_scale"
    tensors[name] = tensors[name].float()
    save(folder, tensors)
    with pytest.raises(G4Error, match=r"experts\.3\.up_proj\.weight is not stored as"):
        load_bundle(folder)
    tensors = _tensors(folder)
    for part in ("packed", "scale", "shape"):
        del tensors[f"{PREFIX}layers.0.experts.3.up_proj.weight_{part}"]
    save(folder, tensors)
    with pytest.raises(G4Error, match=r"experts\.gate_up_proj, nor that of every expert"):
        load_bundle(folder)


LIBRARY = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="needs the package: pip install compressed-tensors==0.20.1",
)


@LIBRARY
@pytest.mark.parametrize("which", ["sym", "asym", "asym-channel", "int8", "fp16"])
def test_the_package_packs_and_means_the_same(
    which: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    name, how = PACKINGS[which]
    args = QuantizationArgs(
        num_bits=how.bits,
        strategy="channel" if how.group is None else "group",
        group_size=how.group,
        symmetric=how.symmetric,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs: list[Tensor] = []

    def pack(weight: Tensor, how: Packing) -> dict[str, Tensor]:
        _, scale, zero = quantized(weight, how)
        state = {"weight": weight.float(), "weight_scale": scale.float()}
        state["weight_zero_point"] = torch.zeros_like(scale, dtype=torch.int8)
        if zero is not None:
            state["weight_zero_point"] = zero
        made = PackedQuantizationCompressor.compress(state, scheme)
        whole = PackedQuantizationCompressor.decompress(made, scheme)
        theirs.append(whole["weight"])
        made = {key.removeprefix("weight_"): value for key, value in made.items()}
        return {**made, "scale": scale}

    packed_checkpoint(sources[name], tmp_path / "checkpoint", how, pack)
    weights = open_weights(tmp_path / "checkpoint")
    assert isinstance(weights, QuantizedWeights)
    found = [value for key, value in read_all(weights).items() if weights.stored(key).group]
    assert len(found) == len(theirs) > 20
    for ours, value in zip(found, theirs, strict=True):
        assert torch.equal(ours, value)
