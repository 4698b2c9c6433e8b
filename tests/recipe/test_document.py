from pathlib import Path

import pytest

from g4tool.errors import UsageError
from g4tool.recipe.document import RecipeError, parse, read, value

TEXT = """\
# a comment
name: x
quantize:
  rules:
    - {match: a,
       scheme: keep}
    - match: b
"""


def test_data_and_the_line_of_every_key() -> None:
    document = parse(TEXT, "g4.yaml")
    assert document.data == {
        "name": "x",
        "quantize": {"rules": [{"match": "a", "scheme": "keep"}, {"match": "b"}]},
    }
    lines = {keys: origin.removeprefix("g4.yaml:") for keys, origin in document.origins.items()}
    assert lines == {
        (): "g4.yaml",
        ("name",): "2",
        ("quantize",): "3",
        ("quantize", "rules"): "4",
        ("quantize", "rules", 0): "5",
        ("quantize", "rules", 0, "match"): "5",
        ("quantize", "rules", 0, "scheme"): "6",
        ("quantize", "rules", 1): "7",
        ("quantize", "rules", 1, "match"): "7",
    }
    assert document.origin(("quantize", "rules", 1, "scheme")) == "g4.yaml:7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "g4.yaml: the recipe is empty; it needs name and model"),
        ("# only a comment\n", "g4.yaml: the recipe is empty; it needs name and model"),
        ("\n- a\n", "g4.yaml:2: a list; a recipe is a mapping of keys"),
        ("text", "g4.yaml:1: a single value; a recipe is a mapping of keys"),
        ("a: 1\nb: [1,\nc: }", "g4.yaml:3: not valid YAML: "),
        ("a: 1\n\tb: 2", "g4.yaml:2: not valid YAML: "),
        ("a: 1\n---\nb: 1", "g4.yaml:2: not valid YAML: but found another document"),
        ("a: &x 1\nb: *x", "g4.yaml:2: not valid YAML: aliases (*name) are not taken in a recipe"),
        ("a: &x [*x]", "g4.yaml:1: not valid YAML: aliases"),
        ("a: !!python/name:os.x ''", "g4.yaml:1: not valid YAML: could not determine"),
        ("a: !mine x", "g4.yaml:1: not valid YAML: could not determine a constructor"),
        ("a: " + "[" * 5000, "g4.yaml: not valid YAML: nested too deeply"),
        ("a: 1\nb: \0", "g4.yaml:2: not valid YAML: the character U+0000 is not allowed"),
        ("a: \udcff", "g4.yaml:1: not valid YAML: the character U+DCFF is not allowed"),
        ("a: [" + "1," * 300_000, "g4.yaml: longer than 131072 characters, which no recipe is"),
    ],
)
def test_what_is_no_recipe_at_all(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, "g4.yaml")
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 2


def test_mistakes_that_leave_it_readable_are_kept_for_the_check() -> None:
    document = parse(
        "a: 1\nb:\n  c: 2\n  c: 3\n? [x]\n: 1\nd: 2026-99-99\na: 2\n"
        "e: !!python/object/apply:os.getcwd []",
        "f",
    )
    assert [str(problem) for problem in document.problems] == [
        "f:4: b.c: this key is set twice",
        "f:5: a key must be a word",
        "f:7: d: not a value: month must be in 1..12",
        "f:8: a: this key is set twice",
        "f:9: e: the tag tag:yaml.org,2002:python/object/apply:os.getcwd is not taken",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128", 128),
        ("true", True),
        ("int4-hqq", "int4-hqq"),
        ("google/gemma-4-31B-it", "google/gemma-4-31B-it"),
        ("'5'", "5"),
        ("", None),
        ("[{match: a, scheme: keep}]", [{"match": "a", "scheme": "keep"}]),
        ("{tp: 4}", {"tp": 4}),
    ],
)
def test_values_are_typed_as_yaml_types_them(text: str, expected: object) -> None:
    assert value(text) == expected


@pytest.mark.parametrize("text", ["[1", "a: b", "1\nname: x", "{a: 1, a: 2}"])
def test_what_is_not_one_value(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        value(text)


def test_files_that_cannot_be_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=r"recipe .*gone\.yaml cannot be read \(No such file"):
        read(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(UsageError, match=r"recipe .*latin\.yaml is not UTF-8 text"):
        read(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("!!bool abc", "'abc' is no bool"),
        ("!!timestamp abc", "'abc' is no timestamp"),
        ("!!int ''", "'' is no int"),
        ("!!float ''", "'' is no float"),
        ("!!int abc", "invalid literal for int"),
    ],
)
def test_a_word_that_its_tag_does_not_fit(written: str, said: str) -> None:
    document = parse(f"a:\n  b: {written}\n", "g4.yaml")
    (problem,) = document.problems
    assert str(problem).startswith(f"g4.yaml:2: a.b: not a value: {said}")


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(RecipeError, match="longer than 131072 characters"):
        read(Path("/dev/zero"))
