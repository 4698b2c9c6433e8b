from typing import Any

import pytest

from g4tool.pipeline.explain import difference

OLD: dict[str, Any] = {
    "stage": "quantize",
    "version": 1,
    "parameters": {"group_size": 32, "scheme": "int4-hqq", "rules": [{"match": "a"}]},
    "environment": {"torch": "2.13.0"},
    "inputs": [{"stage": "convert", "identity": "a" * 64}],
}


def source(**files: str) -> dict[str, Any]:
    about = {name: {"size": 1, "sha256": value} for name, value in files.items()}
    return OLD | {"inputs": [{"stage": "source", "identity": str(files), "files": about}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"parameters": OLD["parameters"] | {"group_size": 128}},
            "new: quantize.group_size 32 -> 128",
        ),
        (
            {"parameters": OLD["parameters"] | {"rules": [{"match": "b"}, {"match": "c"}]}},
            "new: quantize.rules.0.match a -> b, quantize.rules.1.match (none) -> c",
        ),
        (
            {"parameters": OLD["parameters"] | {"scheme": "s" * 50}},
            f"new: quantize.scheme int4-hqq -> {'s' * 37}...",
        ),
        ({"version": 2}, "new: quantize's version 1 -> 2"),
        ({"environment": {"torch": "2.14.0"}}, "new: environment torch 2.13.0 -> 2.14.0"),
        (
            {"environment": {"torch": "2.13.0", "device": "cuda"}},
            "new: environment device (none) -> cuda",
        ),
        (
            {"inputs": [{"stage": "convert", "identity": "b" * 64}]},
            "new: input convert bbbbbbbbbbbb is another one",
        ),
        (
            {"inputs": [{"stage": "source", "identity": "b" * 64}]},
            "new: input convert -> source",
        ),
        ({"inputs": []}, "new: 1 inputs -> 0"),
        (
            {"parameters": {"a": 1, "b": 2}},
            "new: quantize.a (none) -> 1, quantize.b (none) -> 2, quantize.group_size 32 -> (none)"
            " and 2 more",
        ),
    ],
)
def test_one_change_is_named(change: dict[str, Any], reason: str) -> None:
    assert difference(OLD | change, [OLD]) == reason


def test_the_file_of_a_source_that_changed_is_named() -> None:
    got = difference(source(a="1", b="2", c="3"), [source(a="1", b="x")])
    assert got == "new: source file b and 1 more changed"


def test_the_nearest_is_taken() -> None:
    far = OLD | {"version": 7, "environment": {"torch": "1"}}
    wanted = OLD | {"parameters": OLD["parameters"] | {"scheme": "int8"}}
    for order in ([far, OLD], [OLD, far]):
        assert difference(wanted, order) == "new: quantize.scheme int4-hqq -> int8"


def test_nothing_to_compare_with() -> None:
    assert difference(OLD, []) == "never made"
