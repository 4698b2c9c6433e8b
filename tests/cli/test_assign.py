"""g4 quantize --target-bpw and --target-size."""

from pathlib import Path

import pytest

from g4tool.cli.assign import parse_size
from g4tool.errors import UsageError
from tests.cli.conftest import G4


def test_sizes_are_read_in_decimal_units() -> None:
    assert parse_size("18.5GB") == 18_500_000_000
    assert parse_size("900 MB") == 900_000_000
    assert parse_size("2000000") == 2_000_000
    for wrong in ("", "big", "-3GB", "3 XB"):
        with pytest.raises(UsageError, match="--target-size"):
            parse_size(wrong)


def test_a_target_that_cannot_be_met_names_the_smallest(
    g4: G4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = g4("quantize", "--model", "tiny-26b-a4b", "--target-bpw", "3")
    assert ran.code == 2
    assert "the smallest this model can be is 4.8" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_chosen_rules_are_a_recipe_that_is_used_again(
    g4: G4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    goal = ("quantize", "--model", "tiny-26b-a4b", "--target-bpw", "5.4")
    both = ("--format", "torchao", "--format", "compressed-tensors")
    first = g4(*goal, *both, "--json")
    assert first.code == 0, first.out
    assert first.json["bits_per_weight"] <= 5.4
    assert first.json["formats"].keys() == {"torchao", "compressed-tensors"}
    again = g4(*goal)
    assert "using the rules in tiny-26b-a4b-5.4bpw.yaml" in again.err
    built = g4("build", "tiny-26b-a4b-5.4bpw.yaml", "--json")
    assert built.json["path"] == first.json["path"] == again.out.strip()
    assert g4(*goal, "--format", "torchao", "--json").json["formats"].keys() == {"torchao"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--target-bpw", "5", "--target-size", "3MB"), "give one"),
        (("int8", "--target-bpw", "5"), "leave them out"),
        (("--save-recipe", "x.yaml"), "goes with --target-bpw"),
    ],
)
def test_flags_that_contradict_each_other(g4: G4, arguments: tuple[str, ...], said: str) -> None:
    ran = g4("quantize", "--model", "tiny-31b", *arguments)
    assert ran.code == 2
    assert said in ran.err
