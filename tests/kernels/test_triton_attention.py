"""Attention over a cache and over a chunk, against torch's own."""

import pytest
import torch
from torch import Tensor

from g4tool.model.arithmetic import PLAIN
from g4tool.model.cache import Span

from .interpreter import DEVICE, loops_over_tensors, needs_triton  # noqa: F401

pytestmark = needs_triton


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    mixed: Tensor = PLAIN.attend(queries, keys, values, Span(mask, mask, mask))
    return mixed.unflatten(2, (-1, queries.shape[3])).transpose(1, 2)


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize(("count", "kv_heads", "slots", "size"), [(4, 2, 300, 16), (3, 1, 600, 32)])
def test_one_token_costs_and_sees_what_is_present(
    count: int, kv_heads: int, slots: int, size: int
) -> None:
    from g4tool.kernels.triton_attention import decode_attention

    q, keys, values = (
        heads(count, size),
        heads(1, kv_heads, slots, size),
        heads(1, kv_heads, slots, size),
    )
    for position in (0, 5, 130, slots - 1, slots + 50):
        present = min(position + 1, slots)
        # What is not present must not count, whatever it holds.
        for cache in (keys, values):
            cache[:, :, present:] = float("nan")
        got = decode_attention(q, keys, values, torch.tensor(position, device=DEVICE))
        want = attend(
            q[None, :, None],
            keys[:, :, :present],
            values[:, :, :present],
            torch.zeros(1, 1, 1, present, device=DEVICE),
        )
        torch.testing.assert_close(got, want[0, :, 0], atol=1e-5, rtol=1e-5)
        keys, values = heads(1, kv_heads, slots, size), heads(1, kv_heads, slots, size)


@pytest.mark.parametrize("window", [1000, 40])
@pytest.mark.parametrize(
    ("count", "kv_heads", "queries", "tokens", "size"), [(4, 2, 150, 300, 16), (2, 1, 70, 70, 32)]
)
def test_chunk(
    count: int, kv_heads: int, queries: int, tokens: int, size: int, window: int
) -> None:
    from g4tool.kernels.triton_attention import chunk_attention

    q = heads(1, queries, count, size).transpose(1, 2)
    keys, values = heads(1, kv_heads, tokens, size), heads(1, kv_heads, tokens, size)
    query = torch.arange(queries, device=DEVICE)[:, None] + tokens - queries
    key = torch.arange(tokens, device=DEVICE)[None]
    seen = (key <= query) & (key > query - window)
    mask = torch.where(seen, 0.0, -float("inf"))[None, None]
    got = chunk_attention(q, keys, values, mask)
    torch.testing.assert_close(got, attend(q, keys, values, mask), atol=1e-5, rtol=1e-5)
