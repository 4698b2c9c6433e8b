"""Gemma 4 for NxD Inference: compiles and runs on Inferentia2 and Trainium.

Needs NxD Inference 0.9 (Neuron SDK 2.29) or newer. Importing this without the SDK raises one
IncompleteError.
"""

# mypy: disable-error-code="import-not-found, import-untyped, misc"

from collections.abc import Mapping

from torch import Tensor

from g4tool.backends.neuron.nxdi_layout import neuron_state_dict
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.errors import IncompleteError

try:
    from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

    from g4tool.backends.neuron.nxdi_config import Gemma4InferenceConfig, Gemma4NeuronConfig
    from g4tool.backends.neuron.nxdi_model import NeuronTextModel
except ImportError as error:
    raise IncompleteError(
        f"the NxD Inference model needs AWS's Neuron SDK, which this Python does not have whole "
        f"({error}); install it from https://pip.repos.neuron.amazonaws.com into a Python of its "
        f"own, or use `g4 compile-neuron --plan-only`."
    ) from error

__all__ = ["Gemma4InferenceConfig", "Gemma4NeuronConfig", "NeuronGemma4ForCausalLM"]


class NeuronGemma4ForCausalLM(NeuronBaseForCausalLM):
    """The application: `compile`, `load`, `to_cpu` and `forward` are NxD Inference's own."""

    _model_cls = NeuronTextModel

    @classmethod
    def get_config_cls(cls) -> type[Gemma4InferenceConfig]:
        """The class of `config`."""
        return Gemma4InferenceConfig

    @classmethod
    def get_state_dict(
        cls, model_name_or_path: str, config: Gemma4InferenceConfig
    ) -> dict[str, Tensor]:
        """The whole weights under the port's names, read and checked by g4's own reader."""
        checkpoint = open_checkpoint(model_name_or_path)
        weights = {name: checkpoint.read(name) for name in checkpoint.names}
        return cls.convert_hf_to_neuron_state_dict(weights, config)

    @staticmethod
    def convert_hf_to_neuron_state_dict(
        state_dict: Mapping[str, Tensor], config: Gemma4InferenceConfig
    ) -> dict[str, Tensor]:
        """The port's names and layouts for weights under canonical names."""
        return neuron_state_dict(state_dict, config.text, config.neuron_config.tp_degree)
