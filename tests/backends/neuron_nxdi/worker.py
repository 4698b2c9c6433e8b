"""Runs the port on NxD Inference's CPU mode against a reference file; one JSON line of figures.

Run in a Python that has NxD Inference's dependencies, under torchrun for more than one rank:
python -m tests.backends.neuron_nxdi.worker NXDI NXD CHECKPOINT REFERENCE DEGREE [BATCHING]
where NXDI and NXD are source trees of neuronx-distributed-inference and neuronx-distributed, and
BATCHING is static (as if not given), continuous (prompts join one at a time), serving (the same,
and the sampler's tokens instead of logits) or buckets.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import one_hot

SEQUENCE = 128
BUCKETS = (48, 64, 96, SEQUENCE)
SERVING = ("continuous", "serving")


def prepare(nxdi: str, nxd: str) -> None:
    """Makes the two source trees importable, in CPU mode and without the SDK's compiled parts."""
    from tests.backends.neuron_nxdi.stand_ins import install

    os.environ["NXD_CPU_MODE"] = "1"
    sys.path[:0] = [str(Path(tree) / "src") for tree in (nxdi, nxd)]
    install()


def prefill(model: Any, prompts: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Logits [B, 1, V] after prompts that go to `rows` of the cache, right-padded to one length."""
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    columns = torch.arange(ids.shape[1]).expand_as(ids)
    mask = (columns < lengths[:, None]).long()
    positions = torch.where(mask.bool(), columns, 1)
    step = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "seq_ids": rows}
    # Of the likeliest token alone; by default NxD has these for as many rows as the cache has.
    return scores(model, model(**step, sampling_params=torch.ones(len(prompts), 3)))


def scores(model: Any, output: Any) -> torch.Tensor:
    """Logits [B, 1, V]; where the sampler gave tokens, rows that are 1 there and 0 elsewhere."""
    if output.logits is not None:
        return output.logits
    return one_hot(output.hidden_states.view(-1, 1).long(), model.config.vocab_size)


@torch.inference_mode()
def generate(
    model: Any, prompts: list[torch.Tensor], tokens: int, continuous: bool
) -> torch.Tensor:
    """Logits [B, tokens, V] of greedy steps after `prompts`; if `continuous`, each joins alone."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    steps: list[torch.Tensor] = []
    if continuous:
        # The last row first, so that rows and the order of arrival differ.
        parts = [
            prefill(model, [prompts[row]], rows[row : row + 1])
            for row in reversed(range(len(rows)))
        ]
        logits = torch.cat(parts[::-1])
    else:
        logits = prefill(model, prompts, rows)
    for step in range(tokens):
        steps.append(logits[:, -1].clone())
        if step == tokens - 1:
            break
        at = lengths[:, None] + step
        prior = (torch.arange(int(at.max())) < at).long()
        chosen = steps[-1].argmax(-1, keepdim=True)
        logits = scores(model, model(input_ids=chosen, attention_mask=prior, position_ids=at))
    return torch.stack(steps, dim=1)


@torch.inference_mode()
def generate_in_buckets(network: Any, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [1, tokens, V] along `tokens`, through programs for ever more positions.

    NxD Inference's CPU mode has one program only, so they are called here as its compiled ones are:
    inputs padded to the bucket. The mask wrongly shows each token itself, which must not count.
    """

    def step(ids: torch.Tensor, positions: torch.Tensor, bucket: int) -> torch.Tensor:
        network.n_positions = bucket
        mask = (torch.arange(bucket) <= positions.max()).int()[None]
        row = torch.zeros(1, dtype=torch.int32)
        logits, *caches = network(ids.int(), mask, positions.int(), row, torch.ones(1, 3))
        for cache, changed in zip(network.kv_mgr.past_key_values, caches, strict=True):
            cache.data = changed
        return logits[:, -1]

    length, first = len(prompt), BUCKETS[-2]
    ids = torch.nn.functional.pad(prompt, (0, first - length))[None]
    positions = torch.ones(1, first)
    positions[0, :length] = torch.arange(length)
    steps = [step(ids, positions, first)]
    for count, token in enumerate(tokens[:-1]):
        at = length + count
        bucket = next(x for x in BUCKETS if x > at)
        steps.append(step(token.view(1, 1), torch.tensor([[at]]), bucket))
    return torch.stack(steps, dim=1)


def main(
    nxdi: str, nxd: str, folder: str, reference: str, degree: str, batching: str = "static"
) -> None:
    """Prints the largest logit difference of the prompts and of the steps, and the agreement."""
    torch.set_num_threads(1)
    prepare(nxdi, nxd)
    from g4tool.backends.neuron.nxdi import (
        Gemma4InferenceConfig,
        Gemma4NeuronConfig,
        NeuronGemma4ForCausalLM,
    )
    from g4tool.backends.neuron.settings import NeuronOptions, neuron_settings
    from g4tool.backends.neuron.targets import chip

    expected = load_file(reference)
    rows = ["0"] if batching == "buckets" else ["0", "1"]
    prompts = [expected[f"{row}.prompt"] for row in rows]
    # As the command writes them, but for what a CPU cannot do, and logits instead of tokens.
    options = NeuronOptions(
        int(degree), len(rows), SEQUENCE, chip("trn1"), 1, "float32", serving=batching in SERVING
    )
    changes: dict[str, Any] = {"on_cpu": True}
    if batching != "serving":
        changes["on_device_sampling_config"] = None
    settings = Gemma4NeuronConfig(**{**neuron_settings(options), **changes})
    model = NeuronGemma4ForCausalLM(folder, Gemma4InferenceConfig.from_checkpoint(folder, settings))
    model.to_cpu()
    if batching == "buckets":
        network = model.models[0].model
        logits = generate_in_buckets(network, prompts[0], expected["0.tokens"])
    else:
        logits = generate(model, prompts, len(expected["0.tokens"]), batching in SERVING)
    wanted = torch.stack([expected[f"{row}.logits"] for row in rows])
    tokens = torch.stack([expected[f"{row}.tokens"] for row in rows])
    if torch.distributed.get_rank() == 0:
        same = int((logits.argmax(-1) == tokens).sum())
        figures: dict[str, float] = {"same_tokens": same, "tokens": tokens.numel()}
        if batching != "serving":
            difference = (logits - wanted).abs()
            figures["prefill"] = difference[:, 0].max().item()
            figures["decode"] = difference[:, 1:].max().item()
        print(json.dumps(figures), flush=True)
    # No rank may leave while another still reads from it.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
