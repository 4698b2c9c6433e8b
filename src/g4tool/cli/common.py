"""Options that every command takes, before or after the command's name, and what they lead to."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4tool.cli.output import Output
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.store import Store
    from g4tool.recipe.document import Document
    from g4tool.recipe.model import Recipe

Flag = str | int | bool | list[str] | None

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

    def recipe(
        self,
        name: str | None = None,
        flags: Mapping[str, Flag] = MappingProxyType({}),
        section: str | None = None,
    ) -> "Recipe":
        """The recipe called `name` (or --recipe, ./g4.yaml, the default), with every --set applied.

        `flags` are values of a command's own flags by recipe key ("quantize.group_size"); they win
        over --set, are taken as they are, and None is a flag that was not given. `section` is
        there in the result even where the recipe does not ask for it.
        """
        from g4tool.recipe import document
        from g4tool.recipe.check import check
        from g4tool.recipe.load import find
        from g4tool.recipe.overrides import overlay

        if name and self.recipe_name and name != self.recipe_name:
            raise UsageError(
                f"two recipes are named, {name!r} and --recipe {self.recipe_name!r}: give one."
            )
        found = overlay(document.read(find(name or self.recipe_name)), self.overrides)
        if section and found.data.get(section) is None:
            found.data[section] = {}
        for key, value in flags.items():
            if value is not None:
                _set(found, key.split("."), value)
        return check(found)

    def confirm(self, question: str) -> None:
        """Ask before something large; without a terminal it takes --yes."""
        if self.yes:
            return
        if self.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{question} Add --yes to go ahead.")
        if not typer.confirm(question + " Go ahead?", err=True):
            raise UsageError("stopped: nothing was fetched or changed.")


def _set(found: "Document", keys: list[str], value: Flag) -> None:
    """Set a value as it is: read as YAML, a path such as `a: b` would be something else."""
    inside: Any = found.data
    for key in keys[:-1]:
        if inside.get(key) is None:
            inside[key] = {}
        inside = inside[key]
        if not isinstance(inside, dict):
            return  # a mistake of the recipe, which its check tells
    inside[keys[-1]] = value
    found.origins[tuple(keys)] = f"--{keys[-1].replace('_', '-')}"


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
