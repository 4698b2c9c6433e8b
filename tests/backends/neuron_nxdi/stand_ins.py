"""Stand-ins for the parts of the AWS Neuron SDK that cannot be had without AWS's package index.

NxD Inference's public source imports torch_xla, torch_neuronx, neuronxcc, nki and their like at
module level, even where CPU mode then never calls them. `install` answers those imports with
objects that can be imported, subclassed, used as decorators and called, and that compute nothing:
no number in a test comes from here.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import torch

ROOTS = ("torch_xla", "torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")


class _Anything(type):
    """Classes whose unknown attributes are classes of the same sort."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_Thing,), {})

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class _Thing(metaclass=_Anything):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it hands back what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else MagicMock()


class BlockShardStrategy(enum.Enum):
    """Compared by name in NxD's expert layers."""

    HI_LO = 0
    PING_PONG = 1


class _Module(types.ModuleType):
    """A module in which every name exists."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "BlockShardStrategy":
            return BlockShardStrategy
        if name == "get_platform_target":
            return lambda: "trn1"
        if name in ("REDUCE_SUM", "REDUCE_MAX", "REDUCE_MIN"):
            return name
        return _Anything(name, (_Thing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ROOTS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Answers imports of the packages in ROOTS from now on, in this process."""
    sys.meta_path.insert(0, _Finder())
    torch.classes.neuron = MagicMock()
