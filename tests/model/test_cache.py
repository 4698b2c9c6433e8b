"""Ring arithmetic against a plain simulation."""

import pytest
import torch

from g4tool.model.cache import attention_mask, ring_after, ring_before


@pytest.mark.parametrize("size", [1, 5, 8])
def test_ring_positions_equal_a_simulation(size):
    ring = [slot - size for slot in range(size)]  # empty: any position below zero
    for position in range(3 * size + 2):
        assert ring_before(torch.tensor(position), size).tolist() == ring
        ring[position % size] = position
        assert ring_after(torch.tensor(position), size).tolist() == ring


def test_remainders_never_see_a_negative_operand(monkeypatch):
    """Where integer remainder truncates towards zero, a negative operand gives a wrong slot."""
    original = torch.remainder

    def checked(value, divisor):
        assert (value >= 0).all()
        return original(value, divisor)

    monkeypatch.setattr(torch, "remainder", checked)
    for position in range(20):
        ring_before(torch.tensor(position), 8)
        ring_after(torch.tensor(position), 8)


def test_mask_by_definition():
    pads = [0, 3]
    queries, keys = torch.arange(2, 9), torch.arange(-2, 9)
    for window in (None, 1, 4):
        got = attention_mask(queries, keys, window, torch.tensor(pads), torch.float32)
        assert got.shape == (2, 1, 7, 11)
        for row, pad in enumerate(pads):
            for i, q in enumerate(queries.tolist()):
                for j, k in enumerate(keys.tolist()):
                    near = window is None or q - k < window
                    seen = k == q or (pad <= k <= q and near)
                    assert got[row, 0, i, j].item() == (0 if seen else float("-inf"))


def test_unpadded_mask_is_that_of_padding_zero():
    queries, keys = torch.arange(4, 9), torch.arange(-3, 9)
    zero = torch.zeros(1, dtype=torch.int64)
    plain = attention_mask(queries, keys, 3, None, torch.float32)
    assert torch.equal(plain, attention_mask(queries, keys, 3, zero, torch.float32))
