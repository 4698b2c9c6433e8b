"""`g4 build`: every stage of a recipe, in order; what is cached is reused."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import check_output, confirm_download, ensure, put, show_decision
from g4tool.errors import IncompleteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from g4tool.pipeline.artifact import Decision
    from g4tool.pipeline.stage import Stage
    from g4tool.recipe.model import Recipe
    from g4tool.stages.build import Build

HELP = """Make everything a recipe asks for.

What is cached is reused. Interrupt it at any moment; the next run goes on.

    g4 build tiny-31b

    g4 build 31b-int4-hqq --dry-run
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "build", help=HELP)(build)


def build(
    env: Env,
    preset: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A preset or a YAML file.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="Stop after download, convert, quantize, export-cpu, export-cuda, compile-neuron;"
            " with upload, publish it too.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and why; do nothing.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Another model than the recipe's.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one].")
    ] = None,
    stream_source: Annotated[
        bool,
        typer.Option(
            "--stream-source",
            help="Fetch a Hub model's shards one by one as they are quantized, and keep none.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the last artifact into this folder too.")
    ] = None,
) -> None:
    """Plan the recipe's stages, then make what is missing."""
    from g4tool.stages import build as building

    recipe = env.recipe(preset, {"model": model})
    chosen = building.build(recipe, device, Path(sys.executable), stream_source)
    publishing = until == "upload"
    if publishing:
        _check_publishing(recipe, dry_run)
        until = None
    stages = chosen.until(until) if until else chosen.stages
    missing = {
        name: why for name, why in chosen.missing.items() if not until or name == stages[-1].name
    }
    check_output(env, stages[-1], output)
    with env.out.progress() as report:
        decisions = [env.store.plan(stage, report) for stage in stages]
    if dry_run:
        _show_plan(env, decisions, missing)
        return
    results = _make(env, chosen, stages, decisions)
    with env.store.using(results[-1]):
        folder = put(env, results[-1], output)
    if publishing:
        from g4tool.cli.upload import publish

        publish(env, recipe, chosen, [])
        return
    if recipe.upload and not until:
        env.out.note(
            f"{'upload':<10} not asked for  g4 upload publishes it as {recipe.upload.repo}"
        )
    done = [{"stage": d.stage, "identity": d.identity, "action": d.action} for d in decisions]
    result = {"stages": done, "path": str(folder)}
    env.out.result(result | ({"incomplete": list(missing)} if missing else {}), str(folder))
    if missing and env.as_json:
        # The object above says it: an error's would be a second one.
        raise typer.Exit(IncompleteError.exit_code)
    if missing:
        raise IncompleteError(" ".join(f"{name}: {why}" for name, why in missing.items()))


def _check_publishing(recipe: "Recipe", dry_run: bool) -> None:
    """Refuse what cannot be published, before hours of work for it."""
    from g4tool.hub.upload import check_login

    if recipe.upload is None:
        raise UsageError("--until upload: this recipe has no upload section.")
    if not dry_run:
        check_login()


def _make(
    env: Env, chosen: "Build", stages: "list[Stage]", decisions: "list[Decision]"
) -> list[Any]:
    """Every stage's artifact; where all last ones are there, nothing before is made again."""
    from g4tool.cli.quantize import show_account

    last = [
        decision
        for stage, decision in zip(stages, decisions, strict=True)
        if stage in chosen.ends or stage is stages[-1]
    ]
    if all(decision.action == "reuse" for decision in last):
        for decision in decisions[:-1]:
            if decision.action == "reuse":
                show_decision(env, decision)
            else:
                env.out.note(f"{decision.stage:<10} not needed {decision.identity[:12]}")
        return [ensure(env, stages[-1])]
    confirm_download(env, chosen.source)
    results = [ensure(env, stage) for stage in stages]
    if stages[-1] is chosen.quantize:
        show_account(env, results[-1])
    return results


def _show_plan(env: Env, decisions: "list[Decision]", missing: "Mapping[str, str]") -> None:
    from g4tool.cli.output import table

    rows: list[tuple[str, ...]] = [
        (d.stage, d.action, d.identity[:12], d.reason) for d in decisions
    ]
    planned = {decision.stage for decision in decisions}
    rows += [(name, "none", "", why) for name, why in missing.items() if name not in planned]
    plan = {"plan": [vars(decision) for decision in decisions]}
    env.out.result(
        plan | ({"incomplete": list(missing)} if missing else {}),
        table(rows, ("stage", "action", "identity", "why")),
    )
