"""What a trained model is measured by: held-out perplexity, baselines, and its layers' numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from g4tool.model.text import TextModel
from tiny.arrays import Ids
from tiny.batches import SHARES
from tiny.model import row_losses
from tiny.ngram import Trigram, unigram

BOS = 2
WINDOW, STRIDE = 512, 256
GROUP = 32


@dataclass(frozen=True)
class Score:
    """Summed loss in nats over `tokens` tokens that stand for `size` bytes of text."""

    nats: float
    tokens: int
    size: int

    @property
    def per_token(self) -> float:
        """Perplexity of a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def per_byte(self) -> float:
        """Perplexity of a byte."""
        return math.exp(self.nats / self.size)


def held_out(packed: Mapping[str, Ids]) -> list[Ids]:
    """The held-out text of every source, without its <bos>."""
    return [packed[f"held-out/{source}"][1:] for source in SHARES if source != "chat"]


def model_score(model: TextModel, texts: list[Ids], size: int) -> Score:
    """Every token scored once, after <bos> and, from the second window on, STRIDE more tokens."""
    nats = 0.0
    for ids in texts:
        for start in range(0, len(ids), STRIDE):
            window = ids[max(0, start + STRIDE - WINDOW) : start + STRIDE]
            scored = min(STRIDE, len(ids) - start)
            rows = torch.from_numpy(np.append(BOS, window).astype(np.int64))[None]
            nats += float(row_losses(model, rows)[0, -scored:].double().sum())
    return Score(nats, sum(map(len, texts)), size)


def baseline_scores(packed: Mapping[str, Ids], vocab: int, size: int) -> dict[str, Score]:
    """Unigram and trigram, counted on the training text (conversations apart)."""
    train = np.concatenate([packed[f"train/{s}"] for s in SHARES if s != "chat"]).astype(np.int64)
    texts = [ids.astype(np.int64) for ids in held_out(packed)]
    single, triple = unigram(train, vocab), Trigram(train, vocab)
    nats = {"unigram": 0.0, "3-gram": 0.0}
    for ids in texts:
        before = np.concatenate(([BOS, BOS], ids))
        nats["unigram"] -= float(np.log(single[ids]).sum())
        found = triple.probabilities(before[:-2], before[1:-1], ids)
        nats["3-gram"] -= float(np.log(found).sum())
    tokens = sum(map(len, texts))
    return {name: Score(value, tokens, size) for name, value in nats.items()}


@dataclass(frozen=True)
class LayerRow:
    """Numbers of one kind of matrix, the extreme over layers of each.

    `weight_peak`: largest |weight| over root mean square. `channel`: root mean square of the
    loudest input channel over the median one, in activations. `activation_peak`: largest
    |activation| over root mean square. `scales`: 99th over 1st percentile of the ranges of groups
    of GROUP weights, what an int4 scale is made from.
    """

    kind: str
    weight_peak: float
    channel: float
    activation_peak: float
    scales: float


def layer_table(model: TextModel, rows: Tensor) -> list[LayerRow]:
    """A row for each kind of linear matrix, measured on inputs int64 [N, S]."""
    inputs: dict[str, tuple[float, float]] = {}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0].flatten(0, -2).float()
            loud = x.square().mean(0).sqrt()
            inputs[name] = (
                float(loud.max() / loud.median().clamp(min=1e-9)),
                float(x.abs().max() / x.square().mean().sqrt()),
            )

        return module.register_forward_pre_hook(note)

    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [watch(name, module) for name, module in linears.items()]
    with torch.no_grad():
        model.hidden(rows)
    for hook in hooks:
        hook.remove()
    table: dict[str, list[tuple[float, float, float, float]]] = {}
    for name, module in linears.items():
        peak, scales = weight_numbers(module.weight.detach())
        kind = name.removeprefix("layers.").split(".", 1)[-1].removeprefix("self_attn.")
        table.setdefault(kind, []).append((peak, *inputs[name], scales))
    for name, weight in model.named_parameters():
        if name.startswith("embed_tokens") or ".experts." in name:
            peak, scales = weight_numbers(weight.detach())
            nothing = math.nan
            kind = name.removesuffix(".weight").rsplit(".layers.")[-1].split(".", 2)[-1]
            table.setdefault(kind, []).append((peak, nothing, nothing, scales))
    return [LayerRow(kind, *map(max, zip(*rows, strict=True))) for kind, rows in table.items()]


def weight_numbers(weight: Tensor) -> tuple[float, float]:
    """Peak over root mean square, and spread of group ranges, of a matrix [..., out, in]."""
    values = weight.float()
    peak = values.abs().max() / values.square().mean().sqrt()
    groups = values.reshape(-1, GROUP)
    ranges = groups.amax(1) - groups.amin(1)
    # Group ranges can be more than torch.quantile takes.
    ordered = ranges.sort().values
    low = ordered[int(0.01 * (len(ordered) - 1))].clamp(min=1e-9)
    return float(peak), float(ordered[int(0.99 * (len(ordered) - 1))] / low)
