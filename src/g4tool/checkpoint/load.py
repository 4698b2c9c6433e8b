"""Fills the canonical model from a checkpoint, one tensor at a time."""

from itertools import chain

import torch
from torch import nn

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.tensorfile import row_blocks
from g4tool.checkpoint.upload import reader
from g4tool.errors import G4Error
from g4tool.model.text import TextModel
from g4tool.progress import Progress, Report, silent


def load_text_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    report: Report = silent,
) -> TextModel:
    """The text model with the checkpoint's weights in `dtype` on `device`, in eval mode.

    Built on the meta device and filled tensor by tensor, so that the peak is the model and one
    tensor. Raises G4Error for a parameter that the checkpoint does not fill.
    """
    with torch.device("meta"):
        model = TextModel(checkpoint.config)
    total = sum(checkpoint.info(name).nbytes for name in checkpoint.names)
    done = 0
    with reader(device) as read:
        for name in checkpoint.names:
            places = checkpoint.pieces(name)
            if len(places) == 1 and checkpoint.info(name).dtype == dtype:
                value = read(checkpoint.open_files[places[0][0]], places[0][1], False)
                value = value.view(checkpoint.info(name).shape)
            else:
                value = _converted(checkpoint, name, dtype, device)
            _assign(model, name, value)
            done += checkpoint.info(name).nbytes
            report(Progress("load", done, total, "bytes", name))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise G4Error(f"{checkpoint.folder}: nothing fills the model's {name}.")
    return model.eval()


def _converted(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """By rows: a table that is dequantized as it is read would need twice its size or more."""
    info = checkpoint.info(name)
    value = torch.empty(info.shape, dtype=dtype, device=device)
    for start, stop in row_blocks(info.rows, info.row_nbytes):
        value[start:stop] = checkpoint.read(name, start, stop)
    return value


def _assign(model: nn.Module, name: str, value: torch.Tensor) -> None:
    # load_state_dict would walk the whole model for each tensor.
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)
