"""Keys and values of earlier tokens, and which of them a chunk of new tokens may see.

A full layer keeps one slot a position. A sliding layer keeps a ring: slot = position modulo size.
A chunk of any length is exact: it attends to the old ring beside its own keys, and only then is the
ring rewritten. A single token overwrites the one position that has just left its window, so it can
be written first, and nothing is copied.

Everything here follows from the position of the chunk's first token, so a cache needs no clearing
before it is used again from position 0. Integer remainders are only taken of operands >= 0: some
runtimes truncate towards zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Span(NamedTuple):
    """Where a chunk stands, for one attention kind: computed once, shared by all its layers.

    cos, sin: rotary tables [B or 1, S, 1, head_dim / 2].
    mask: [B or 1, 1, S, K] in the compute dtype: 0 where a query sees a key, else -inf; or
    positions: int64 [S] of the chunk, for an arithmetic that sees by them (then nothing below).
    slots: int64 [S], the slots that the chunk is written to before attending; or
    newest: int64 [R], the chunk's token that belongs in each ring slot after attending, where
    fresh: bool [R] says that it has one. All three are None without a cache.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    slots: Tensor | None = None
    newest: Tensor | None = None
    fresh: Tensor | None = None
    positions: Tensor | None = None


class KeyValueCache(nn.Module):
    """Rotated keys and normalised values of one layer: [B, kv heads, slots, head_dim] buffers."""

    keys: Tensor
    values: Tensor

    def __init__(
        self,
        batch: int,
        heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        for name in ("keys", "values"):
            zeros = torch.zeros(batch, heads, slots, head_dim, dtype=dtype, device=device)
            self.register_buffer(name, zeros, persistent=False)

    def update(self, keys: Tensor, values: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Takes in a chunk [B, kv heads, S, head_dim]; returns what span.mask covers, K for S."""
        return _write(self.keys, keys, span), _write(self.values, values, span)


def _write(store: Tensor, chunk: Tensor, span: Span) -> Tensor:
    new = chunk.to(store.dtype)
    if span.slots is not None:
        store.index_copy_(2, span.slots, new)
        return store.to(chunk.dtype)
    assert span.newest is not None
    assert span.fresh is not None
    seen = torch.cat((store.to(chunk.dtype), chunk), dim=2)
    store.copy_(torch.where(span.fresh[:, None], new.index_select(2, span.newest), store))
    return seen


def attention_mask(
    queries: Tensor, keys: Tensor, window: int | None, pad: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Mask [B or 1, 1, S, K] to add to scores: 0 where a query sees a key, -inf elsewhere.

    Causal, within `window` tokens (self included), and never left padding.
    queries int64 [S] and keys int64 [K] are padded positions, keys < 0 are empty slots; pad int64
    [B] counts each row's padding. A query that is itself padding sees itself, so that no row of
    the softmax is empty.
    """
    query = queries[:, None]
    mask = keys <= query
    if window is not None:
        mask = mask & (keys > query - window)
    if pad is None:
        mask = (mask & (keys >= 0))[None]
    else:
        mask = mask & ((keys >= pad[:, None, None]) | (keys == query))
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, float("-inf"))[:, None]


def ring_before(start: Tensor, size: int) -> Tensor:
    """The position that each ring slot holds before position `start` is written: int64 [size]."""
    slot = torch.arange(size, device=start.device)
    return start - size + torch.remainder(slot + size - torch.remainder(start, size), size)


def ring_after(last: Tensor, size: int) -> Tensor:
    """The position that each ring slot holds once position `last` is written: int64 [size]."""
    slot = torch.arange(size, device=last.device)
    return last - torch.remainder(last + size - slot, size)
