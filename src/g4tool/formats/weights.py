"""A model's weights by canonical name and part, whatever holds them: a checkpoint or a bundle."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from torch import Tensor

from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import CONFIG, open_files, quantization_section, read_json
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.names import is_extra
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.formats.bundle import Layout, check_shards, layout_of, lineage_of, read_bundle
from g4tool.formats.compressed_tensors import check_config
from g4tool.formats.leaf import Leaf, Make, leaves, with_head
from g4tool.formats.read_compressed import packed_leaf, packed_weights
from g4tool.formats.read_torchao import stored_weights, torchao_leaf
from g4tool.formats.torchao import Quantized, Spec
from g4tool.model.config import TextConfig


class Weights(Protocol):
    """Weights to read by rows. `folder` is where the tokenizer lies.

    `extras` are the keys of the towers, which are no weights of the text model.
    """

    folder: Path
    config: TextConfig
    extras: list[str]

    def stored(self, name: str) -> Quantized:
        """How a weight is stored: kind and group; its name is the file's."""
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
    layout = layout_of(folder)
    if layout is None:
        return PlainWeights(open_checkpoint(folder))
    return QuantizedWeights(folder, layout)


class PlainWeights:
    """Weights of a checkpoint that is open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.folder = checkpoint.folder
        self.config = checkpoint.config
        self.extras = checkpoint.extras

    def stored(self, name: str) -> Quantized:
        return Quantized(name, "plain", None, {"weight": name})

    def specs(self, name: str) -> Mapping[str, Spec]:
        info = self.checkpoint.info(name)
        return {"weight": (info.dtype, info.shape)}

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor:
        return self.checkpoint.read(name, start, stop)

    def close(self) -> None:
        self.checkpoint.close()


class QuantizedWeights:
    """Weights of a bundle, or of another maker's quantized checkpoint; checked when opened."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        facts = read_bundle(folder) if layout == "g4" else lineage_of(folder)
        raw = read_json(folder / CONFIG)
        config = parse_text_config(raw, str(folder / CONFIG))
        with ExitStack() as stack:
            files = open_files(folder)
            for file in files.values():
                stack.enter_context(file)
            check_shards(files, facts)
            self.extras = [key for file in files.values() for key in file.tensors if is_extra(key)]
            kinds, places, make = _stored(folder, files, layout, quantization_section(raw))
            self.config = with_head(config, kinds)
            self.leaves: dict[str, Leaf] = leaves(folder, self.config, places, make)
            self._files = stack.pop_all()

    def stored(self, name: str) -> Quantized:
        return self.leaves[name].stored

    def specs(self, name: str) -> Mapping[str, Spec]:
        return self.leaves[name].specs

    def read(self, name: str, part: str, start: int, stop: int) -> Tensor:
        return self.leaves[name].read(part, start, stop)

    def close(self) -> None:
        self._files.close()


def _stored(
    folder: Path,
    files: Mapping[str, SafetensorsFile],
    layout: Layout,
    section: Mapping[str, object],
) -> tuple[dict[str, str], dict[str, Path], Make]:
    """Kind and file of each weight by its name in the files, and what makes a leaf of it."""
    where = {name: file.path for file in files.values() for name in file.tensors}
    if layout == "compressed-tensors":
        if not section:
            raise G4Error(
                f"{folder / CONFIG} has no quantization_config, but {next(iter(where.values()))} "
                f"has packed weights; take config.json from where the weights are from."
            )
        check_config(section, str(folder / CONFIG))
        packed = packed_weights(files)
        kinds = {name: "plain" if "weight" in w.parts else "packed" for name, w in packed.items()}
        places = {name: next(iter(w.parts.values()))[0].path for name, w in packed.items()}
        return kinds, places, packed_leaf(packed, section, folder / CONFIG)
    stored = stored_weights(folder, files)
    kinds = {name: str(weight.kind) for name, weight in stored.items()}
    places = {name: where[next(iter(w.parts.values()))] for name, w in stored.items()}
    return kinds, places, torchao_leaf(stored, files, signed=layout == "torchao")
