import hashlib

import pytest

from g4tool.pipeline.fingerprint import canonical_json, source_identity, stage_identity


def test_identity_is_the_sha256_of_the_canonical_text() -> None:
    text = (
        '{"environment":{"torch":"2.13.0"},"inputs":["aa","bb"],'
        '"parameters":{"group_size":32},"stage":"quantize","version":3}'
    )
    got = stage_identity("quantize", 3, {"group_size": 32}, {"torch": "2.13.0"}, ["aa", "bb"])
    assert got == hashlib.sha256(text.encode()).hexdigest()


def test_every_part_counts_and_the_order_of_keys_does_not() -> None:
    base = ("s", 1, {"a": 1, "b": [2]}, {"e": "x"}, ["i", "j"])
    others = [
        ("t", *base[1:]),
        ("s", 2, *base[2:]),
        ("s", 1, {"a": 1, "b": [3]}, *base[3:]),
        ("s", 1, {"a": True, "b": [2]}, *base[3:]),
        ("s", 1, base[2], {"e": "y"}, base[4]),
        ("s", 1, base[2], {}, base[4]),
        (*base[:4], ["j", "i"]),
        (*base[:4], ["i"]),
    ]
    identities = {stage_identity(*each) for each in (base, *others)}
    assert len(identities) == len(others) + 1
    assert stage_identity("s", 1, {"b": (2,), "a": 1}, {"e": "x"}, ("i", "j")) == stage_identity(
        *base
    )


def test_a_source_is_names_and_contents() -> None:
    one = source_identity({"a": "1", "b": "2"})
    assert one == source_identity({"b": "2", "a": "1"})
    assert one != source_identity({"a": "2", "b": "1"})
    assert one != source_identity({"c": "1", "b": "2"})


@pytest.mark.parametrize("value", [{1: 2}, {"a": {2: 3}}, [{None: 1}]])
def test_keys_that_are_not_text_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical_json(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_json_cannot_hold_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": value})
