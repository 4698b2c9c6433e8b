"""A model over several ranks against the same model in one: memory, speed, and the same answers.

    torchrun --standalone --nproc-per-node 2 tools/bench_parallel.py --variant 31b --device cuda
    torchrun --standalone --nproc-per-node 2 tools/bench_parallel.py --model tiny-31b --device cpu

With --variant weights are random bfloat16, of that variant's sizes, the same however they are
divided; `--layers` keeps the first layers only. With --model they are a checkpoint's or a bundle's,
in float32. All ranks run together; then rank 0 runs the whole model alone while the others wait,
unless --no-alone says not to. Neither is recorded as a CUDA graph. Prints one JSON object.
"""

import argparse
import gc
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.generate.figures import clock, peak_memory
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS
from g4tool.parallel.cut import cut
from g4tool.parallel.group import World, rank_device, world
from g4tool.parallel.plan import Layout, make_plan
from g4tool.parallel.runtime import build_rank, join_ranks
from g4tool.stages.loading import load_folder
from g4tool.stages.ranks import load_rank


@dataclass
class Ran:
    """What one way of running gave. logits float32 [V] follow the prompt; ids are greedy."""

    weights_bytes: int
    peak_memory_bytes: int
    prefill_tok_s: float
    decode_tok_s: float
    logits: Tensor
    ids: list[int]

    def figures(self) -> dict[str, float]:
        """Speeds only: memory is each rank's own."""
        return {"prefill_tok_s": self.prefill_tok_s, "decode_tok_s": self.decode_tok_s}

    def memory(self) -> dict[str, int]:
        """Bytes of weights, and most bytes in use since they were there."""
        return {"weights_bytes": self.weights_bytes, "peak_memory_bytes": self.peak_memory_bytes}


def random_model(variant: str, layers: int | None, device: str, group: World | None) -> TextModel:
    """The model, or this rank's part of it, of random weights; whole, one weight at a time."""
    config = VARIANTS[variant]
    if layers is not None:
        config = replace(config, layers=config.layers[:layers])
    plan = make_plan(config, group.size if group else 1)
    rank = group.rank if group else 0
    model = build_rank(plan, rank)
    for name, split in plan.splits.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.empty(split.shape, dtype=torch.bfloat16, device=device)
        if whole.dim() == 1:
            whole.fill_(1.0)
        else:
            whole.normal_(std=split.shape[-1] ** -0.5, generator=generator)
        held = cut(split, Layout(), "weight", whole, rank)
        is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
        setattr(module, leaf, nn.Parameter(held, requires_grad=False) if is_parameter else held)
    return join_ranks(model.eval(), plan, group) if group else model.eval()


def loaded_model(folder: Path, device: str, group: World | None) -> TextModel:
    """The model, or this rank's part of it, of a checkpoint or bundle."""
    if group is not None:
        return load_rank(folder, torch.float32, device, group)[0]
    model, _ = load_folder(folder, torch.float32, device)
    assert isinstance(model, TextModel), "a checkpoint's or a bundle's folder"
    return model


@torch.inference_mode()
def run(model: TextModel, prompt: int, tokens: int, device: str) -> Ran:
    """Batch 1, greedy; speeds are the second prefill's and the median of three decodes'."""
    place = torch.device(device)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    model.allocate_cache(1, prompt + tokens)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    # Drawn on the host, so that every rank and every device has the same.
    ids = torch.randint(5, 1000, (1, prompt), generator=torch.Generator().manual_seed(0)).to(place)
    for _ in range(2):  # the first one warms up
        began = clock(place)
        logits = model.logits(model.hidden(ids, torch.tensor(0, device=place))[:, -1:])
        prefill = clock(place) - began
    first = logits.argmax(-1)
    times = []
    for _ in range(3):
        token, made = first, []
        began = clock(place)
        for step in range(tokens):
            made.append(token)
            position = torch.tensor(prompt + step, device=place)
            token = model.logits(model.hidden(token, position)).argmax(-1)
        times.append(clock(place) - began)
    return Ran(
        weights_bytes=weights,
        peak_memory_bytes=peak_memory(place),
        prefill_tok_s=prompt / prefill,
        decode_tok_s=tokens / sorted(times)[1],
        logits=logits[0, 0].float().cpu(),
        ids=torch.cat(made).flatten().tolist(),
    )


def main() -> None:
    """Parse, run on every rank, then on rank 0 alone, which prints."""
    given = _arguments()
    device = rank_device(given.device)

    def measured(group: World | None) -> Ran:
        if given.variant:
            model = random_model(given.variant, given.layers, device, group)
        else:
            folder = tiny_folder(given.model) if given.model in TINY else Path(given.model)
            model = loaded_model(folder, device, group)
        return run(model, given.prompt, given.tokens, device)

    with world(device) as group:
        together = measured(group)
        # What the model held is free only after its hooks are gone.
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        result: dict[str, Any] = {
            "what": given.variant or given.model,
            "layers": given.layers,
            "device": torch.cuda.get_device_name(device) if given.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "ranks": group.size if group else 1,
            "prompt": given.prompt,
            "tokens": given.tokens,
            "each_rank": _from_all(together.memory(), group),
            **together.figures(),
        }
        if group is not None and given.alone:
            if group.rank == 0:
                result |= _against(together, measured(None))
            dist.barrier()
        if group is None or group.rank == 0:
            print(json.dumps(result, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--variant", choices=sorted(VARIANTS))
    what.add_argument("--model", help="a folder or a tiny model's name")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def _from_all(mine: dict[str, int], group: World | None) -> list[dict[str, int]]:
    """Every rank's own, in order."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, mine)
    return everyone


def _against(together: Ran, alone: Ran) -> dict[str, Any]:
    difference = (together.logits - alone.logits).abs().max().item()
    same = [a == b for a, b in zip(together.ids, alone.ids, strict=True)]
    return {
        "alone": {**alone.memory(), **alone.figures()},
        "decode_ratio": together.decode_tok_s / alone.decode_tok_s,
        "logits_difference": difference,
        "same_tokens": same.index(False) if False in same else len(same),
    }


if __name__ == "__main__":
    main()
