"""A weight as a leaf of the model takes it, whatever layout the files have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from g4tool.checkpoint import names
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.formats.torchao import Quantized, Spec
from g4tool.model.config import TextConfig

Place = tuple[SafetensorsFile, str]
"""A file and the name of a tensor in it."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_EMBEDDINGS = ("embed_tokens.weight", "embed_tokens_per_layer.weight")
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Leaf:
    """One weight: its kind and group, and the dtype and shape of each part the leaf takes.

    `stored.name` is the file's, `where` the file to name in messages. `places` says where a part
    lies just as the leaf takes it; rows of the other parts are what `make` gives for part, start
    and stop.
    """

    where: Path
    stored: Quantized
    specs: Mapping[str, Spec]
    places: Mapping[str, Place] = field(default_factory=dict)
    make: Callable[[str, int, int], Tensor] | None = None

    def read(self, part: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start:stop of dimension 0 of a part, in fresh memory.

        Raises ValueError for rows that it does not have.
        """
        if part in self.places:
            file, key = self.places[part]
            return file.read(key, start, stop)
        rows = self.specs[part][1][0]
        stop = rows if stop is None else stop
        if self.make is None or not 0 <= start <= stop <= rows:
            raise ValueError(f"rows {start}:{stop} of {part} of {self.stored.name}, of {rows}")
        return self.make(part, start, stop)


Make = Callable[[str, tuple[int, ...], bool], Leaf]
"""A weight's name in the files, its shape, whether it is an embedding -> its leaf."""


def leaves(
    folder: Path, config: TextConfig, stored: Mapping[str, Path], make: Make
) -> dict[str, Leaf]:
    """Every weight of the text model by canonical name.

    `stored` has the weights' names in the layout of a checkpoint, each with its file. Experts
    that lie one by one are put together. Raises G4Error for a weight that is missing or left over.
    """
    mapped = _assigned(folder, config, stored)
    found: dict[str, Leaf] = {}
    for name, shape in text_tensors(config).items():
        keys = mapped[name]
        each = shape if len(keys) == 1 else (shape[0] * shape[1] // len(keys), *shape[2:])
        parts = [make(key, each, name in _EMBEDDINGS) for key in keys]
        found[name] = parts[0] if len(keys) == 1 else _stacked(name, parts, shape[0])
    return found


def with_head(config: TextConfig, kinds: Mapping[str, str]) -> TextConfig:
    """The config, untied where the weights, kinds by name in the files, have a head of their own.

    A plain copy of a plain embedding is none. Whatever config.json says of ties, it was copied from
    the model that was quantized.
    """
    prefix = names.find_prefix(kinds)
    own = kinds.get(_HEAD)
    if own is None or prefix is None:
        return config
    embedding = kinds[f"{prefix}{_EMBEDDINGS[0]}"]
    untied = not own == embedding == "plain"
    return replace(config, tie_word_embeddings=False) if untied else config


def plain_leaf(file: SafetensorsFile, key: str, shape: tuple[int, ...]) -> Leaf:
    """A weight that is not quantized."""
    info = check_float(file, key)
    check_tensor(file, key, (info, shape))
    stored = Quantized(key, "plain", None, {"weight": key})
    return Leaf(file.path, stored, {"weight": (info, shape)}, {"weight": (file, key)})


def check_float(file: SafetensorsFile, key: str) -> torch.dtype:
    """The dtype of a tensor. Raises G4Error where it is no float of 16 or 32 bit."""
    dtype = file.info(key).dtype
    if dtype not in _FLOATS:
        raise G4Error(f"{file.path}: {key} is {dtype}, not a 16 or 32 bit float.")
    return dtype


def check_tensor(file: SafetensorsFile, key: str, spec: Spec) -> None:
    """Raise G4Error for a tensor of another dtype or shape."""
    info = file.info(key)
    dtype, shape = spec
    if (info.dtype, info.shape) != (dtype, tuple(shape)):
        raise G4Error(
            f"{file.path}: {key} is {info.dtype} {list(info.shape)}, but config.json and the "
            f"header ask for {dtype} {list(shape)}."
        )


def _assigned(
    folder: Path, config: TextConfig, stored: Mapping[str, Path]
) -> dict[str, tuple[str, ...]]:
    prefix = names.find_prefix(stored)
    if prefix is None:
        raise G4Error(f"{folder}: no file has the embedding, embed_tokens.weight.")
    mapped = names.map_names(stored, config, prefix)
    if mapped.unfilled:
        missing = names.hf_name(mapped.unfilled[0], prefix)
        experts = ", nor that of every expert" if ".experts." in missing else ""
        raise G4Error(
            f"{folder}: no file has the tensor {missing}{experts}, which config.json asks for."
        )
    if mapped.unread:
        name = mapped.unread[0]
        raise G4Error(
            f"{stored[name]}: nobody reads the tensor {name}; config.json describes another model."
        )
    return mapped.pieces


def _stacked(name: str, parts: Sequence[Leaf], experts: int) -> Leaf:
    """A weight of experts [E, …] whose matrices, E or twice as many, lie one by one."""
    first = parts[0]
    kind, each = first.stored.kind, len(parts) // experts
    for leaf in parts:
        alike = (leaf.stored.kind, leaf.stored.group, leaf.specs)
        if alike != (kind, first.stored.group, first.specs):
            raise G4Error(
                f"{leaf.where}: {leaf.stored.name} is not stored as {first.stored.name} is; "
                f"g4 takes the experts of a layer only if they are alike."
            )

    def side(part: str) -> int:
        # Where the rows of the weight are: an int4 weight's scales lie transposed.
        return -1 if kind == "int4" and part != "qdata" else 0

    def spec(part: str) -> Spec:
        dtype, shape = first.specs[part]
        sizes = list(shape)
        sizes[side(part)] *= each
        return dtype, (experts, *sizes)

    def make(part: str, start: int, stop: int) -> Tensor:
        rows = [leaf.read(part) for leaf in parts[start * each : stop * each]]
        pairs = [torch.cat(rows[i : i + each], side(part)) for i in range(0, len(rows), each)]
        return torch.stack(pairs)

    stored = Quantized(name, kind, first.stored.group, {})
    return Leaf(first.where, stored, {part: spec(part) for part in first.specs}, make=make)
