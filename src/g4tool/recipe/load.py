"""Finding a recipe, a preset or a file, and writing one back."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from g4tool.errors import UsageError
from g4tool.recipe import document
from g4tool.recipe.check import check, nearest
from g4tool.recipe.model import Recipe
from g4tool.recipe.overrides import overlay

DEFAULT_PRESET = "31b-int4-hqq"
LOCAL = Path("g4.yaml")


@dataclass(frozen=True)
class Preset:
    """A recipe that ships with g4; `summary` is the first line of its comment."""

    name: str
    summary: str
    recipe: Recipe


def load_recipe(name_or_path: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a preset's name or a file, with "key=value" overrides on top.

    None means ./g4.yaml if it is there, else the preset 31b-int4-hqq. Raises UsageError for an
    unknown name, RecipeError with every mistake of the file and the overrides.
    """
    path = find(name_or_path)
    return check(overlay(document.read(path), overrides))


def find(name_or_path: str | Path | None = None) -> Path:
    """The file of a preset or a path, by the rules of `load_recipe`."""
    if name_or_path is None:
        return LOCAL if LOCAL.is_file() else preset_folder() / f"{DEFAULT_PRESET}.yaml"
    text = str(name_or_path)
    if text in preset_names():
        return preset_folder() / f"{text}.yaml"
    try:
        path = Path(text).expanduser()
        if path.is_file():
            return path
    except (RuntimeError, OSError, ValueError) as error:  # ~nobody, too long, a NUL in it
        raise UsageError(f"recipe {text[:60]!r} can be no file ({error}).") from error
    if isinstance(name_or_path, Path) or "/" in text or path.suffix in (".yaml", ".yml"):
        raise UsageError(f"recipe {text} does not exist.")
    raise UsageError(f"no preset is called {text!r}; {nearest(text, preset_names())}")


def preset_names() -> list[str]:
    """Names of all presets, the default first."""
    names = sorted(path.stem for path in preset_folder().glob("*.yaml"))
    return sorted(names, key=lambda name: name != DEFAULT_PRESET)


def presets() -> list[Preset]:
    """All presets, checked, the default first."""
    found = []
    for name in preset_names():
        path = preset_folder() / f"{name}.yaml"
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found.append(Preset(name, first.removeprefix("#").strip(), load_recipe(path)))
    return found


def preset_folder() -> Path:
    """Where the presets lie: inside the installed package, or at the top of a source checkout."""
    package = Path(str(resources.files("g4tool")))
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def dump(recipe: Recipe) -> str:
    """`recipe` as YAML with every effective value; reading it gives the same recipe."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
