import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copy, copytree

import pytest

from g4tool.errors import UsageError
from g4tool.recipe.check import check
from g4tool.recipe.document import parse
from g4tool.recipe.load import dump, find, load_recipe, preset_names, presets

ROOT = Path(__file__).parents[2]
NAMES = [
    "31b-int4-hqq",
    "12b-int4-hqq",
    "26b-a4b-int4-hqq",
    "31b-int4-hqq-sensitive",
    "e2b-int4-hqq",
    "e4b-int4-hqq",
    "tiny-26b-a4b",
    "tiny-31b",
    "tiny-e2b",
]


def test_the_default_is_the_local_file_then_the_31b_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe()
    assert (recipe.name, recipe.model) == ("gemma4-31b-int4-hqq", "google/gemma-4-31B-it")
    assert recipe.upload
    assert recipe.upload.repo == "gasoonjia/Gemma4-31B-HQQ-INT4"
    (tmp_path / "g4.yaml").write_text("name: mine\nmodel: m\n")
    assert load_recipe().name == "mine"
    assert load_recipe("31b-int4-hqq").name == "gemma4-31b-int4-hqq"


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-31b").write_text("name: shadow\nmodel: m\n")
    (tmp_path / "own").write_text("name: own\nmodel: m\n")
    assert load_recipe("tiny-31b").name == "tiny-31b-int4-hqq"
    assert load_recipe("./tiny-31b").name == "shadow"
    assert load_recipe("own").name == load_recipe(tmp_path / "own").name == "own"
    with pytest.raises(
        UsageError, match=r"no preset is called 'tiny-13b'; did you mean tiny-31b\?"
    ):
        find("tiny-13b")
    with pytest.raises(
        UsageError, match=r"no preset is called 'zzz'; known: 12b-int4-hqq, 26b-a4b"
    ):
        find("zzz")
    with pytest.raises(UsageError, match=r"recipe \./x does not exist\."):
        find("./x")
    with pytest.raises(UsageError, match=r"recipe x\.yaml does not exist\."):
        find("x.yaml")
    for name in ("~nobody-of-that-name/x.yaml", "x" * 9999):
        with pytest.raises(UsageError, match=r"^recipe '[~x].* can be no file \("):
            find(name)


def test_every_preset_is_valid_and_says_what_it_is() -> None:
    found = presets()
    assert [preset.name for preset in found] == preset_names() == NAMES
    for preset in found:
        assert preset.summary.endswith((".", ":"))
        assert preset.recipe.quantize
        assert preset.recipe.quantize.scheme == "int4-hqq"


@pytest.mark.parametrize("name", NAMES)
def test_what_show_prints_reads_back_as_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name, ["compile-neuron.tp=8", "quantize.solver=rtn"])
    text = dump(recipe)
    assert check(parse(text, "shown")) == recipe
    assert "export-cpu" not in text
    assert "revision: main" in text
    assert "layerwise: true" in text


def test_recipes_load_without_torch() -> None:
    code = (
        "import sys; from g4tool.recipe.load import presets; presets();"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_wheel_ships_the_presets(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    copytree(ROOT / "src", checkout / "src")
    copytree(ROOT / "recipes", checkout / "recipes")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, checkout)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from g4tool.recipe.load import presets, preset_folder;"
        "print(preset_folder()); print(*[preset.name for preset in presets()])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "installed")],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    folder, names = done.stdout.splitlines()
    assert Path(folder) == tmp_path / "installed" / "g4tool" / "recipes"
    assert names.split() == NAMES
