"""Whether the weights inside a finished .pte are the bundle's, byte by byte."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from g4tool.backends.executorch.plain import PLAIN
from g4tool.backends.executorch.pte import read_program


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parts of every quantized leaf of a model that `make_plain` went over, by name."""
    return {
        f"{path}.{name}": part
        for path, leaf in model.named_modules()
        if isinstance(leaf, PLAIN)
        for name, part in leaf.named_buffers(recurse=False)
    }


def missing_weights(path: Path, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the weights that are not among the program's constants, bit for bit.

    Raises G4Error for a file that is no program.
    """
    held = set(_constants(path))
    return [name for name, tensor in weights.items() if _digest(_bytes(tensor)) not in held]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    # The file pads constants with zeros, so zeros at the end count as padding in both.
    return hashlib.sha256(data.rstrip(b"\0")).hexdigest()


def _constants(path: Path) -> Iterator[str]:
    program, data = read_program(path)
    table = program.constant_segment
    if not table.offsets:
        return
    segment = data.read(f"segment {table.segment_index}")
    for start, end in zip(table.offsets, [*table.offsets[1:], len(segment)], strict=True):
        yield _digest(bytes(segment[start:end]))
