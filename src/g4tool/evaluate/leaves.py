"""The matrices of a model, plain or quantized: where they are and what values they stand for."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear, dequantize_int4
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear, dequantize_int8
from g4tool.model.embedding import Embedding
from g4tool.model.moe import ExpertLinear

_PLAIN = (nn.Linear, Embedding, ExpertLinear)
_INT4 = (Int4Linear, Int4ExpertLinear)
_INT8 = (Int8Linear, Int8Embedding, Int8ExpertLinear)

# Rows are handled in blocks of this many weights.
_BLOCK = 2**22
Model = TypeVar("Model", bound=nn.Module)

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """Every matrix's module by its canonical name without `.weight`, in model order."""
    kinds = (*_PLAIN, *_INT4, *_INT8)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def place(name: str) -> tuple[int | None, str]:
    """`layers.3.mlp.up_proj` -> (3, "mlp.up_proj"); a name outside the layers has None."""
    found = _LAYER.match(name)
    return (int(found[1]), found[2]) if found else (None, name)


def scheme(module: nn.Module) -> str:
    """int4, int8, or the dtype of a plain matrix."""
    if isinstance(module, _INT4):
        return "int4"
    if isinstance(module, _INT8):
        return "int8"
    weight = module.weight
    assert isinstance(weight, Tensor)
    return str(weight.dtype).removeprefix("torch.")


def value_blocks(module: nn.Module) -> Iterator[Tensor]:
    """The matrix's values, fp32, a few rows (of 3-D ones: experts) at a time."""
    main = module.weight if isinstance(module, _PLAIN) else module.qdata
    assert isinstance(main, Tensor)
    step = max(1, _BLOCK // main[0].numel())
    for start in range(0, len(main), step):
        yield _values(module, main, slice(start, min(start + step, len(main))))


def _values(module: nn.Module, main: Tensor, rows: slice) -> Tensor:
    if isinstance(module, Int4Linear):
        scale, zero = module.scale[:, rows], module.zero[:, rows]
        return dequantize_int4(main[rows], scale, zero, torch.float32)
    if isinstance(module, Int4ExpertLinear):
        return dequantize_int4(main[rows], module.scale[rows], module.zero[rows], torch.float32)
    if isinstance(module, _INT8):
        return dequantize_int8(main[rows], module.scale[rows], torch.float32)
    return main[rows].float()


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Makes `module` the submodule `name` of the model."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


def twin(model: Model) -> Model:
    """A second model on the same tensors; its modules can be replaced, the first keeps its own."""
    tensors = chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


@contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """`model` with other submodules, by name, for as long as the context lasts."""
    own = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            put(model, name, module)
        yield
    finally:
        for name, module in own.items():
            put(model, name, module)
