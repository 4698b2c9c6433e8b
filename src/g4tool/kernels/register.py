"""Puts a function on tensors under torch's dispatcher, keeping its type."""

from collections.abc import Callable
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
