"""transformers' own from_pretrained reads our compressed-tensors bundles, experts included."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Gemma4TextConfig
from transformers import Gemma4ForCausalLM as Model
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import g4tool.hf  # noqa: F401 (what is tested)
from tests.formats.made import make, recipe_of, tiny_bundle
from tests.formats.multimodal import write_multimodal
from tests.formats.packed import fused, tensors, text_model, weights

IDS = torch.randint(0, 4096, (1, 48), generator=torch.Generator().manual_seed(3))

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="transformers reads this format with: pip install compressed-tensors==0.20.1",
)


@pytest.fixture(
    params=["tiny-31b", "tiny-e2b", "tiny-26b-a4b", "tiny-31b mixed", "tiny-26b-a4b mixed"]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, _, mixed = request.param.partition(" ")
    return tiny_bundle(name, tmp_path_factory, bool(mixed)).path / "compressed-tensors"


@pytest.fixture
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle("tiny-26b-a4b", tmp_path_factory).path / "compressed-tensors"


def _load(folder: Path, **options: Any) -> Any:
    options.setdefault("dtype", torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model


def _logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found = model(IDS)
    logits: Tensor = getattr(found, "logits", found)
    return logits


@needs_package
def test_from_pretrained_gives_our_logits(folder: Path) -> None:
    ours = _logits(text_model(folder))
    assert ours.std() > 1
    torch.testing.assert_close(_logits(_load(folder)), ours, atol=1e-5, rtol=1e-5)


@needs_package
def test_without_the_import_it_stops_and_says_so(
    experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", CompressedTensorsConfig
    )
    with pytest.raises(ValueError, match=r"needs: import g4tool\.hf"):
        AutoModelForCausalLM.from_pretrained(experts)


@needs_package
def test_experts_in_16_bit_and_dequantized_on_loading(experts: Path) -> None:
    expected = fused(weights(tensors(experts)))
    name = "model.layers.1.experts.gate_up_proj"
    half = _load(experts, dtype=torch.bfloat16).get_parameter(name)
    assert torch.equal(half, expected[f"{name}.weight"].bfloat16())
    whole = _load(experts, quantization_config=CompressedTensorsConfig(dequantize=True))
    name = "model.layers.1.experts.down_proj"
    assert torch.equal(whole.get_parameter(name), expected[f"{name}.weight"])
    # Their own layers come through the scales' bf16.
    name = "model.layers.2.mlp.up_proj.weight"
    torch.testing.assert_close(whole.get_parameter(name), expected[name], rtol=2**-8, atol=0)


@needs_package
def test_a_checkpoint_with_towers(tmp_path: Path) -> None:
    source = write_multimodal(tmp_path / "source")
    made = make(recipe_of(str(source), ["compressed-tensors"]), tmp_path / "home")
    model = _load(made.path)
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"
    expected = fused(weights(tensors(made.path)))
    for name in (
        "model.language_model.layers.3.experts.gate_up_proj",
        "model.language_model.layers.0.experts.down_proj",
    ):
        assert torch.equal(model.get_parameter(name), expected[f"{name}.weight"])
    tower = "model.vision_tower.patch_embedder.input_proj.weight"
    assert torch.equal(model.get_parameter(tower), expected[tower])
    ours = _logits(text_model(made.path))
    torch.testing.assert_close(_logits(model), ours, atol=1e-5, rtol=1e-5)


def test_a_model_of_no_bundle_is_saved_as_ever(tmp_path: Path) -> None:
    config = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=2,
        top_k_experts=1,
        moe_intermediate_size=16,
    )
    model = Model(config)
    model.save_pretrained(tmp_path)
    stored = tensors(tmp_path)
    assert stored["model.layers.0.experts.gate_up_proj"].shape == (2, 32, 32)
    assert not any("weight_packed" in name for name in stored)
    again = _load(tmp_path)
    assert torch.equal(
        again.model.layers[0].experts.down_proj, model.model.layers[0].experts.down_proj
    )


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "g4tool.hf")
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5\.24'"):
        importlib.import_module("g4tool.hf")
