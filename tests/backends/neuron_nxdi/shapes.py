"""Builds the port of each published variant without weights, as one of several ranks would.

Run: python -m tests.backends.neuron_nxdi.shapes NXDI NXD (see worker.py); prints for each variant
and degree the parameters whose shape is not the canonical one, with both, as one JSON line.
"""

import json
import sys

import torch

from tests.backends.neuron_nxdi.worker import prepare

DEGREES = (1, 2, 4, 8, 16)
LENGTH = 8192


def as_rank(degree: int, rank: int) -> None:
    """Makes NxD take this process for one of `degree` ranks, as it does itself to trace a model."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trace.trace import _mock_parallel_state

    _mock_parallel_state(degree, rank)
    group = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
    group.rank.return_value = rank
    parallel_state._WORLD_GROUP = group
    torch.distributed.get_world_size = lambda group=None: degree


def main(nxdi: str, nxd: str) -> None:
    """Prints {"variant": {"degree": {"name": [canonical shape, shape]}}}, or the refusal."""
    prepare(nxdi, nxd)
    from neuronx_distributed.utils.model_utils import init_on_device

    from g4tool.backends.neuron.nxdi import (
        Gemma4InferenceConfig,
        Gemma4NeuronConfig,
        NeuronGemma4ForCausalLM,
    )
    from g4tool.backends.neuron.nxdi_layout import neuron_name
    from g4tool.checkpoint.config import to_hf_config
    from g4tool.checkpoint.inventory import text_tensors
    from g4tool.errors import G4Error
    from g4tool.model.variants import VARIANTS

    found: dict[str, dict[int, object]] = {}
    for variant, text in VARIANTS.items():
        found[variant] = {}
        canonical = {neuron_name(name): list(shape) for name, shape in text_tensors(text).items()}
        for degree in DEGREES:
            as_rank(degree, 0)
            settings = Gemma4NeuronConfig(tp_degree=degree, seq_len=LENGTH)
            try:
                config = Gemma4InferenceConfig(settings, hf_config=to_hf_config(text))
            except G4Error as error:
                found[variant][degree] = str(error)
                continue
            with init_on_device(torch.device("meta"), force_custom_init_on_device=True):
                model = NeuronGemma4ForCausalLM._model_cls(config)
            found[variant][degree] = {
                name: [canonical.get(name), list(parameter.shape)]
                for name, parameter in model.named_parameters()
                if canonical.get(name) != list(parameter.shape)
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
