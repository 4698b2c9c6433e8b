import pytest
import torch

from g4tool.backends.neuron.nxdi_ring import newest, prompt_mask, token_mask
from g4tool.model.cache import attention_mask


@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
def test_prompt_mask_is_the_canonical_one(window: int | None) -> None:
    positions = torch.arange(12)
    canonical = attention_mask(positions, positions, window, None, torch.float32)
    assert torch.equal(prompt_mask(12, window, torch.device("cpu")), canonical == 0)


@pytest.mark.parametrize("prompt", [1, 5, 8, 9, 16, 23])
@pytest.mark.parametrize("ring", [8, 32])
def test_a_ring_shows_exactly_the_window(prompt: int, ring: int) -> None:
    # The cache holds positions, so what a step sees can be read off it; rows differ in length.
    lengths = torch.tensor([prompt, 23])
    chunk = torch.arange(24.0).expand(2, 1, 24).unsqueeze(-1)
    held = newest(chunk, lengths - 1, ring)
    cache = torch.full((2, 1, ring, 1), -1.0)
    cache[:, :, : held.shape[2]] = held
    for step in range(30):
        at = (lengths + step)[:, None]
        seen = token_mask(ring, at, ring)
        for row in range(2):
            position = int(at[row])
            visible = cache[row, 0, seen[row, 0, 0], 0].int().tolist()
            assert sorted(visible) == list(range(max(0, position - ring + 1), position))
        cache.scatter_(2, (at % ring)[:, None, :, None], at[:, None, :, None].float())
