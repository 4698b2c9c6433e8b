"""Fills the canonical model from a bundle, its quantized leaves swapped for their twins."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from g4tool.checkpoint import names
from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import CONFIG, open_files, read_json
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.upload import Read, reader
from g4tool.errors import G4Error
from g4tool.formats.bundle import check_shards, is_bundle, read_bundle
from g4tool.formats.torchao import Quantized, Stored, part_specs, read_layout
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear
from g4tool.model.config import TextConfig
from g4tool.model.embedding import Embedding
from g4tool.model.moe import ExpertLinear
from g4tool.model.text import TextModel
from g4tool.progress import Progress, Report, silent

__all__ = ["is_bundle", "load_bundle"]

_TWINS: dict[tuple[str, type[nn.Module]], Callable[..., nn.Module]] = {
    ("int4", nn.Linear): Int4Linear,
    ("int4", ExpertLinear): Int4ExpertLinear,
    ("int8", nn.Linear): Int8Linear,
    ("int8", ExpertLinear): Int8ExpertLinear,
    ("int8", Embedding): Int8Embedding,
}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Place = tuple[SafetensorsFile, Quantized]


def load_bundle(
    folder: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    report: Report = silent,
) -> TextModel:
    """The text model with a bundle's weights on `device`, in eval mode.

    `dtype` is that of activations and of every weight that is not quantized. The model is built on
    the meta device and filled tensor by tensor. Raises G4Error for a folder without g4.json or of
    another convention, a file of another bundle, a weight that is missing, left over or of a wrong
    shape, and a form of quantization that g4 does not run.
    """
    folder = Path(folder)
    facts = read_bundle(folder)
    config = parse_text_config(read_json(folder / CONFIG), str(folder / CONFIG))
    files = open_files(folder)
    try:
        check_shards(files, facts)
        found = places(folder, config, files)
        with torch.device("meta"):
            model = TextModel(config)
        with reader(device) as read:
            for done, (name, shape) in enumerate(text_tensors(config).items(), start=1):
                file, stored = found[name]
                parts = _read(file, stored, shape, dtype, read)
                fill(model, name, stored, parts, dtype, file.path)
                report(Progress("load", done, len(found), "tensors", name))
    finally:
        for file in files.values():
            file.close()
    return model.eval()


def places(
    folder: Path, config: TextConfig, files: Mapping[str, SafetensorsFile]
) -> dict[str, Place]:
    """Canonical name -> file and form of each weight of the text model."""
    stored = {
        weight.name: (file, weight)
        for file in files.values()
        for weight in read_layout(str(file.path), file.metadata, file.tensors)
    }
    prefix = names.find_prefix(stored)
    if prefix is None:
        raise G4Error(f"{folder}: no file has the embedding, embed_tokens.weight.")
    mapped = names.map_names(stored, config, prefix)
    if mapped.unread:
        name = mapped.unread[0]
        raise G4Error(
            f"{stored[name][0].path}: nobody reads the tensor {name}; config.json describes "
            f"another model."
        )
    if mapped.unfilled:
        missing = names.hf_name(mapped.unfilled[0], prefix)
        raise G4Error(f"{folder}: no file has the tensor {missing}, which config.json asks for.")
    for name, keys in mapped.pieces.items():
        if len(keys) > 1:
            raise G4Error(
                f"{stored[keys[0]][0].path}: {name} is stored expert by expert; a bundle has "
                f"the experts of a layer in one tensor."
            )
    return {name: stored[key] for name, (key,) in mapped.pieces.items()}


def _read(
    file: SafetensorsFile,
    stored: Quantized,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    read: Read,
) -> dict[str, Tensor]:
    keys, own = check_parts(file, stored, shape)
    # What `fill` converts must be there by then.
    return {part: read(file, key, own != dtype) for part, key in keys.items()}


def check_parts(
    file: SafetensorsFile, stored: Quantized, shape: tuple[int, ...]
) -> tuple[dict[str, str], torch.dtype]:
    """Name in the file of each part that is needed of a weight, and the dtype of its scales.

    Raises G4Error for a part that is not what the weight's shape and its header ask for, and for
    int8 with zero points.
    """
    main = file.info(stored.parts["weight" if stored.kind == "plain" else "scale"])
    if main.dtype not in _FLOATS:
        raise G4Error(f"{file.path}: {main.name} is {main.dtype}, not a 16 or 32 bit float.")
    try:
        specs = part_specs(Stored(stored.name, stored.kind, shape, main.dtype, stored.group))
    except ValueError as error:
        raise G4Error(f"{file.path}: {error}, the shape that config.json asks for.") from None
    for part, key in stored.parts.items():
        info = file.info(key)
        if (info.dtype, info.shape) != specs[part]:
            dtype, wanted = specs[part]
            raise G4Error(
                f"{file.path}: {key} is {info.dtype} {list(info.shape)}, but config.json and the "
                f"header ask for {dtype} {list(wanted)}."
            )
    keys = dict(stored.parts)
    if stored.kind == "int8" and file.read(keys.pop("zero")).any():
        raise G4Error(
            f"{file.path}: {stored.name} is int8 with zero points, which g4 does not run."
        )
    return keys, main.dtype


def fill(
    model: nn.Module,
    name: str,
    stored: Quantized,
    parts: dict[str, Tensor],
    dtype: torch.dtype,
    where: Path,
) -> None:
    """Put a weight's parts into the model, its leaf swapped for the twin where it is quantized.

    `where` is for the G4Error that is raised for a form that g4 does not run.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if stored.kind == "plain":
        value = parts["weight"].to(dtype)
        is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
        setattr(module, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)
        return
    twin = _TWINS.get((stored.kind, type(module))) if leaf == "weight" else None
    if twin is None:
        raise G4Error(
            f"{where}: {stored.name} is stored as {stored.kind}, which g4 does not run for "
            f"weights of {type(module).__name__}; quantize again with another rule for it."
        )
    if twin is Int8Embedding:
        parts["scale"] = parts["scale"].to(dtype)
    owner, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(owner), attribute, twin(**parts))
