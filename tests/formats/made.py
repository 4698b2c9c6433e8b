"""The shipped tiny models, quantized in every format that holds them; made once a session."""

from pathlib import Path

import pytest

from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.store import Store
from g4tool.recipe.load import load_recipe
from g4tool.recipe.model import Recipe, Rule
from g4tool.stages.build import build

_made: dict[str, Artifact] = {}

# One kind of matrix and a layer's experts at 8 bit, so that loaders meet groups of layers.
_MIXED = [
    Rule(match="o_proj", scheme="int8", group_size=64),
    Rule(match=r"layers\.0\.experts", scheme="int8"),
]


def recipe_of(name: str, formats: list[str], mixed: bool = False) -> Recipe:
    """The recipe that quantizes a tiny model into `formats`."""
    recipe = load_recipe("tiny-31b", [f"model={name}"])
    assert recipe.quantize is not None
    rules = [*_MIXED, *recipe.quantize.rules] if mixed else recipe.quantize.rules
    quantize = recipe.quantize.model_copy(update={"formats": formats, "rules": rules})
    return recipe.model_copy(update={"quantize": quantize})


def make(recipe: Recipe, home: Path) -> Artifact:
    """The bundle of `recipe`, in a store of its own."""
    chosen = build(recipe, "cpu")
    assert chosen.quantize is not None
    return Store(home).ensure(chosen.quantize)


def tiny_bundle(name: str, factory: pytest.TempPathFactory, mixed: bool = False) -> Artifact:
    """The bundle of a tiny model: torchao at its root, the others in folders."""
    key = f"{name}{'-mixed' if mixed else ''}"
    if key not in _made:
        formats = ["torchao", "compressed-tensors"]
        formats += ["executorch"] if name == "tiny-31b" else []
        _made[key] = make(recipe_of(name, formats, mixed), factory.mktemp(key))
    return _made[key]
