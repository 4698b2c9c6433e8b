"""Makes vLLM's Neuron plugin (the one on NxD Inference) serve Gemma 4 with the port in `nxdi`.

`register` is an entry point of the group `vllm.general_plugins`: vLLM calls it in each of its
processes. The plugin finds a model by architecture in NxD Inference's table, so three tables gain
entries: transformers' configs (the SDK pins a release without Gemma 4), vLLM's architectures, and
NxD Inference's models.
"""

# mypy: disable-error-code="import-not-found, import-untyped, misc"

from importlib.util import find_spec
from typing import Any, NoReturn

from torch import Tensor, nn

from g4tool.errors import G4Error

# As config.json spells them, and what the plugin makes of their names.
_ARCHITECTURES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
_PLUGIN_NAMES = ("gemma4", "gemma4unified")


def register() -> None:
    """Registers Gemma 4 where NxD Inference is installed; elsewhere vLLM's own model is right."""
    if find_spec("neuronx_distributed_inference") is None:
        return
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from g4tool.backends.neuron.nxdi import NeuronGemma4ForCausalLM
    from g4tool.backends.neuron.vllm_config import CONFIGS

    for config in CONFIGS:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for architecture in _ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}:ServedOnNeuron")
    for name in _PLUGIN_NAMES:
        MODEL_TYPES[name] = {"causal-lm": NeuronGemma4ForCausalLM}


class ServedOnNeuron(nn.Module):
    """What vLLM asks of an architecture: that it takes and makes text. It is never built.

    The plugin's worker loads the compiled model instead.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        _refuse()

    def get_input_embeddings(self, input_ids: Tensor) -> Tensor:
        """Looked up by vLLM, not called."""
        _refuse()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The same in later releases of vLLM."""
        _refuse()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Looked up by vLLM, not called."""
        _refuse()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Looked up by vLLM, not called."""
        _refuse()


def _refuse() -> NoReturn:
    raise G4Error(
        "vLLM would run Gemma 4 without the Neuron plugin here: install vllm-neuron, and start it "
        "on an instance with Neuron devices."
    )
