"""The file for ExecuTorch's `--prequantized`: their function loads it, with our weights in it."""

import json
from pathlib import Path

import pytest
import torch
from executorch.examples.models.gemma4_31b import export as example_export
from executorch.examples.models.gemma4_31b import model as example
from executorch.extension.llm.export import load as loading
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import tiny_folder
from g4tool.errors import UsageError
from g4tool.formats import executorch_file
from g4tool.formats.load import load_bundle
from g4tool.formats.torchao import Stored, shard_layout
from tests.formats.made import make, recipe_of, tiny_bundle
from tests.formats.packed import tensors

# tests/formats/test_executorch.py goes past the window, with the bundle that holds the same bytes.
LENGTH = 8


@pytest.fixture
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle("tiny-31b", tmp_path_factory, mixed=True).path


def test_their_function_loads_it_and_their_model_gives_our_logits(bundle: Path) -> None:
    folder = bundle / "executorch"
    # Their road for a quantized folder, without the packing, which wants a GPU.
    loaded, config = example_export.load_prequantized_model(str(folder), 64, "mlx")
    assert not any(p.is_meta for p in loaded.parameters())
    assert (config.head_dim, config.global_head_dim) == (32, 64)
    # The same in fp32, to compare.
    with torch.device("meta"):
        model = example.Gemma4_31B(config)
    loading.load_checkpoint(str(folder / "model.safetensors"), model, dtype=torch.float32)
    example.materialize_runtime_buffers(model, torch.float32)
    rows: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: rows.append(call[-1][0]))
    ids = torch.randint(0, 4096, (LENGTH,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        for position, token in enumerate(ids):
            model(token.view(1, 1), torch.tensor([position]), torch.tensor([1.0]))
        ours = load_bundle(bundle, torch.float32)(ids[None])[0]
    cap = config.final_logit_softcapping
    theirs = torch.tanh(torch.stack(rows) / cap) * cap
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-4)


def test_the_same_bytes_under_their_names(bundle: Path) -> None:
    ours, theirs = tensors(bundle), load_file(bundle / "executorch" / "model.safetensors")
    for name, value in ours.items():
        assert torch.equal(theirs.pop(name.removeprefix("model.")), value)
    copies = {name: ours[f"model.{name.replace('lm_head', 'embed_tokens')}"] for name in theirs}
    assert set(copies) == {f"lm_head._weight_{part}" for part in ("qdata", "scale", "zero_point")}
    assert all(torch.equal(theirs[name], value) for name, value in copies.items())


def test_g4_reads_it_too(bundle: Path) -> None:
    ids = torch.arange(7, 40)[None]
    with torch.inference_mode():
        one = load_bundle(bundle, torch.float32)(ids)
        other = load_bundle(bundle / "executorch", torch.float32)(ids)
    assert torch.equal(one, other)


def test_config_is_untied_and_names_what_is_plain_here(bundle: Path) -> None:
    config = json.loads((bundle / "executorch" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["global_head_dim"] == 64
    assert (
        config["eos_token_id"] == json.loads((bundle / "config.json").read_text())["eos_token_id"]
    )
    assert "norm.weight" in config["quantization_config"]["ignore"]
    assert not any(name.startswith("model.") for name in config["quantization_config"]["ignore"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tiny-e2b", "models with per-layer embeddings"), ("tiny-26b-a4b", "mixture-of-experts")],
)
def test_models_that_their_example_lacks_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{kind}.*: leave it out of quantize.formats"):
        make(recipe_of(name, ["torchao", "executorch"]), tmp_path)
    executorch_file.check_model(open_checkpoint(tiny_folder("tiny-31b")).config)


def test_zero_points_that_their_packing_clamps_are_counted(tmp_path: Path) -> None:
    name = "embed_tokens.weight"
    entry = Stored(f"model.{name}", "int4", (2, 64), torch.bfloat16, 32)
    specs, metadata = shard_layout([entry])
    values = {n: torch.ones(shape, dtype=dtype) for n, (dtype, shape) in specs.items()}
    values["model.embed_tokens._weight_zero_point"][1, 0] = -0.5
    save_file(values, tmp_path / "a.safetensors", metadata)
    shards = [tmp_path / "a.safetensors"]
    # Twice: the head is a copy.
    assert executorch_file.write_file(tmp_path / "b", [(name, entry)], shards) == 2
