"""Whether the weights inside a finished .pte are the bundle's, byte by byte."""

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from g4tool.backends.executorch.library import require_exporter
from g4tool.backends.executorch.plain import PLAIN
from g4tool.errors import G4Error


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
    require_exporter()
    from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
    from executorch.exir._serialize._program import _get_extended_header

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _get_extended_header(data[:64])
        if header is None or not header.is_valid():
            raise G4Error(f"{path} is no ExecuTorch program with segments; export the model again.")
        program = _flatbuffer_to_program(data[: header.program_size])
        table = program.constant_segment
        if not table.offsets:
            return
        segment = program.segments[table.segment_index]
        base = header.segment_base_offset + segment.offset
        ends = [*table.offsets[1:], segment.size]
        for start, end in zip(table.offsets, ends, strict=True):
            yield _digest(data[base + start : base + end])
