"""Matrix products whose weight is made a few rows at a time, and never exists whole.

`Rows(start, stop)` makes rows [start, stop) of a weight [N, K] in the dtype of the activations.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Rows = Callable[[int, int], Tensor]

# Weights made at once. On a CPU an fp32 block and its temporaries should stay near the cache;
# on an accelerator few launches matter more.
BLOCK_CPU = 2**20
BLOCK_DEVICE = 2**26


def block_rows(columns: int, device: torch.device) -> int:
    """How many rows of a weight with `columns` columns one block has; at least 1."""
    return max(1, (BLOCK_CPU if device.type == "cpu" else BLOCK_DEVICE) // columns)


def product(x: Tensor, count: int, rows: Rows) -> Tensor:
    """x [..., K] @ w.T -> [..., N], where `count` is N."""
    step = block_rows(x.shape[-1], x.device)
    if count <= step:
        return F.linear(x, rows(0, count))
    out = x.new_empty((*x.shape[:-1], count))
    for start in range(0, count, step):
        stop = min(start + step, count)
        out[..., start:stop] = F.linear(x, rows(start, stop))
    return out


def grouped_product(
    x: Tensor, offsets: Tensor, count: int, expert: Callable[[int], Rows]
) -> Tensor:
    """Rows of x [M, K], sorted by expert, each times its expert's weight [N, K] -> [M, N].

    `offsets` [E] holds where each expert's rows end. Experts without rows are not touched; rows
    past the last end give zero.
    """
    out = x.new_zeros((x.shape[0], count))
    start = 0
    for index, stop in enumerate(offsets.tolist()):
        if stop > start:
            out[start:stop] = product(x[start:stop], count, expert(index))
        start = stop
    return out


def chosen_product(
    x: Tensor, index: Tensor, count: int, expert: Callable[[Tensor], Rows]
) -> Tensor:
    """x [N, k, K] through expert index [N, k] of each row -> [N, k, count], without a device sync.

    `expert` takes the number of an expert as a tensor [1].
    """
    flat, numbers = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    out = x.new_empty((flat.shape[0], count))
    for row in range(flat.shape[0]):
        out[row] = product(flat[row], count, expert(numbers[row : row + 1]))
    return out.view(*index.shape, count)


def every_product(x: Tensor, experts: int, count: int, expert: Callable[[int], Rows]) -> Tensor:
    """x [E or 1, N, K], each expert's own or common to all -> [E, N, count]."""
    out = x.new_empty((experts, x.shape[1], count))
    for index, rows in enumerate(x.expand(experts, -1, -1)):
        out[index] = product(rows, count, expert(index))
    return out
