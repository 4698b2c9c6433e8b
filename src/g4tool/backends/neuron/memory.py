"""Bytes that one rank needs for weights and caches; activations are the compiler's to say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from g4tool.backends.neuron.nxdi_layout import cache_shapes
from g4tool.parallel.plan import Plan

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank, all alike. `caches` is keys and values together."""

    weights: int
    caches: int

    @property
    def total(self) -> int:
        """Weights and caches."""
        return self.weights + self.caches


def rank_memory(plan: Plan, batch: int, length: int, dtype: str) -> RankMemory:
    """What the first rank needs; in an even plan all ranks need the same."""
    size = _BYTES[dtype]
    weights = sum(math.prod(split.rank_shape(0)) * size for split in plan.splits.values())
    return RankMemory(weights, rank_caches(plan, batch, length, dtype))


def rank_caches(plan: Plan, batch: int, length: int, dtype: str) -> int:
    """Bytes of all caches of a rank."""
    shapes = cache_shapes(plan.config, plan.degree, batch, length)
    return sum(cache_bytes(shapes, dtype).values())


def cache_bytes(shapes: Mapping[int, tuple[int, ...]], dtype: str) -> dict[int, int]:
    """Bytes of each layer's two caches."""
    return {layer: 2 * math.prod(shape) * _BYTES[dtype] for layer, shape in shapes.items()}
