"""`g4 recipe list | show | validate`: the presets, and what a recipe says once all is applied."""

from typing import Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.output import table

app = typer.Typer(help="Presets and recipe files.", no_args_is_help=True, rich_markup_mode=None)

NameArgument = Annotated[
    str | None, typer.Argument(metavar="NAME|FILE", help="A preset or a YAML file.")
]


@command(app, "list", help="List the presets that ship with g4.")
def list_presets(env: Env) -> None:
    """Print every preset with its model and what it is for."""
    from g4tool.recipe.load import presets

    found = presets()
    rows = [(preset.name, preset.recipe.model, preset.summary) for preset in found]
    env.out.result(
        {
            "presets": [
                {"name": p.name, "model": p.recipe.model, "summary": p.summary} for p in found
            ]
        },
        table(rows, ("preset", "model", "what it is")),
    )


@command(app, "show", help="Print a recipe as YAML, overrides applied.")
def show(env: Env, name: NameArgument = None) -> None:
    """Print the effective recipe; its output is a recipe file."""
    from g4tool.recipe.load import dump

    recipe = env.recipe(name)
    env.out.result(recipe.model_dump(mode="json", by_alias=True), dump(recipe).rstrip())


@command(app, "validate", help="Check a recipe file and name every mistake with its line.")
def validate(env: Env, name: NameArgument = None) -> None:
    """Exit 0 when the recipe is right, 2 with one line a mistake otherwise."""
    recipe = env.recipe(name)
    env.out.result({"valid": True, "name": recipe.name}, f"{recipe.name}: valid")
