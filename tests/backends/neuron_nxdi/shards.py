"""Compares g4's plan with NxD's own sharding of the port: every tensor of every rank, bit by bit.

Run: python -m tests.backends.neuron_nxdi.shards NXDI NXD CHECKPOINT DEGREE (see worker.py); prints
how many tensors were compared and the names of those that differ, as one JSON line.
"""

import json
import sys

import torch

from tests.backends.neuron_nxdi.shapes import as_rank
from tests.backends.neuron_nxdi.worker import prepare


def main(nxdi: str, nxd: str, folder: str, degree: str) -> None:
    """Prints {"compared": count, "different": [names]}."""
    prepare(nxdi, nxd)
    from neuronx_distributed.trace.trace import get_sharded_checkpoint
    from neuronx_distributed.utils.model_utils import init_on_device

    from g4tool.backends.neuron.nxdi import (
        Gemma4InferenceConfig,
        Gemma4NeuronConfig,
        NeuronGemma4ForCausalLM,
    )
    from g4tool.backends.neuron.nxdi_layout import neuron_name, neuron_tensor, rank_names
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.parallel.cut import cut
    from g4tool.parallel.plan import Layout, make_plan

    ranks = int(degree)
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.config, ranks, expert_block=1)
    settings = Gemma4NeuronConfig(tp_degree=ranks, seq_len=128)
    config = Gemma4InferenceConfig.from_checkpoint(folder, settings)
    compared, different = 0, []
    for rank in range(ranks):
        as_rank(ranks, rank)
        with init_on_device(torch.device("meta"), force_custom_init_on_device=True):
            model = NeuronGemma4ForCausalLM._model_cls(config)
        theirs = NeuronGemma4ForCausalLM.get_state_dict(folder, config)
        get_sharded_checkpoint(theirs, model, rank, ranks)
        ours = {name: torch.tensor([rank], dtype=torch.int32) for name in rank_names(config.text)}
        for name, split in plan.splits.items():
            part = cut(split, Layout(), "weight", checkpoint.read(name), rank)
            ours[neuron_name(name)] = neuron_tensor(name, part)
        compared += len(ours)
        different += sorted(set(ours) ^ set(theirs))
        different += [x for x in set(ours) & set(theirs) if not torch.equal(ours[x], theirs[x])]
    print(json.dumps({"compared": compared, "different": different}))


if __name__ == "__main__":
    main(*sys.argv[1:])
