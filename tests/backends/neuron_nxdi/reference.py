"""Greedy tokens and logits of transformers' Gemma 4, written to a file for another Python to read.

Run: python -m tests.backends.neuron_nxdi.reference CHECKPOINT FILE

CHECKPOINT is a folder; where there is none yet, its name is one of RANDOM, and a model of that sort
with random weights is saved there first, config.json in transformers' own newer spelling.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

# Two prompts of different lengths, both past the tiny models' window of 32 tokens.
LENGTHS = (45, 70)
NEW_TOKENS = 48

# What the tiny models lack: shared layers of plain width, and eight key-value heads beside one.
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "final_logit_softcapping": 30.0,
    "initializer_range": 0.12,
}
RANDOM: dict[str, dict[str, Any]] = {
    "random-e4b": {
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
    },
    "random-12b": {
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}


def save_random(name: str, folder: Path) -> None:
    """A model of RANDOM, its norms, scalars and all else random too."""
    torch.manual_seed(21)
    config = transformers.Gemma4TextConfig(**_COMMON, **RANDOM[name])
    model = transformers.Gemma4ForCausalLM(config)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.dim() == 1:
                value.uniform_(0.7, 1.1)
            assert value.isfinite().all(), key
    model.save_pretrained(folder)


def prompts(vocab_size: int) -> list[list[int]]:
    """Token ids that stand for nothing, the same each time; 2 is the beginning of a sequence."""
    generator = torch.Generator().manual_seed(20)
    return [
        [2, *torch.randint(10, vocab_size, (length - 1,), generator=generator).tolist()]
        for length in LENGTHS
    ]


@torch.inference_mode()
def main(folder: str, path: str) -> None:
    """Writes `path`: for each prompt its ids, the greedy tokens after it and their logits."""
    torch.set_num_threads(1)
    if not Path(folder).exists():
        save_random(Path(folder).name, Path(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = {}
    for number, prompt in enumerate(prompts(model.get_input_embeddings().weight.shape[0])):
        ids = torch.tensor([prompt])
        steps = []
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            steps.append(logits)
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        tensors[f"{number}.prompt"] = torch.tensor(prompt)
        tensors[f"{number}.tokens"] = ids[0, len(prompt) :].clone()
        tensors[f"{number}.logits"] = torch.cat(steps)
    save_file(tensors, path)
    print(json.dumps(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
