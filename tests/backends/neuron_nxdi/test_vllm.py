"""Registration with vLLM's Neuron plugin, against fakes of its tables: contract only."""

import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from g4tool.backends.neuron import vllm
from g4tool.checkpoint.config import parse_text_config, to_hf_config
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error

Tables = dict[str, dict[str, Any]]


class PretrainedConfig:
    """As in transformers 4.57, which the SDK pins: every setting becomes an attribute."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    """What is entered in the three tables."""
    entered: Tables = {"configs": {}, "architectures": {}, "models": {}}

    def modules(**names: Any) -> None:
        for name, content in names.items():
            module = types.ModuleType(name.replace("__", "."))
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def register(name: str, config: type, exist_ok: bool) -> None:
        entered["configs"][name] = config

    modules(
        neuronx_distributed_inference={},
        neuronx_distributed_inference__utils={},
        neuronx_distributed_inference__utils__constants={"MODEL_TYPES": entered["models"]},
        transformers={
            "PretrainedConfig": PretrainedConfig,
            "AutoConfig": types.SimpleNamespace(register=register),
        },
        vllm={
            "ModelRegistry": types.SimpleNamespace(
                register_model=entered["architectures"].__setitem__
            )
        },
        g4tool__backends__neuron__nxdi={"NeuronGemma4ForCausalLM": "the port"},
    )
    monkeypatch.setattr(vllm, "find_spec", lambda name: types.SimpleNamespace(name=name))
    yield entered
    # It was imported on top of the fake.
    sys.modules.pop("g4tool.backends.neuron.vllm_config", None)


def plugin_name(architecture: str) -> str:
    """How the plugin looks a model up in NxD Inference's table."""
    return architecture.split("For", 1)[0].lower()


def test_every_architecture_leads_to_the_port(tables: Tables) -> None:
    vllm.register()
    assert set(tables["architectures"]) == {
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
    }
    for architecture, place in tables["architectures"].items():
        assert place == "g4tool.backends.neuron.vllm:ServedOnNeuron"
        assert tables["models"][plugin_name(architecture)] == {"causal-lm": "the port"}


@pytest.mark.parametrize("wrapper", [None, "gemma4", "gemma4_unified"])
def test_configs_show_the_text_model(tables: Tables, wrapper: str | None) -> None:
    vllm.register()
    raw = to_hf_config(TINY["tiny-e2b"])
    if wrapper:
        raw = {"model_type": wrapper, "text_config": raw, "vision_config": {"hidden_size": 1}}
    kind = tables["configs"][raw["model_type"]]
    config = kind(**raw)
    assert config.model_type == raw["model_type"]
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (128, 1, 32)
    assert not hasattr(config, "text_config")
    # As vLLM and transformers hand configs on.
    again = kind(**pickle.loads(pickle.dumps(config)).__dict__)
    assert parse_text_config(again.hf_config) == TINY["tiny-e2b"]


def test_nothing_without_nxd_inference(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    vllm.register()
    assert not any(tables.values())


def test_what_vllm_looks_up_is_never_run() -> None:
    with pytest.raises(G4Error, match="Neuron plugin"):
        vllm.ServedOnNeuron(vllm_config=None)
