"""A model over several ranks: memory a rank, decode speed, and the same tokens as on one.

    torchrun --standalone --nproc-per-node 2 tools/bench_parallel.py --variant 31b --device cuda
    torchrun --standalone --nproc-per-node 2 tools/bench_parallel.py --model tiny-31b --device cpu

With --variant weights are random, of that variant's sizes; `--layers` keeps the first ones only.
Every rank makes its own part: no rank ever holds the whole. Run it with --nproc-per-node 1 for what
one device does. With --model the checkpoint's own weights are loaded, and rank 0 also runs the
whole model and compares greedy tokens in float32. Prints one JSON object.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.generate.figures import peak_memory
from g4tool.generate.loop import generate
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS
from g4tool.parallel.group import World, rank_device, world
from g4tool.parallel.plan import make_plan
from g4tool.parallel.runtime import build_rank, join_ranks
from g4tool.stages.loading import load_folder
from g4tool.stages.ranks import load_rank


def random_rank(variant: str, layers: int | None, device: str, group: World | None) -> TextModel:
    """A rank's part of a model with random bfloat16 weights."""
    config = VARIANTS[variant]
    if layers is not None:
        config = replace(config, layers=config.layers[:layers])
    plan = make_plan(config, group.size if group else 1)
    rank = group.rank if group else 0
    model = build_rank(plan, rank)
    torch.manual_seed(rank)
    for name, split in plan.splits.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        whole = torch.empty(split.rank_shape(rank), dtype=torch.bfloat16, device=device)
        if whole.dim() == 1:
            whole.fill_(1.0)
        else:
            whole.normal_(std=split.shape[-1] ** -0.5)
        is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
        setattr(module, leaf, nn.Parameter(whole, requires_grad=False) if is_parameter else whole)
    return join_ranks(model.eval(), plan, group) if group else model.eval()


@torch.inference_mode()
def speed(model: TextModel, prompt: int, tokens: int, device: str) -> dict[str, float]:
    """Tokens a second of a prompt and of single tokens: batch 1, greedy, the median of three."""
    model.allocate_cache(1, prompt + tokens)
    ids = torch.randint(5, 1000, (1, prompt), device=device, generator=_same_everywhere(device))
    for _ in range(2):  # the first one warms up
        began = _now(device)
        hidden = model.hidden(ids, torch.tensor(0, device=device))[:, -1:]
        token = model.logits(hidden).argmax(-1)
        prefill = _now(device) - began
    times = []
    for _ in range(3):
        began = _now(device)
        for step in range(tokens):
            position = torch.tensor(prompt + step, device=device)
            token = model.logits(model.hidden(token, position)).argmax(-1)
        times.append(_now(device) - began)
    return {"prefill_tok_s": prompt / prefill, "decode_tok_s": tokens / sorted(times)[1]}


def greedy(model: TextModel, tokens: int) -> list[list[int | None]]:
    """New tokens after a prompt of 200."""
    prompt = torch.randint(5, 1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    return list(generate(model, [prompt], max_new_tokens=tokens, prefill_chunk=64))


def _same_everywhere(device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """Parse, run on every rank, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--variant", choices=sorted(VARIANTS))
    what.add_argument("--model", help="a folder or a tiny model's name")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    device = rank_device(given.device)
    with world(device) as group:
        result: dict[str, Any] = {"ranks": group.size if group else 1, "device": given.device}
        if given.variant:
            model = random_rank(given.variant, given.layers, device, group)
        else:
            folder = tiny_folder(given.model) if given.model in TINY else Path(given.model)
            model = _loaded(folder, device, group)
        held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        result["weights_bytes_per_rank"] = held
        if given.model:
            result["tokens"] = greedy(model, given.tokens)
            if group is None or group.rank == 0:
                result["same_tokens"] = greedy(
                    _loaded(folder, device, None), given.tokens
                ) == result.pop("tokens")
        result |= speed(model, given.prompt, given.tokens, device)
        result["peak_memory_bytes_rank_0"] = peak_memory(torch.device(device))
        if group is not None:
            dist.barrier()
        if group is None or group.rank == 0:
            print(json.dumps(result, indent=2))


def _loaded(folder: Path, device: str, group: World | None) -> TextModel:
    if group is None:
        model, _ = load_folder(folder, torch.float32, device)
        assert isinstance(model, TextModel), "a checkpoint's or a bundle's folder"
        return model
    return load_rank(folder, torch.float32, device, group)[0]


if __name__ == "__main__":
    main()
