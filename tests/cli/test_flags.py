"""Flags as they are given: whatever a path looks like, and refusals before any work."""

import os
from pathlib import Path

import pytest

from g4tool.checkpoint.tiny import write_tiny
from g4tool.cli.common import Env
from g4tool.errors import UsageError
from tests.cli.conftest import G4


@pytest.mark.parametrize(
    "name", ["a #b", "2024", "true", "null", "a: b", "*x", "end ", "new\nline", "[1]", "'q"]
)
def test_a_model_is_the_folder_of_that_name(
    g4: G4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny("tiny-31b", Path(name))
    home = ("--home", str(tmp_path / "home"), "--json")
    for command in (("convert", name), ("build", "tiny-31b", "--dry-run", "--model", name)):
        ran = g4(*command, *home)
        assert ran.code == 0, ran.out
    assert Env().recipe("tiny-31b", {"model": name, "revision": name}).model == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("build", "tiny-31b", "--model", ""), "--model: model: must not be empty"),
        (("convert", ""), "--model: model: must not be empty"),
        (("convert", "tiny-31b", "--revision", ""), "--revision: revision: must not be empty"),
        (("quantize", "--model", "", "keep"), "--model: model: must not be empty"),
        (("convert", "tiny-31b", "--dtype", "int8", "--materialize"), "'int8' is not one of"),
        (("convert", "tiny-31b", "--dtype", "float16"), "dtype needs materialize"),
        (("quantize", "--model", "tiny-31b", "--group-size", "48"), "--group-size: quantize.group"),
        (("quantize", "int8", "--model", "tiny-31b", "--solver", "hqq"), "takes no solver"),
        (("build", "tiny-31b", "--output", "{home}/out"), "is inside the store"),
        (("convert", "tiny-31b", "--output", "{file}"), "is a file: give a folder"),
        (("quantize", "--model", "tiny-31b", "--output", "{full}"), "already holds other files"),
        (("download", "tiny-31b", "--output", "{home}/out"), "is inside the store"),
        (("build", "tiny-31b", "--output", "~no-such-user/x"), "no home folder for ~no-such-user"),
        (("build", "tiny-31b", "--home", "~no-such-user/x"), "no home folder for ~no-such-user"),
        (("build", "tiny-31b", "--output", "x" * 300), "cannot be a path: it is too long"),
        (("run", "~no-such-user/x", "hello"), "no home folder for ~no-such-user"),
    ],
)
def test_wrong_usage_is_said_before_any_work(
    g4: G4, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    places = {"home": tmp_path / "home", "file": tmp_path / "file", "full": tmp_path / "full"}
    places["file"].write_text("")
    places["full"].mkdir()
    (places["full"] / "mine").write_text("")
    home = () if "--home" in arguments else ("--home", str(places["home"]))
    ran = g4(*(each.format(**places) for each in arguments), *home)
    assert ran.code == 2, ran.err
    assert said in ran.err
    assert not list(tmp_path.glob("home/artifacts/*/*"))


def test_flags_and_settings_are_checked_together(tmp_path: Path) -> None:
    env = Env(overrides=["convert.dtype=float16"])
    recipe = env.recipe("tiny-31b", {"convert.materialize": True, "convert.dtype": None})
    assert (recipe.convert.materialize, recipe.convert.dtype) == (True, "float16")
    file = tmp_path / "r.yaml"
    file.write_text("name: x\nmodel: tiny-31b\nquantize: 5\n")
    with pytest.raises(UsageError, match=r"r\.yaml:3: quantize: wants a mapping of keys, not 5"):
        Env().recipe(str(file), {"quantize.scheme": "int8"}, section="quantize")


def test_a_section_that_is_asked_for_keeps_what_the_recipe_says(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: x\nmodel: tiny-31b\nquantize: {layerwise: false}\n")
    recipe = Env().recipe(str(file), {"quantize.layerwise": None}, section="quantize")
    assert recipe.quantize is not None
    assert recipe.quantize.layerwise is False
    file.write_text("name: x\nmodel: tiny-31b\n")
    assert Env().recipe(str(file), {}, section="quantize").quantize is not None
    assert Env().recipe(str(file)).quantize is None


def test_an_override_in_a_scheme_of_the_recipe_is_told(g4: G4, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    rules = "[{match: 'layers.1.mlp', scheme: int8}]"
    file.write_text(f"name: x\nmodel: tiny-31b\nquantize: {{rules: {rules}}}\n")
    ran = g4("quantize", "keep", "--recipe", str(file))
    assert ran.code == 0, ran.err
    assert (
        "The recipe's rules store 3 tensors as int8 instead of keep, such as "
        "layers.1.mlp.gate_proj.weight." in ran.err
    )
    for scheme in ("int8", "int4-hqq"):  # the rules' own, and the recipe's own
        assert "instead of" not in g4("quantize", scheme, "--recipe", str(file)).err


def test_a_folder_of_the_store_given_as_a_model_is_in_use(g4: G4, home: Path) -> None:
    from g4tool.cli.models import find_model, using_model
    from g4tool.pipeline import cache

    bundle = Path(g4("build", "tiny-31b").out.strip())
    env = Env(home=home, quiet=True)
    (home.parent / "link").unlink(missing_ok=True)
    os.symlink(bundle, home.parent / "link")

    def state() -> str:
        return cache.find(env.store, bundle.name).state

    for name in (bundle, home.parent / "link"):
        with using_model(env, str(name), "main") as folder:
            assert folder == name
            assert state() == "in use"
            assert not cache.prune(env.store, everything=True, dry_run=True)[-1].removed
        assert state() == "complete"
    assert (find_model(env, "tiny-31b", "main") / "config.json").is_file()
