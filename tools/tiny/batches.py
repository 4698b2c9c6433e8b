"""Rows of tokens: random ones to train on, consecutive ones to measure with."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tiny.arrays import Ids

BOS, NEWLINE = 2, 107
SHARES = {
    "stories": 0.40,
    "bible": 0.08,
    "speeches": 0.14,
    "dictionary": 0.07,
    "countries": 0.03,
    "chat": 0.28,
}
"""How much of each batch comes from which source."""


class Batches:
    """Random rows int64 [batch, length + 1] on `device`: <bos>, then text from a line's start.

    Every batch holds the same number of rows of each source. Conversations start whole.
    """

    def __init__(
        self, arrays: Mapping[str, Ids], chat: str, batch: int, length: int, device: torch.device
    ) -> None:
        self.length = length
        pieces, starts, offset = [], [], 0
        for source in SHARES:
            ids = arrays[f"train/{chat if source == 'chat' else source}"]
            first = ids == BOS if source == "chat" else (ids == BOS) | (ids == NEWLINE)
            begin = np.flatnonzero(first) + 1
            begin = begin[begin + length <= len(ids)]
            pieces.append(ids)
            starts.append(torch.from_numpy(begin + offset).to(device))
            offset += len(ids)
        self.tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int32)).to(device)
        self.starts = starts
        self.counts = quotas(batch)
        self.span = torch.arange(length, device=device)

    def next(self, generator: torch.Generator) -> Tensor:
        """The next batch that `generator`, of this device, gives."""
        chosen = [
            starts[
                torch.randint(len(starts), (count,), generator=generator, device=generator.device)
            ]
            for starts, count in zip(self.starts, self.counts, strict=True)
        ]
        rows = self.tokens[torch.cat(chosen)[:, None] + self.span].long()
        return torch.nn.functional.pad(rows, (1, 0), value=BOS)


def quotas(batch: int) -> list[int]:
    """Rows of each source in a batch, at least one each; the largest source takes the rest."""
    counts = [max(1, round(share * batch)) for share in SHARES.values()]
    counts[0] += batch - sum(counts)
    return counts


def consecutive(ids: Ids, length: int) -> Tensor:
    """Rows int64 [N, length + 1] that cover `ids` once: <bos>, then the next `length` tokens."""
    body = ids[1:] if ids[0] == BOS else ids
    count = len(body) // length
    rows = torch.from_numpy(body[: count * length].astype(np.int64)).view(count, length)
    return torch.nn.functional.pad(rows, (1, 0), value=BOS)
