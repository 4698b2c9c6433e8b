"""A measured assignment as a recipe, and back."""

from pathlib import Path

from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.recipe.load import dump, load_recipe
from g4tool.stages.assign import recipe_of
from g4tool.stages.quantize import options_of


def test_the_recipe_read_back_gives_the_same_options(tmp_path: Path) -> None:
    options = QuantizeOptions(
        group_size=64,
        rules=(
            Rule(r"^embed_tokens\.weight$", "int8"),
            Rule(r"^layers\.(0|3)\.mlp\.down_proj\.weight$", "int4-hqq", 32, "hqq"),
            Rule(r"^layers\.1\.mlp\.down_proj\.weight$", "keep"),
        ),
    )
    path = tmp_path / "found.yaml"
    path.write_text(dump(recipe_of(options, "tiny-31b-5.2bpw", "tiny-31b")))
    recipe = load_recipe(path)
    assert recipe.quantize is not None
    assert options_of(recipe.quantize) == options
    assert (recipe.name, recipe.model) == ("tiny-31b-5.2bpw", "tiny-31b")
