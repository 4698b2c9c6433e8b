"""Where a candidate's error arises: matrix by matrix, layer by layer."""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from g4tool.evaluate.leaves import leaves, place, scheme, swapped, twin, value_blocks
from g4tool.evaluate.scores import Reference, compare
from g4tool.evaluate.summary import fidelity
from g4tool.model.text import TextModel
from g4tool.progress import Progress, Report, silent


@dataclass(frozen=True)
class WeightError:
    """A matrix's relative error, ||w' - w|| / ||w||; `layer` is None outside the layers."""

    name: str
    layer: int | None
    kind: str
    scheme: str
    error: float


@dataclass(frozen=True)
class LayerNoise:
    """The ratio of a layer's output to its error in dB, both fed the reference's input.

    None where there is no error at all.
    """

    layer: int
    sqnr: float | None


@dataclass(frozen=True)
class Alone:
    """Mean KL in nats a token when only this part of the reference is the candidate's."""

    part: str
    kl: float


def part_of(layer: int | None) -> str:
    """The name of the part of a model that a matrix belongs to."""
    return "outside the layers" if layer is None else f"layer {layer}"


def weight_errors(reference: TextModel, candidate: TextModel) -> list[WeightError]:
    """Every matrix's error, in model order; equal matrices have 0."""
    others = leaves(candidate)
    result = []
    for name, module in leaves(reference).items():
        if name not in others:
            continue
        energy, error = 0.0, 0.0
        for a, b in zip(value_blocks(module), value_blocks(others[name]), strict=True):
            energy += float(a.double().square().sum())
            error += float((b - a).double().square().sum())
        layer, kind = place(name)
        relative = math.sqrt(error / energy) if energy else 0.0
        result.append(WeightError(name, layer, kind, scheme(others[name]), relative))
    return result


@torch.inference_mode()
def layer_noise(
    reference: Reference, candidate: TextModel, report: Report = silent
) -> list[LayerNoise]:
    """Output SQNR of every layer over all positions of the reference's windows."""
    model, windows = reference.eager, reference.windows
    signal = [0.0] * model.config.num_layers
    noise = [0.0] * model.config.num_layers

    def listen(index: int, other: nn.Module, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            ours, theirs = output[0].double(), other(*inputs)[0].double()
            signal[index] += float(ours.square().sum())
            noise[index] += float((theirs - ours).square().sum())

        return layer.register_forward_hook(hook)

    pairs = zip(candidate.layers, model.layers, strict=True)
    handles = [listen(index, *pair) for index, pair in enumerate(pairs)]
    try:
        for done, window in enumerate(windows, start=1):
            model.hidden(torch.tensor([window.ids[:-1]], device=model.device))
            report(Progress("layers", done, len(windows), "windows"))
    finally:
        for handle in handles:
            handle.remove()
    return [
        LayerNoise(index, 10 * math.log10(s / n) if n else None)
        for index, (s, n) in enumerate(zip(signal, noise, strict=True))
    ]


def alone(reference: Reference, candidate: TextModel, report: Report = silent) -> list[Alone]:
    """Each layer, and what is outside the layers, quantized alone: in model order."""
    parts: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    theirs = leaves(candidate)
    for name in leaves(reference.eager):
        layer, _ = place(name)
        if name in theirs:
            parts[part_of(layer)][name] = theirs[name]
    # The reference's scores are made from its own head, even while another one is in its place.
    model = twin(reference.eager)
    result = []
    for done, (part, modules) in enumerate(parts.items(), start=1):
        with swapped(model, modules):
            found = compare(reference, model)
        result.append(Alone(part, fidelity(reference, found).kl_mean))
        report(Progress("layers alone", done, len(parts), "parts", part))
    return result
