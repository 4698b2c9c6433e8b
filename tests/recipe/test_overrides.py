from collections.abc import Iterable

import pytest

from g4tool.recipe.check import check
from g4tool.recipe.document import Document, RecipeError
from g4tool.recipe.load import load_recipe
from g4tool.recipe.model import Recipe
from g4tool.recipe.overrides import overlay


def apply_overrides(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """`recipe` with the settings laid over it, checked again."""
    data = recipe.model_dump(mode="json", by_alias=True)
    return check(overlay(Document(data, {(): f"recipe {recipe.name}"}), settings))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("tiny-31b")


def test_values_are_set_in_order_and_checked(recipe: Recipe) -> None:
    changed = apply_overrides(
        recipe,
        [
            "model=tiny-e2b",
            "quantize.group_size=64",
            "quantize.group_size=128",
            "quantize.rules.0.scheme=keep",
            "export-cpu.max_seq_len=2048",
            "compile-neuron=",
        ],
    )
    assert changed.model == "tiny-e2b"
    assert changed.quantize
    assert changed.quantize.group_size == 128
    assert [rule.scheme for rule in changed.quantize.rules] == ["keep", "keep"]
    assert changed.export_cpu
    assert changed.export_cpu.max_seq_len == 2048
    assert changed.compile_neuron
    assert changed.compile_neuron.tp == 4
    assert recipe.quantize
    assert recipe.quantize.group_size == 32


def test_a_whole_list(recipe: Recipe) -> None:
    changed = apply_overrides(recipe, ["quantize.rules=[{match: '^a', scheme: int8}]"])
    assert changed.quantize
    assert [(rule.match, rule.scheme) for rule in changed.quantize.rules] == [("^a", "int8")]


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            ["quantize.grup_size=1"],
            ["quantize.grup_size: unknown key; did you mean group_size?"],
        ),
        (
            ["quantize.group_size=33", "model=5"],
            [
                "quantize.group_size: 33 is not one of 32, 64, 128",
                "model: wants text, not 5; put quotes around it",
            ],
        ),
        (["quantize"], ["write KEY=VALUE, such as quantize.group_size=128"]),
        (["=3"], ["write KEY=VALUE, such as quantize.group_size=128"]),
        (["a..b=3"], ["write KEY=VALUE, such as quantize.group_size=128"]),
        (
            ["quantize.rules.7.scheme=keep"],
            ["quantize.rules is a list of 2: 7 is none of its numbers"],
        ),
        (["name.x=1"], ["name is a single value, it has no key x"]),
        (
            ["quantize.rules=[{match: '(', scheme: keep}]"],
            [
                "quantize.rules.0.match: not a valid regular expression: missing ), unterminated "
                "subpattern at position 0"
            ],
        ),
        (["model=*a"], ["not valid YAML: aliases (*name) are not taken in a recipe"]),
    ],
)
def test_mistakes_name_the_setting(
    recipe: Recipe, settings: list[str], messages: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        apply_overrides(recipe, settings)
    expected = {f"--set {s}: {m}" for s, m in zip(settings, messages, strict=True)}
    assert set(str(caught.value).split("\n")) == expected


def test_a_mistake_of_the_file_keeps_its_line_beside_one_of_a_setting(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "r.yaml"
    path.write_text("name: x\nmodel: m\nquantize: {scheme: q, group_size: 5}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["quantize.group_size=6"])
    lines = str(caught.value).split("\n")
    assert lines[0].startswith(f"{path}:3: quantize.scheme: 'q' is not one of")
    assert lines[1].startswith("--set quantize.group_size=6: quantize.group_size: 6 is not one of")
    path.write_text("name: x\nmodel: m\nquantize: {group_size: 5}\n")
    fixed = load_recipe(path, ["quantize.group_size=64"])
    assert fixed.quantize
    assert fixed.quantize.group_size == 64
