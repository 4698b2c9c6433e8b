"""What word statistics alone reach: unigram and trigram models over the same tokens.

The trigram is interpolated Kneser-Ney with one discount an order (Chen and Goodman 1999, 3.2).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def unigram(train: Ints, vocab: int) -> Floats:
    """Probability of each token, float64 [vocab], with one added to every count."""
    counts = np.bincount(train, minlength=vocab) + 1.0
    probabilities: Floats = counts / counts.sum()
    return probabilities


@dataclass
class Order:
    """Counts of one order: sorted keys (context * vocab + token), and sums over each context."""

    keys: Ints
    counts: Ints
    contexts: Ints
    totals: Ints
    kinds: Ints
    discount: float

    def parts(self, context: Ints, key: Ints) -> tuple[Floats, Floats]:
        """Discounted probability, and the weight left for the lower order (1 if unseen)."""
        total = _look_up(self.contexts, self.totals, context)
        kinds = _look_up(self.contexts, self.kinds, context)
        count = _look_up(self.keys, self.counts, key)
        seen = total > 0
        total = np.where(seen, total, 1)
        probability = np.maximum(count - self.discount, 0) / total
        rest = np.where(seen, self.discount * kinds / total, 1.0)
        return probability, rest


class Trigram:
    """P(token | two tokens before); sums to one over the vocabulary for every context."""

    def __init__(self, train: Ints, vocab: int) -> None:
        self.vocab = vocab
        keys, counts = np.unique(_keys(train, 3, vocab), return_counts=True)
        self.three = _order(keys, counts, vocab)
        # Lower orders count the kinds of tokens that come before, not occurrences.
        keys, counts = np.unique(keys % vocab**2, return_counts=True)
        self.two = _order(keys, counts, vocab)
        keys, counts = np.unique(keys % vocab, return_counts=True)
        self.one = _order(keys, counts, vocab)

    def probabilities(self, first: Ints, second: Ints, token: Ints) -> Floats:
        """P(token | first, second), element by element."""
        pair = first * self.vocab + second
        high, rest_high = self.three.parts(pair, pair * self.vocab + token)
        middle, rest_middle = self.two.parts(second, second * self.vocab + token)
        low, rest_low = self.one.parts(np.zeros_like(token), token)
        low = low + rest_low / self.vocab
        result: Floats = high + rest_high * (middle + rest_middle * low)
        return result


def _keys(tokens: Ints, order: int, vocab: int) -> Ints:
    count = len(tokens) - order + 1
    keys = np.zeros(count, dtype=np.int64)
    for offset in range(order):
        keys = keys * vocab + tokens[offset : offset + count]
    return keys


def _order(keys: Ints, counts: Ints, vocab: int) -> Order:
    contexts, first = np.unique(keys // vocab, return_index=True)
    totals = np.add.reduceat(counts, first)
    kinds = np.diff(np.append(first, len(keys)))
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Order(keys, counts, contexts, totals, kinds, max(once, 1) / max(once + 2 * twice, 2))


def _look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    found: Ints = np.where(keys[place] == wanted, values[place], 0)
    return found
