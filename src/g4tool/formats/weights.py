"""A model's weights by canonical name and part, whatever holds them: a checkpoint or a bundle."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import CONFIG, open_files, read_json
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.errors import G4Error
from g4tool.formats.bundle import check_shards, is_bundle, read_bundle
from g4tool.formats.load import FLOATS, Place, places
from g4tool.formats.torchao import Quantized, Spec, Stored, part_specs
from g4tool.model.config import TextConfig


class Weights(Protocol):
    """Weights to read by rows. `folder` is where the tokenizer lies."""

    folder: Path
    config: TextConfig

    def stored(self, name: str) -> Quantized:
        """How a weight is stored: kind and group; its name and parts are the file's."""
        ...

    def specs(self, name: str) -> Mapping[str, Spec]:
        """Dtype and shape of each part: `weight`; or qdata, scale and, of int4, zero."""
        ...

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor:
        """Rows of dimension 0 of a part, in fresh memory."""
        ...

    def close(self) -> None:
        """Give the files back."""
        ...


def open_weights(folder: Path) -> Weights:
    """The weights of a checkpoint's, a view's or a bundle's folder.

    Raises G4Error for whatever makes it unusable.
    """
    return _Bundle(folder) if is_bundle(folder) else PlainWeights(open_checkpoint(folder))


class PlainWeights:
    """Weights of a checkpoint that is open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.folder = checkpoint.folder
        self.config = checkpoint.config

    def stored(self, name: str) -> Quantized:
        return Quantized(name, "plain", None, {"weight": name})

    def specs(self, name: str) -> Mapping[str, Spec]:
        info = self.checkpoint.info(name)
        return {"weight": (info.dtype, info.shape)}

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor:
        return self.checkpoint.read(name, start, stop)

    def close(self) -> None:
        self.checkpoint.close()


class _Bundle:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = read_bundle(folder)
        self.config = parse_text_config(read_json(folder / CONFIG), str(folder / CONFIG))
        self._shapes = text_tensors(self.config)
        with ExitStack() as stack:
            files = open_files(folder)
            for file in files.values():
                stack.enter_context(file)
            check_shards(files, facts)
            self._places: dict[str, Place] = places(folder, self.config, files)
            for name in self._places:
                self._check(name)
            self._files = stack.pop_all()

    def stored(self, name: str) -> Quantized:
        return self._places[name][1]

    def specs(self, name: str) -> Mapping[str, Spec]:
        file, stored = self._places[name]
        wanted = _kept_parts(stored)
        return {part: (file.info(key).dtype, file.info(key).shape) for part, key in wanted.items()}

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor:
        file, stored = self._places[name]
        return file.read(stored.parts[part], start, stop)

    def close(self) -> None:
        self._files.close()

    def _check(self, name: str) -> None:
        file, stored = self._places[name]
        dtype = file.info(stored.parts["weight" if stored.kind == "plain" else "scale"]).dtype
        try:
            specs = part_specs(Stored(name, stored.kind, self._shapes[name], dtype, stored.group))
        except ValueError as error:
            raise G4Error(f"{file.path}: {error}, the shape that config.json asks for.") from None
        for part, key in stored.parts.items():
            info = file.info(key)
            if dtype not in FLOATS or (info.dtype, info.shape) != specs[part]:
                raise G4Error(
                    f"{file.path}: {key} is {info.dtype} {list(info.shape)}, but config.json and "
                    f"the header ask for {specs[part][0]} {list(specs[part][1])}."
                )
        if stored.kind == "int8" and torch.any(file.read(stored.parts["zero"])):
            raise G4Error(
                f"{file.path}: {stored.name} is int8 with zero points, which g4 does not run."
            )


def _kept_parts(stored: Quantized) -> Mapping[str, str]:
    """An int8 weight's zero points are noughts, which nobody needs."""
    if stored.kind != "int8":
        return stored.parts
    return {part: key for part, key in stored.parts.items() if part != "zero"}
