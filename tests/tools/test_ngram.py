import numpy as np
import pytest

from tiny.ngram import Trigram, unigram

VOCAB = 17
TRAIN = np.random.default_rng(3).zipf(1.5, 4000).clip(max=VOCAB - 1).astype(np.int64)


def test_unigram_is_a_distribution_that_prefers_frequent_tokens() -> None:
    probabilities = unigram(TRAIN, VOCAB)
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities.argmax() == np.bincount(TRAIN).argmax()


@pytest.mark.parametrize("context", [(1, 1), (1, 2), (0, 0), (16, 9)])
def test_trigram_sums_to_one_for_seen_and_unseen_contexts(context: tuple[int, int]) -> None:
    tokens = np.arange(VOCAB)
    first, second = (np.full(VOCAB, part) for part in context)
    probabilities = Trigram(TRAIN, VOCAB).probabilities(first, second, tokens)
    assert probabilities.min() > 0
    assert probabilities.sum() == pytest.approx(1)


def test_trigram_against_counts_by_hand() -> None:
    # 0 1 2 0 1 3 0 1 2: after (0, 1) comes 2 twice and 3 once; one trigram kind is seen twice or
    # more, so the discount is n1 / (n1 + 2 n2).
    train = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2])
    model = Trigram(train, 4)
    trigrams = {(0, 1, 2): 2, (1, 2, 0): 1, (2, 0, 1): 1, (0, 1, 3): 1, (1, 3, 0): 1, (3, 0, 1): 1}
    once = sum(n == 1 for n in trigrams.values())
    twice = sum(n == 2 for n in trigrams.values())
    discount = once / (once + 2 * twice)
    assert model.three.discount == pytest.approx(discount)
    before = {pair: sum(t[1:] == pair for t in trigrams) for pair in {t[1:] for t in trigrams}}
    ones = sum(n == 1 for n in before.values())
    twos = sum(n == 2 for n in before.values())
    two_discount = ones / (ones + 2 * twos)
    after_one = {pair: n for pair, n in before.items() if pair[0] == 1}
    total = sum(after_one.values())
    kinds = {c: sum(p[1] == c for p in before) for c in range(4)}
    single = sum(n == 1 for n in kinds.values())
    double = sum(n == 2 for n in kinds.values())
    one_discount = max(single, 1) / max(single + 2 * double, 2)
    spread = one_discount * sum(n > 0 for n in kinds.values()) / len(before) / 4
    low = max(kinds[2] - one_discount, 0) / len(before) + spread
    middle = max(after_one[1, 2] - two_discount, 0) / total
    middle += two_discount * len(after_one) / total * low
    expected = (2 - discount) / 3 + discount * 2 / 3 * middle
    got = model.probabilities(np.array([0]), np.array([1]), np.array([2]))
    assert got[0] == pytest.approx(expected)
