"""Puts a function on tensors under torch's dispatcher, keeping its type; who has Triton."""

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def register(
    name: str, fake: Callable[..., Tensor]
) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Decorator: the function becomes the operator `name` ("g4::..."), opaque to compilers.

    It must not alter its arguments, nor return one. `fake` takes the same arguments and gives an
    empty tensor of the result's shape and dtype.
    """

    def wrap(body: Callable[P, Tensor]) -> Callable[P, Tensor]:
        operator = torch.library.custom_op(name, body, mutates_args=())
        operator.register_fake(fake)
        typed: Callable[P, Tensor] = operator
        return typed

    return wrap


_refused: set[str] = set()


def use_triton(on: bool) -> None:
    """Whether CUDA devices run Triton's kernels from now on, in this process [they do].

    Otherwise, and where there is no Triton, PyTorch's own operators run, and weights are
    dequantized block by block.
    """
    (_refused.discard if on else _refused.add)("triton")


def runs_triton(device: torch.device) -> bool:
    """Whether an operator on the device shall run Triton's kernels."""
    return not _refused and has_triton(device)


@lru_cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
