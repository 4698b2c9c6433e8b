"""Checkpoints that transformers, torchao and ExecuTorch's example write themselves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Int4Tensor,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_primitives import MappingType

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, write_tiny
from g4tool.errors import G4Error
from g4tool.formats.bundle import layout_of
from g4tool.formats.load import load_bundle
from g4tool.formats.weights import QuantizedWeights, open_weights
from g4tool.kernels.int4 import Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8Linear
from g4tool.model.text import TextModel

from .foreign import read_all

transformers = pytest.importorskip("transformers", reason="writes the checkpoints")

IDS = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(1))
QUERY = "model.layers.0.self_attn.q_proj"
INT4 = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
INT8 = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
ASYMMETRIC = IntxWeightOnlyConfig(
    weight_dtype=torch.int4, granularity=PerGroup(64), mapping_type=MappingType.ASYMMETRIC
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        write_tiny(name, root / name)
    return {name: root / name for name in TINY}


def save_quantized(source: Path, folder: Path, config: Any) -> Any:
    """What transformers saves with a `TorchAoConfig`, in shards; returns its fp32 model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=transformers.TorchAoConfig(config),
        dtype=torch.float32,
    )
    model.save_pretrained(folder, max_shard_size="1MB")
    return model


@pytest.fixture(scope="module")
def written(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchao") / "checkpoint"
    save_quantized(sources["tiny-31b"], folder, INT4)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be broken."""
    return Path(shutil.copytree(written, tmp_path / "checkpoint"))


CASES: dict[str, tuple[str, Any]] = {
    "int4": ("tiny-31b", INT4),
    "int4-asymmetric": ("tiny-31b", ASYMMETRIC),
    "int8": ("tiny-e2b", INT8),
    "int8-plain-experts": ("tiny-26b-a4b", Int8WeightOnlyConfig(version=2)),
}


@pytest.mark.parametrize("which", list(CASES))
def test_what_transformers_saves_gives_its_weights_and_logits(
    which: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    name, config = CASES[which]
    theirs = save_quantized(sources[name], tmp_path / "checkpoint", config)
    assert layout_of(tmp_path / "checkpoint") == "torchao"
    assert compare(tmp_path / "checkpoint", theirs) > 15


def compare(folder: Path, theirs: Any) -> int:
    """Weights bit for bit and logits of `theirs`, a model of transformers, in fp32.

    Returns how many weights are quantized.
    """
    weights = open_weights(folder)
    assert isinstance(weights, QuantizedWeights)
    state = {k.removeprefix("model."): v for k, v in theirs.state_dict().items()}
    quantized = 0
    for key, value in read_all(weights).items():
        other = state[key if key in state else key.removesuffix(".weight")]
        if hasattr(other, "qdata"):
            other, quantized = other.dequantize(), quantized + 1
        assert torch.equal(value, other.float()), key
    with torch.inference_mode():
        want = theirs(IDS).logits
        found = load_bundle(folder, torch.float32)(IDS)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    return quantized


def test_a_quantized_embedding_and_a_head_of_its_own(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source, folder = sources["tiny-e2b"], tmp_path / "checkpoint"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    tables = (nn.Embedding, nn.Linear)
    quantize_(theirs, INT4, lambda module, name: "embed" in name and isinstance(module, tables))
    quantize_(theirs, INT8, lambda module, name: name == "lm_head")
    state = {name: v if hasattr(v, "qdata") else v.data for name, v in theirs.state_dict().items()}
    tensors, metadata = flatten_tensor_state_dict(state)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = open_weights(folder)
    assert weights.stored("embed_tokens.weight").kind == "int8"
    assert weights.stored("lm_head.weight").group == 128
    assert compare(folder, theirs) == 3


def test_4_bit_codes_one_a_byte_are_packed(written: Path) -> None:
    model = load_bundle(written)
    assert type(model.layers[0].self_attn.q_proj) is Int4Linear
    raw = _tensors(written)[f"{QUERY}._weight_qdata"]
    assert model.layers[0].self_attn.q_proj.qdata.numel() * 2 == raw.numel()


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def own_int4(weight: Tensor, group: int, symmetric: bool) -> tuple[Int4Tensor, Tensor]:
    """torchao's own int4 of a bf16 weight, as its kernels read it, and the fp32 weight it means.

    Signed codes; `zero_point` is the value of code 0.
    """
    values = weight.float().unflatten(-1, (-1, group))
    low, high = values.amin(-1), values.amax(-1)
    scale = ((high - low).clamp(min=1e-6) / 15).bfloat16()
    zero = (low + scale.float() * 8).bfloat16()
    zero = torch.zeros_like(zero) if symmetric else zero
    s, z = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)
    codes = ((values - z) / s).round().clamp(-8, 7)
    flat = codes.flatten(-2).to(torch.int8)
    packed = (flat[..., ::2] & 15) | (flat[..., 1::2] << 4)
    tensor = Int4Tensor(
        packed, scale.mT.contiguous(), zero.mT.contiguous(), [1, group], weight.shape
    )
    return tensor, (codes * s + z).flatten(-2)


def own_checkpoint(source: Path, folder: Path, symmetric: bool) -> dict[str, Tensor]:
    """A folder with torchao's own int4; returns the fp32 weights by canonical name."""
    checkpoint = open_checkpoint(source)
    state: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name in checkpoint.names:
        value = checkpoint.read(name)
        meant[name] = value.float()
        if name.endswith("_proj.weight") and value.ndim == 2:
            value, meant[name] = own_int4(value, 64, symmetric)
        state[checkpoint.hf_name(name)] = value
    tensors, metadata = flatten_tensor_state_dict(state)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {**metadata, "format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_torchaos_own_symmetric_int4_is_exact(sources: dict[str, Path], tmp_path: Path) -> None:
    meant = own_checkpoint(sources["tiny-31b"], tmp_path / "own", symmetric=True)
    weights = open_weights(tmp_path / "own")
    assert isinstance(weights, QuantizedWeights)
    for name, value in read_all(weights).items():
        assert torch.equal(value, meant[name]), name
    assert weights.leaves["layers.0.mlp.up_proj.weight"].specs["zero"][0] == torch.bfloat16


def test_torchaos_own_zero_points_are_kept_to_fp32_rounding(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    meant = own_checkpoint(sources["tiny-31b"], tmp_path / "own", symmetric=False)
    weights = open_weights(tmp_path / "own")
    assert isinstance(weights, QuantizedWeights)
    for name, value in read_all(weights).items():
        near = 2**-21 * meant[name].abs().max()
        assert (value - meant[name]).abs().max() <= near, name
    plain = TextModel(TINY["tiny-31b"])
    plain.load_state_dict(meant)
    with torch.inference_mode():
        found = load_bundle(tmp_path / "own", torch.float32)(IDS)
        torch.testing.assert_close(found, plain.eval()(IDS), atol=1e-4, rtol=1e-4)


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Put a folder's changed tensors and metadata into one file."""
    from safetensors import safe_open

    tensors = _tensors(folder)
    files = sorted(folder.glob("*.safetensors"))
    with safe_open(files[0], "pt") as file:
        metadata = dict(file.metadata())
    change(tensors, metadata)
    for path in [*files, folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata)


def _attribute(key: str, value: object) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    def change(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
        facts = json.loads(metadata[f"{QUERY}.weight"])
        facts["_data"][key] = value
        metadata[f"{QUERY}.weight"] = json.dumps(facts)

    return change


def _swap(part: str, change: Callable[[Tensor], Tensor]) -> Callable[..., object]:
    name = f"{QUERY}._weight_{part}"
    return lambda tensors, _: tensors.update({name: change(tensors[name]).contiguous()})


def _other_class(_: dict[str, Tensor], metadata: dict[str, str]) -> None:
    text = metadata[f"{QUERY}.weight"]
    metadata[f"{QUERY}.weight"] = text.replace("IntxUnpackedToInt8Tensor", "Float8Tensor")


BROKEN: dict[str, tuple[Callable[..., object], str]] = {
    "missing": (lambda t, _: t.pop(f"{QUERY}._weight_scale"), r"has no tensor .*q_proj\._weight_s"),
    "stray": (lambda t, _: t.update({"stray": torch.ones(1)}), "does not name stray"),
    "shape": (_swap("qdata", lambda t: t[:-1]), r"_weight_qdata is torch\.int8 \[511, 128\]"),
    "dtype": (_swap("qdata", lambda t: t.view(torch.uint8)), r"_weight_qdata is torch\.uint8"),
    "scale": (_swap("scale", lambda t: t.double()), r"_weight_scale is torch\.float64, not a"),
    "width": (_swap("qdata", lambda t: t + 100), r"codes beyond the 4 bit that the header says"),
    "class": (_other_class, r"q_proj\.weight is a torchao Float8Tensor"),
    "group": (_attribute("block_size", [1, 48]), r"groups of 48 do not fit .*q_proj"),
    "tensor": (_attribute("block_size", [512, 128]), r"block_size .* not that of groups along"),
    "activations": (
        _attribute("activation_quantization", {"_type": "X", "_data": "INT8_ASYM_PER_TOKEN"}),
        "q_proj.weight asks for quantized activations",
    ),
}


@pytest.mark.parametrize("which", list(BROKEN))
def test_files_that_do_not_fit_are_refused(folder: Path, which: str) -> None:
    change, says = BROKEN[which]
    _rewrite(folder, change)
    with pytest.raises(G4Error, match=says) as error:
        load_bundle(folder)
    assert str(folder) in str(error.value)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(G4Error, match=r"model-00002-of-00004\.safetensors does not exist"):
        load_bundle(folder)


def test_pickles_are_never_loaded(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    assert layout_of(folder) is None
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(G4Error, match="pickle files only, which g4 never loads"):
        load_bundle(folder)


def test_8_bit_with_zero_points_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    config = IntxWeightOnlyConfig(
        weight_dtype=torch.int8, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC
    )
    save_quantized(sources["tiny-31b"], tmp_path / "checkpoint", config)
    with pytest.raises(G4Error, match=r"is int8 with zero points, which g4 does not run"):
        load_bundle(tmp_path / "checkpoint")


def test_what_the_codes_mean_must_be_known(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    own_checkpoint(sources["tiny-31b"], folder, symmetric=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(G4Error, match=r"no g4\.json, so what its int4 codes mean is not known"):
        load_bundle(folder)
    # Unsigned codes under torchao's own config are somebody's mistake.
    config["quantization_config"] = {"quant_method": "torchao"}
    (folder / "config.json").write_text(json.dumps(config))
    name = f"{QUERY}._weight_qdata"
    _rewrite(folder, lambda t, _: t.update({name: t[name].view(torch.uint8)}))
    with pytest.raises(G4Error, match=r"q_proj\._weight_qdata is torch\.uint8 .*torch\.int8"):
        load_bundle(folder)


def test_a_quantized_checkpoint_is_no_source(written: Path) -> None:
    with pytest.raises(G4Error, match=r"quantized already \(quant_method 'torchao'\).*`g4 run`"):
        open_checkpoint(written)


@pytest.fixture(scope="module")
def prequantized(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ExecuTorch's example writes: its own functions, a recipe for small sizes."""
    pytest.importorskip("executorch", reason="its example writes the file")
    from executorch.examples.models.gemma4_31b import model as example
    from executorch.extension.llm.export import load as loading
    from executorch.extension.llm.export import quant

    source, folder = sources["tiny-31b"], tmp_path_factory.mktemp("executorch") / "checkpoint"
    recipe = quant.QuantRecipe(
        rules=[
            quant.QuantRule(r"embed_tokens\.weight", quant.QuantConfig(8, 128, True, "min_max")),
            quant.QuantRule(r".*norm\.weight", None),
            quant.QuantRule(r".*v_proj\.weight", quant.QuantConfig(8, 32, True, "min_max")),
            quant.QuantRule(r".*\.weight", quant.QuantConfig(4, 32, False, "min_max")),
        ]
    )
    pairs = loading.iter_checkpoint(
        str(source),
        key_map=example._hf_to_model_key,
        convert=quant.identity,
        tie_map={"embed_tokens.weight": ("lm_head.weight", True)},
    )
    state = dict(quant.quantize_stream(pairs, recipe, dtype=torch.bfloat16))
    tensors, metadata = flatten_tensor_state_dict(state)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    # As published: the text model's config inside the multimodal one, its head tied.
    raw = json.loads((source / "config.json").read_text())
    config = {"model_type": "gemma4", "text_config": raw, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_executorchs_file_gives_its_weights_and_logits(prequantized: Path) -> None:
    from executorch.examples.models.gemma4_31b import model as example
    from executorch.extension.llm.export import load as loading

    assert layout_of(prequantized) == "executorch"
    weights = open_weights(prequantized)
    assert isinstance(weights, QuantizedWeights)
    assert not weights.config.tie_word_embeddings
    path = str(prequantized / "model.safetensors")
    theirs = dict(loading.iter_checkpoint(path, dtype=torch.float32))
    found = read_all(weights)
    assert found.keys() == theirs.keys()
    for name, value in theirs.items():
        dense = value.dequantize() if hasattr(value, "qdata") else value
        assert torch.equal(found[name], dense.float()), name
    model = load_bundle(prequantized, torch.float32)
    assert type(model.embed_tokens) is Int8Embedding
    assert type(model.lm_head) is Int4Linear
    assert type(model.layers[0].self_attn.v_proj) is Int8Linear
    flat = prequantized.parent / "flat"
    flat.mkdir(exist_ok=True)
    raw = json.loads((prequantized / "config.json").read_text())["text_config"]
    (flat / "config.json").write_text(json.dumps(raw))
    config = example.Gemma4_31BConfig.from_hf_config(str(flat / "config.json"))
    config.max_seq_len = 64
    with torch.device("meta"):
        other = example.Gemma4_31B(config)
    loading.load_checkpoint(path, other, dtype=torch.float32)
    example.materialize_runtime_buffers(other, torch.float32)
    rows: list[Tensor] = []
    other.lm_head.register_forward_hook(lambda *call: rows.append(call[-1][0]))
    ids = IDS[0, :8]
    with torch.inference_mode():
        for position, token in enumerate(ids):
            other(token.view(1, 1), torch.tensor([position]), torch.tensor([1.0]))
        ours = model(ids[None])[0]
    cap = config.final_logit_softcapping
    want = torch.tanh(torch.stack(rows) / cap) * cap
    torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)


def test_executorchs_file_is_no_source(prequantized: Path) -> None:
    with pytest.raises(G4Error, match=r"quantized already \(torchao's tensors\).*`g4 run`"):
        open_checkpoint(prequantized)
