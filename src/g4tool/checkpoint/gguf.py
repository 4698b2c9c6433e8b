"""A GGUF file as a source: its tensors under published names, dequantized by rows when read."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from g4tool.checkpoint import gguf_config, gguf_names
from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.gguf_header import GgufTensor, gguf_package, read_header
from g4tool.checkpoint.gguf_small_files import token_ids
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.names import TEXT_PREFIX, hf_name
from g4tool.checkpoint.tensorfile import SafetensorsFile, TensorInfo, row_blocks
from g4tool.errors import G4Error

SUFFIX = ".gguf"
_EMBEDDING = "embed_tokens.weight"
# Types whose values lie as torch has them, by their numbers in the format; others are blocks.
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# Bytes read and dequantized at a time: the package's intermediate values are some ten times that.
_BLOCK = 1 << 22


class GgufFile(SafetensorsFile):
    """An open GGUF file of a Gemma 4 text model, which reads as a file of the published layout.

    Quantized tensors read as float32. The experts' gate and up projections are one tensor, however
    the file has them. `header` is the file's own, `rope_factors` float32, its `rope_freqs`. Raises
    G4Error for whatever `read_header` refuses, another architecture, a tensor that no Gemma 4 text
    model has, half a pair of projections, and a missing `rope_freqs`.
    """

    def __init__(self, path: Path) -> None:
        # Not the base's: there is another header to parse.
        self.path = path
        self._descriptor = -1
        self.header = read_header(path)
        gguf_config.check_architecture(path, self.header.metadata)
        self.size, self.header_sha256 = self.header.size, self.header.sha256
        self.metadata = {}
        self._pieces = _by_published_name(path, self.header.tensors)
        self.tensors = {name: _info(name, pieces) for name, pieces in self._pieces.items()}
        self._descriptor = os.open(path, os.O_RDONLY)
        factors = self.header.tensors.get(gguf_names.ROPE_FREQS)
        if factors is None:
            raise G4Error(f"{path} has no tensor {gguf_names.ROPE_FREQS}, which Gemma 4 needs.")
        self.rope_factors = self._rows(factors, 0, factors.shape[0]).float()

    def read(
        self, name: str, start: int = 0, stop: int | None = None, pinned: bool = False
    ) -> Tensor:
        """Rows start:stop of dimension 0 of a tensor, in fresh memory."""
        info = self.info(name)
        stop = info.rows if stop is None else stop
        if not 0 <= start <= stop <= info.rows:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {info.rows}")
        result = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype, pin_memory=pinned)
        place = 0
        for piece in self._pieces[name]:
            part = result
            if len(self._pieces[name]) > 1:
                part = result.narrow(1, place, piece.shape[1])
                place += piece.shape[1]
            row_nbytes = piece.nbytes // max(1, piece.shape[0])
            for first, last in row_blocks(stop - start, row_nbytes, _BLOCK):
                part[first:last] = self._rows(piece, start + first, start + last)
        return result

    def read_bytes(self, name: str, start: int, into: Tensor) -> None:
        """Fill `into`, flat uint8 on the CPU, with the bytes that `read` gives from `start` on."""
        row = self.info(name).row_nbytes
        first, last = start // row, -(-(start + len(into)) // row)
        values = self.read(name, first, last).reshape(-1).view(torch.uint8)
        into.copy_(values[start - first * row :][: len(into)])

    def _rows(self, piece: GgufTensor, start: int, stop: int) -> Tensor:
        row_nbytes = piece.nbytes // max(1, piece.shape[0])
        stored = torch.empty((stop - start) * row_nbytes, dtype=torch.uint8)
        if len(stored):
            self._fill(stored.numpy().data, piece.offset + start * row_nbytes, piece.name)
        shape = (stop - start, *piece.shape[1:])
        if piece.kind in _PLAIN:
            return stored.view(_PLAIN[piece.kind]).view(shape)
        gguf = gguf_package()
        lines = stored.numpy().reshape(-1, piece.nbytes * piece.shape[-1] // _count(piece))
        values = gguf.quants.dequantize(lines, gguf.GGMLQuantizationType(piece.kind))
        return torch.from_numpy(values).view(shape)


def open_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file; its `folder` is the file.

    Raises G4Error, naming file and tensor or key, for whatever makes it unusable.
    """
    file = GgufFile(path)
    embedding = file.tensors.get(hf_name(_EMBEDDING, TEXT_PREFIX))
    if embedding is None:
        raise G4Error(f"{path} has no tensor {gguf_names.gguf_name(_EMBEDDING)}.")
    metadata = file.header.metadata
    known = (gguf_names.canonical_name(name) for name in file.header.tensors)
    config = gguf_config.parse_metadata(
        path, metadata, {name for name in known if name}, file.rope_factors, embedding.rows
    )
    try:
        raw_config = to_hf_config(config)
    except ValueError as error:
        raise G4Error(f"{path}: {error}.") from None
    raw_config |= token_ids(path, metadata)
    return Checkpoint(path, raw_config, {path.name: file})


def _by_published_name(
    path: Path, tensors: Mapping[str, GgufTensor]
) -> dict[str, tuple[GgufTensor, ...]]:
    """Published key -> what it is put together from along dimension 1."""
    pieces: dict[str, tuple[GgufTensor, ...]] = {}
    for name, tensor in tensors.items():
        if name == gguf_names.ROPE_FREQS:
            continue
        canonical = gguf_names.canonical_name(name)
        if canonical is None:
            raise G4Error(f"{path}: no Gemma 4 text model has the tensor {name}.")
        parts: tuple[GgufTensor, ...] = (tensor,)
        pair = gguf_names.expert_pair(name)
        if pair is not None:
            if not all(half in tensors for half in pair):
                raise G4Error(f"{path} has {name} without the other one of {' and '.join(pair)}.")
            gate, up = (tensors[half] for half in pair)
            if len(gate.shape) != 3 or gate.shape != up.shape:
                raise G4Error(f"{path}: {' and '.join(pair)} are not of one shape, by expert.")
            parts = (gate, up)
        key = hf_name(canonical, TEXT_PREFIX)
        if pieces.get(key, parts) != parts:
            raise G4Error(f"{path} has {canonical} twice, one of them as {name}.")
        pieces[key] = parts
    return pieces


def _info(name: str, pieces: tuple[GgufTensor, ...]) -> TensorInfo:
    shape = pieces[0].shape
    if len(pieces) > 1:
        shape = (shape[0], sum(piece.shape[1] for piece in pieces), *shape[2:])
    dtypes = {_PLAIN.get(piece.kind, torch.float32) for piece in pieces}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return TensorInfo(name, dtype, shape, pieces[0].offset)


def _count(piece: GgufTensor) -> int:
    return max(1, torch.Size(piece.shape).numel())
