"""A model's weights by canonical name and part, whatever holds them: a checkpoint or a bundle."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from torch import Tensor

from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import CONFIG, open_files, read_json
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.formats.bundle import check_shards, is_bundle, read_bundle
from g4tool.formats.load import Place, check_parts, places
from g4tool.formats.torchao import Quantized, Spec
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
        with ExitStack() as stack:
            files = open_files(folder)
            for file in files.values():
                stack.enter_context(file)
            check_shards(files, facts)
            self._places: dict[str, Place] = places(folder, self.config, files)
            shapes = text_tensors(self.config)
            self._keys = {
                name: check_parts(file, stored, shapes[name])[0]
                for name, (file, stored) in self._places.items()
            }
            self._files = stack.pop_all()

    def stored(self, name: str) -> Quantized:
        return self._places[name][1]

    def specs(self, name: str) -> Mapping[str, Spec]:
        file, _ = self._places[name]
        infos = {part: file.info(key) for part, key in self._keys[name].items()}
        return {part: (info.dtype, info.shape) for part, info in infos.items()}

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor:
        file, _ = self._places[name]
        return file.read(self._keys[name][part], start, stop)

    def close(self) -> None:
        self._files.close()
