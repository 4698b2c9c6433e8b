"""Keys and values in NxD Inference's way: parameters that a step reads and gives back changed.

Each layer has its own shape. A sliding layer keeps a ring of its window: slot = position modulo
size. A step attends to the cache as it was before, beside the step's own token.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import torch
from neuronx_distributed_inference.modules.kvcache.utils import (
    fill_prefix,
    update_cache_const_indices,
)
from torch import Tensor, nn

from g4tool.backends.neuron.nxdi_ring import newest

KeysValues = tuple[Tensor, Tensor]


class LayerCaches(nn.Module):
    """Two caches [B, kv heads, slots, head_dim] for each layer that makes keys and values.

    `past_key_values` is where NxD Inference looks for them, to alias inputs with outputs.
    """

    def __init__(
        self,
        shapes: dict[int, tuple[int, int, int, int]],
        dtype: torch.dtype,
        continuous_batching: bool,
    ) -> None:
        super().__init__()
        self.layers = list(shapes)
        self.continuous_batching = continuous_batching
        self.past_key_values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            for shape in shapes.values()
            for _ in ("keys", "values")
        )

    def read(self, bucket: int) -> dict[int, KeysValues]:
        """Keys and values by layer, cut to the slots that `bucket` positions can have filled."""
        return {
            layer: (
                self.past_key_values[2 * place][:, :, :bucket],
                self.past_key_values[2 * place + 1][:, :, :bucket],
            )
            for place, layer in enumerate(self.layers)
        }

    def write_prompt(
        self, made: dict[int, KeysValues], position_ids: Tensor, seq_ids: Tensor
    ) -> list[Tensor]:
        """All caches with a prompt's keys and values [B, kv heads, S, head_dim] from slot 0 on.

        position_ids int64 [B, S], right-padded; seq_ids [B] are the rows of the cache.
        """
        last = position_ids.amax(dim=1)
        updated = []
        for place, layer in enumerate(self.layers):
            for half, new in enumerate(made[layer]):
                cache = self.past_key_values[2 * place + half]
                kept = newest(new, last, cache.shape[2]).to(cache.dtype)
                if self.continuous_batching:
                    updated.append(update_cache_const_indices(cache, kept, seq_ids))
                else:
                    updated.append(fill_prefix(cache, kept))
        return updated

    def write_token(self, made: dict[int, KeysValues], position_ids: Tensor) -> list[Tensor]:
        """All caches with one token a row [B, kv heads, 1, head_dim] at position_ids [B, 1]."""
        updated = []
        for place, layer in enumerate(self.layers):
            for half, new in enumerate(made[layer]):
                cache = self.past_key_values[2 * place + half]
                slots = torch.remainder(position_ids, cache.shape[2])
                index = slots[:, None, :, None].expand_as(new)
                updated.append(torch.scatter(cache, 2, index, new.to(cache.dtype)))
        return updated
