"""Options that every command takes, before or after the command's name, and what they lead to."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4tool.cli.output import Output
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.store import Store
    from g4tool.recipe.model import Recipe

RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME|FILE", help="A preset or a YAML file [./g4.yaml]."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No notes, no progress.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Agree to large downloads and deletions.")]
HomeOption = Annotated[
    Path | None,
    typer.Option("--home", metavar="DIR", help="The store's folder [G4_HOME, or a cache folder]."),
]

SHARED: dict[str, tuple[Any, Any]] = {
    "recipe": (RecipeOption, None),
    "set": (SetOption, None),
    "json": (JsonOption, False),
    "quiet": (QuietOption, False),
    "debug": (DebugOption, False),
    "yes": (YesOption, False),
    "home": (HomeOption, None),
}


@dataclass
class Env:
    """What the shared options say, and the recipe, store and output that follow from them."""

    recipe_name: str | None = None
    overrides: list[str] = field(default_factory=list)
    as_json: bool = False
    quiet: bool = False
    debug: bool = False
    yes: bool = False
    home: Path | None = None
    shown: set[str] = field(default_factory=set)

    @functools.cached_property
    def out(self) -> Output:
        """Where this command prints."""
        return Output(self.as_json, self.quiet)

    @functools.cached_property
    def store(self) -> "Store":
        """The artifact store of --home, G4_HOME or the user's cache folder."""
        from g4tool.pipeline.store import Store, default_home

        return Store(self.home or default_home())

    def recipe(self, name: str | None = None, *extra: str) -> "Recipe":
        """The recipe called `name` (or --recipe, ./g4.yaml, the default), with every --set applied.

        `extra` are overrides a command's own flags stand for; they win over --set.
        """
        from g4tool.recipe.load import load_recipe

        if name and self.recipe_name and name != self.recipe_name:
            raise UsageError(
                f"two recipes are named, {name!r} and --recipe {self.recipe_name!r}: give one."
            )
        return load_recipe(name or self.recipe_name, overrides=[*self.overrides, *extra])

    def confirm(self, question: str) -> None:
        """Ask before something large; without a terminal it takes --yes."""
        if self.yes:
            return
        if self.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{question} Add --yes to go ahead.")
        if not typer.confirm(question + " Go ahead?", err=True):
            raise UsageError("stopped: nothing was fetched or changed.")


def command(app: typer.Typer, name: str, **settings: Any) -> Callable[..., Callable[..., None]]:
    """Register a function `f(env, ...)` as a command that also takes every shared option."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        added = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for key, (kind, default) in SHARED.items()
        ]
        context = inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )

        @functools.wraps(function)
        def run(context: typer.Context, **values: Any) -> None:
            env = merge(context.find_root().obj, {key: values.pop(key) for key in SHARED})
            function(env, **values)

        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature([context, *keyword_only, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [context, *own, *added]}
        app.command(name, **settings)(run)
        return function

    return register


def merge(outer: Env | None, values: dict[str, Any]) -> Env:
    """The shared options given before the command's name, overlaid by those given after it."""
    env = outer or Env()
    return Env(
        recipe_name=values["recipe"] or env.recipe_name,
        overrides=[*env.overrides, *(values["set"] or [])],
        as_json=values["json"] or env.as_json,
        quiet=values["quiet"] or env.quiet,
        debug=values["debug"] or env.debug,
        yes=values["yes"] or env.yes,
        home=values["home"] or env.home,
    )
