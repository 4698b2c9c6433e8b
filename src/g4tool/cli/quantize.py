"""`g4 quantize`: the main road, from a checkpoint to an int4 bundle."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import confirm_download, ensure

if TYPE_CHECKING:
    from g4tool.pipeline.artifact import Artifact

HELP = """Quantize a model into an int4 bundle.

One decoder layer at a time: interrupt it, and the next run goes on at the last finished layer.

Ends with an account of every weight: its scheme, size and error.

    g4 quantize --layerwise int4-hqq --model google/gemma-4-31B-it

    g4 quantize int4-hqq --model tiny-31b --group-size 64
"""


class SchemeName(StrEnum):
    """Ways to store a weight."""

    int4_hqq = "int4-hqq"
    int4_rtn = "int4-rtn"
    int4_sym = "int4-sym"
    int8 = "int8"
    keep = "keep"


class SolverName(StrEnum):
    """Ways to find a group's scale and zero point."""

    hqq = "hqq"
    rtn = "rtn"
    reference = "reference"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "quantize", help=HELP)(quantize)


def quantize(
    env: Env,
    scheme: Annotated[SchemeName | None, typer.Argument(help="[the recipe's]")] = None,
    layerwise: Annotated[
        bool | None,
        typer.Option(
            "--layerwise/--no-layerwise",
            help="One file and one step to resume from a layer, or one file for all.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder or tiny model [the recipe's].")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Weights a scale: 32, 64 or 128.")] = None,
    solver: Annotated[SolverName | None, typer.Option(help="[the scheme's own]")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one].")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the bundle into this folder too.")
    ] = None,
) -> None:
    """Ensure the quantize stage and print the account."""
    from g4tool.stages.build import build

    given = {
        "model": model,
        "revision": revision,
        "quantize.scheme": scheme.value if scheme else None,
        "quantize.layerwise": None if layerwise is None else str(layerwise).lower(),
        "quantize.group_size": group_size,
        "quantize.solver": solver.value if solver else None,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    if not any(override.startswith("quantize.") for override in overrides):
        overrides.append("quantize.layerwise=true")
    chosen = build(env.recipe(None, *overrides), device)
    assert chosen.quantize is not None, "an override of a section's key makes the section"
    confirm_download(env, chosen.source)
    artifact = ensure(env, chosen.quantize)
    if output:
        from g4tool.pipeline.place import place

        place(artifact, output)
    show_account(env, artifact)
    folder = output or artifact.path
    env.out.result(
        {"identity": artifact.identity, "path": str(folder), **artifact.manifest["facts"]},
        str(folder),
    )


def show_account(env: Env, artifact: "Artifact") -> None:
    """Every weight's scheme, size and error, in groups, on stderr."""
    from g4tool.quantize.account import from_json, lines

    facts = artifact.manifest["facts"]
    for line in (*lines(from_json(facts["tensors"])), *facts["notes"]):
        env.out.note(line)
