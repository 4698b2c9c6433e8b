"""Fills the canonical model from a bundle, its quantized leaves swapped for their twins."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from g4tool.checkpoint.upload import Read, reader
from g4tool.errors import G4Error
from g4tool.formats.bundle import is_bundle, layout_of
from g4tool.formats.leaf import Leaf
from g4tool.formats.torchao import Quantized
from g4tool.formats.weights import QuantizedWeights
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear
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


def load_bundle(
    folder: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    report: Report = silent,
) -> TextModel:
    """The text model with a bundle's or another maker's weights on `device`, in eval mode.

    `dtype` is that of activations and of every weight that is not quantized. The model is built on
    the meta device and filled tensor by tensor. Raises G4Error for a folder of another convention,
    a file of another bundle, a weight that is missing, left over or of a wrong shape, and a form of
    quantization that g4 does not run.
    """
    folder = Path(folder)
    weights = QuantizedWeights(folder, layout_of(folder) or "g4")
    try:
        with torch.device("meta"):
            model = TextModel(weights.config)
        with reader(device) as read:
            for done, (name, leaf) in enumerate(weights.leaves.items(), start=1):
                parts = {part: _read(leaf, part, dtype, device, read) for part in leaf.specs}
                fill(model, name, leaf.stored, parts, dtype, leaf.where)
                report(Progress("load", done, len(weights.leaves), "tensors", name))
    finally:
        weights.close()
    return model.eval()


def _read(
    leaf: Leaf, part: str, dtype: torch.dtype, device: torch.device | str, read: Read
) -> Tensor:
    if part not in leaf.places:
        return leaf.read(part).to(device)
    own = leaf.specs["weight" if leaf.stored.kind == "plain" else "scale"][0]
    # What `fill` converts must be there by then.
    return read(*leaf.places[part], own != dtype)


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
    scale = parts["scale"]
    # One of the rows' dtype may still be on its way to the device, and is right as it is.
    if twin is Int8Embedding and scale.dtype != dtype:
        # It tells the rows' dtype, where it can be had in that without rounding.
        narrow = scale.to(dtype)
        if torch.equal(narrow.to(scale.dtype), scale):
            parts["scale"] = narrow
        else:
            parts["like"] = narrow.new_empty(0)
    owner, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(owner), attribute, twin(**parts))
