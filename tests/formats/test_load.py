import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.tiny import TINY, write_tiny
from g4tool.checkpoint.writer import TensorFileWriter
from g4tool.errors import G4Error
from g4tool.formats.bundle import BUNDLE, CONVENTION, FINGERPRINT, fingerprint, is_bundle
from g4tool.formats.load import load_bundle
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear
from g4tool.model.text import TextModel

from .bundles import make_bundle, usual_rule

# Logits reach 30; sums in another order move them in the fifth digit.
NEAR = {"atol": 5e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        write_tiny(name, root / name)
    return {name: root / name for name in TINY}


@pytest.fixture(scope="module")
def made(
    sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    root = tmp_path_factory.mktemp("bundles")
    return {
        name: (root / name, make_bundle(source, root / name)) for name, source in sources.items()
    }


@pytest.fixture
def bundle(made: dict[str, tuple[Path, dict[str, Tensor]]], tmp_path: Path) -> Path:
    """A copy of the smallest bundle, to be broken."""
    return Path(shutil.copytree(made["tiny-31b"][0], tmp_path / "bundle"))


def plain_model(name: str, weights: dict[str, Tensor], dtype: torch.dtype) -> TextModel:
    model = TextModel(TINY[name])
    model.load_state_dict(weights)
    return model.to(dtype).eval()


@pytest.mark.parametrize("name", list(TINY))
def test_logits_are_those_of_the_stored_weights(
    name: str, made: dict[str, tuple[Path, dict[str, Tensor]]]
) -> None:
    folder, weights = made[name]
    ids = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = plain_model(name, weights, torch.float32)(ids)
        model = load_bundle(folder, torch.float32)
        torch.testing.assert_close(model(ids), want, **NEAR)
        model.allocate_cache(2, 40, torch.float32)
        first = model(ids[:, :38], torch.tensor(0))
        rest = [model(ids[:, i : i + 1], torch.tensor(i)) for i in (38, 39)]
        torch.testing.assert_close(torch.cat((first, *rest), 1), want, **NEAR)
        half = load_bundle(folder, torch.bfloat16)(ids)
        wanted = plain_model(name, weights, torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    # Products summed in another order, rounded to bf16, and carried through every layer.
    assert (half.float() - wanted.float()).abs().mean() < 0.02 * wanted.float().std()


def test_each_leaf_has_its_twin(made: dict[str, tuple[Path, dict[str, Tensor]]]) -> None:
    model = load_bundle(made["tiny-26b-a4b"][0])
    layer = model.layers[0]
    assert type(model.embed_tokens) is Int8Embedding
    assert type(layer.self_attn.v_proj) is Int8Linear
    assert type(layer.self_attn.q_proj) is Int4Linear
    assert type(layer.experts.down_proj) is Int4ExpertLinear
    assert type(layer.router.proj) is torch.nn.Linear
    assert layer.mlp.down_proj.scale.shape == (256 // 64, 128)
    assert layer.mlp.down_proj.scale.dtype == torch.bfloat16
    assert layer.layer_scalar.dtype == torch.bfloat16
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)


def test_experts_may_be_int8(sources: dict[str, Path], tmp_path: Path) -> None:
    def rule(name: str, shape: tuple[int, ...]) -> tuple[str, int | None]:
        return ("int8", 32) if "experts" in name else usual_rule(name, shape)

    weights = make_bundle(sources["tiny-26b-a4b"], tmp_path / "bundle", rule)
    model = load_bundle(tmp_path / "bundle", torch.float32)
    assert type(model.layers[0].experts.gate_up_proj) is Int8ExpertLinear
    ids = torch.arange(12).view(1, 12)
    with torch.inference_mode():
        want = plain_model("tiny-26b-a4b", weights, torch.float32)(ids)
        torch.testing.assert_close(model(ids), want, **NEAR)


def test_a_loaded_bundle_exports(
    made: dict[str, tuple[Path, dict[str, Tensor]]],
) -> None:
    # The one that has every kind of leaf.
    model = load_bundle(made["tiny-26b-a4b"][0], torch.float32)
    ids = torch.arange(9).view(1, 9)
    with torch.no_grad():
        want = model(ids)
        program = torch.export.export(
            model,
            (ids,),
            dynamic_shapes={"input_ids": {1: torch.export.Dim("n", min=2, max=64)}},
            strict=True,
        )
        torch.testing.assert_close(program.module()(ids), want)
        longer = torch.arange(20).view(1, 20)
        torch.testing.assert_close(program.module()(longer), model(longer))


def test_is_bundle(bundle: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    assert is_bundle(bundle)
    assert not is_bundle(sources["tiny-31b"])
    assert not is_bundle(tmp_path / "nothing")
    (bundle / BUNDLE).unlink()
    assert is_bundle(bundle)


def test_a_folder_by_another_maker_is_refused(bundle: Path) -> None:
    (bundle / BUNDLE).unlink()
    with pytest.raises(G4Error, match=r"no g4\.json.*torchao's own are signed"):
        load_bundle(bundle)


def test_another_convention_is_refused(bundle: Path) -> None:
    facts = {**CONVENTION, "int4": {"value": "code * scale + zero"}}
    (bundle / BUNDLE).write_text(json.dumps(facts))
    with pytest.raises(G4Error, match=r"g4\.json: int4 is .*code \* scale \+ zero"):
        load_bundle(bundle)
    (bundle / BUNDLE).write_text(json.dumps({**CONVENTION, "format_version": 2}))
    with pytest.raises(G4Error, match="format_version is 2"):
        load_bundle(bundle)
    (bundle / BUNDLE).write_text(json.dumps({**CONVENTION, "made": "by a later stage"}))
    load_bundle(bundle)


Change = Callable[[dict[str, Tensor], dict[str, str]], None]


def rewrite(bundle: Path, change: Change) -> None:
    """Rewrite a.safetensors with its tensors and metadata changed, and the index to match."""
    path = bundle / "a.safetensors"
    with SafetensorsFile(path) as file:
        tensors = {name: file.read(name) for name in file.tensors}
        metadata = dict(file.metadata)
    change(tensors, metadata)
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFileWriter(path, specs, metadata) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    index = bundle / "model.safetensors.index.json"
    kept = {k: v for k, v in json.loads(index.read_text())["weight_map"].items() if v[0] == "b"}
    index.write_text(json.dumps({"weight_map": {**kept, **dict.fromkeys(specs, path.name)}}))


QUERY = "model.layers.0.self_attn.q_proj"
EMBED = "model.embed_tokens"


def _unlist(metadata: dict[str, str], name: str) -> None:
    listed = json.loads(metadata["tensor_names"])
    metadata["tensor_names"] = json.dumps([other for other in listed if other != name])


def _add_plain(metadata: dict[str, str], name: str) -> None:
    metadata["tensor_names"] = json.dumps([*json.loads(metadata["tensor_names"]), name])
    metadata[name] = '{"_type": "Tensor"}'


def _missing(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    for part in ("qdata", "scale", "zero_point"):
        del tensors[f"{QUERY}._weight_{part}"]
    _unlist(metadata, f"{QUERY}.weight")


def _unread(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors["model.stray.weight"] = torch.ones(3)
    _add_plain(metadata, "model.stray.weight")


def _shape(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    name = f"{QUERY}._weight_qdata"
    tensors[name] = tensors[name][:-1].clone()


def _dtype(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    name = f"{QUERY}._weight_qdata"
    tensors[name] = tensors[name].view(torch.int8)


def _group(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    name = f"{QUERY}.weight"
    metadata[name] = metadata[name].replace("[1, 32]", "[1, 48]")


def _zero_points(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors[f"{EMBED}._weight_zero_point"][3] = 1


def _norm_shape(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(127)


def _class(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    name = f"{QUERY}.weight"
    metadata[name] = metadata[name].replace("Int4Tensor", "NVFP4Tensor")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_missing, rf"no file has the tensor {QUERY}\.weight"),
        (_unread, r"a\.safetensors: nobody reads the tensor model\.stray\.weight"),
        (_shape, r"q_proj\._weight_qdata is torch\.uint8 \[511, 64\], .*ask for .*\[512, 64\]"),
        (_dtype, r"q_proj\._weight_qdata is torch\.int8 .*ask for torch\.uint8"),
        (_group, r"groups of 48 do not fit model\.layers\.0\.self_attn\.q_proj\.weight"),
        (_zero_points, r"embed_tokens\.weight is int8 with zero points"),
        (_norm_shape, r"input_layernorm\.weight is .*\[127\], but .*\[128\]"),
        (_class, r"q_proj\.weight is a torchao NVFP4Tensor"),
    ],
)
def test_broken_bundles_are_refused(bundle: Path, change: Change, says: str) -> None:
    rewrite(bundle, change)
    with pytest.raises(G4Error, match=says) as error:
        load_bundle(bundle)
    assert str(bundle) in str(error.value)


def test_an_embedding_in_int4_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    def rule(name: str, shape: tuple[int, ...]) -> tuple[str, int | None]:
        return ("int4", 32) if name == "embed_tokens.weight" else usual_rule(name, shape)

    make_bundle(sources["tiny-31b"], tmp_path / "bundle", rule)
    with pytest.raises(
        G4Error, match=r"embed_tokens\.weight is stored as int4.*weights of Embedding"
    ):
        load_bundle(tmp_path / "bundle")


def mark(bundle: Path, file: str | None, value: str) -> None:
    """Put a fingerprint into a shard of the bundle, or into its g4.json."""
    if file is None:
        facts = json.loads((bundle / BUNDLE).read_text())
        (bundle / BUNDLE).write_text(json.dumps({**facts, FINGERPRINT: value}))
        return
    tensors = load_file(bundle / file)
    with SafetensorsFile(bundle / file) as opened:
        metadata = {**opened.metadata, FINGERPRINT: value}
    save_file(tensors, bundle / file, metadata)


def test_all_files_are_of_one_bundle(bundle: Path) -> None:
    def refused(file: str) -> None:
        with pytest.raises(G4Error, match=rf"/{file}\.safetensors belongs to another bundle"):
            load_bundle(bundle)

    mark(bundle, "b.safetensors", "one")
    refused("b")
    mark(bundle, None, "one")
    refused("a")
    mark(bundle, "a.safetensors", "two")
    refused("a")
    mark(bundle, "a.safetensors", "one")
    load_bundle(bundle)


def test_torchao_reads_a_marked_file(bundle: Path) -> None:
    mark(bundle, "a.safetensors", "one")
    with safe_open(bundle / "a.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata[FINGERPRINT] == "one"
    tensors, left = unflatten_tensor_state_dict(load_file(bundle / "a.safetensors"), metadata)
    assert not left
    assert set(tensors) == set(json.loads(metadata["tensor_names"]))


def test_a_fingerprint_is_a_function_of_source_and_recipe_alone() -> None:
    first = fingerprint({"repo": "a", "commit": "b"}, {"group_size": 32})
    assert first == fingerprint({"commit": "b", "repo": "a"}, {"group_size": 32})
    others = [
        fingerprint({"repo": "a", "commit": "c"}, {"group_size": 32}),
        fingerprint({"repo": "a", "commit": "b"}, {"group_size": 64}),
        fingerprint({"group_size": 32}, {"repo": "a", "commit": "b"}),
    ]
    assert len({first, *others}) == 4
    assert len(first) == 64


def test_hidden_files_are_no_bundle(sources: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(sources["tiny-31b"], tmp_path / "source")
    (tmp_path / "source" / "._model-00001-of-00003.safetensors").write_bytes(b"\0\5\x16\7")
    assert not is_bundle(tmp_path / "source")
