"""Which cached tokens a step sees, and what a ring of a window's slots holds; needs torch only.

Unlike the canonical cache, a step attends to the cache as it was before the step, beside the step's
own tokens: NxD Inference computes the two parts of the scores apart.
"""

import torch
from torch import Tensor


def newest(chunk: Tensor, last: Tensor, size: int) -> Tensor:
    """What a ring of `size` slots holds once chunk [B, heads, S, D] is written: [.., size, D].

    last int64 [B] is each row's last position. A chunk no longer than the ring is itself.
    """
    if chunk.shape[2] <= size:
        return chunk
    slot = torch.arange(size, device=chunk.device)
    # Slots that no position has reached take position 0; decode's mask never shows them.
    held = last[:, None] - torch.remainder(last[:, None] + size - slot, size)
    index = held.clamp(min=0)[:, None, :, None]
    return chunk.gather(2, index.expand(-1, chunk.shape[1], -1, chunk.shape[3]))


def prompt_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask bool [1, 1, S, S], within `window` tokens (self included) where there is one."""
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    return mask[None, None]


def token_mask(slots: int, position_ids: Tensor, ring: int) -> Tensor:
    """Which of `slots` cached tokens a new token sees: bool [B, 1, 1, slots]; never itself.

    position_ids [B, 1]. Of a full ring, the slot about to be overwritten has just left the window.
    """
    slot = torch.arange(slots, device=position_ids.device)
    seen = (slot < position_ids) & (slot != torch.remainder(position_ids, ring))
    return seen[:, None, None]
