"""`g4 convert`: a checked checkpoint under canonical names."""

from pathlib import Path
from typing import Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import check_output, confirm_download, ensure, put
from g4tool.cli.output import size

HELP = """Check a checkpoint and give it canonical names.

Every tensor's name, shape and values are checked. The result is a view, an index over the source's
files; with --materialize, new shards.

    g4 convert ./my-gemma --materialize --dtype bfloat16 --output ./canonical
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "convert", help=HELP)(convert)


def convert(
    env: Env,
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder or tiny model [the recipe's].")
    ] = None,
    materialize: Annotated[
        bool, typer.Option("--materialize", help="Write new shards instead of a view.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="With --materialize: bfloat16, float16 or float32.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the result into this folder too.")
    ] = None,
) -> None:
    """Ensure the convert stage and say what it found."""
    from g4tool.stages.build import build

    flags = {
        "model": model,
        "revision": revision,
        "convert.materialize": materialize or None,
        "convert.dtype": dtype,
    }
    chosen = build(env.recipe(None, flags))
    check_output(env, chosen.convert, output)
    confirm_download(env, chosen.source)
    artifact = ensure(env, chosen.convert)
    with env.store.using(artifact):
        folder = put(env, artifact, output)
    facts = artifact.manifest["facts"]
    dropped = f", {len(facts['dropped'])} unused left out" if facts["dropped"] else ""
    env.out.result(
        {"identity": artifact.identity, "path": str(folder), **facts},
        f"{folder}  ({facts['tensors']} tensors, {size(facts['bytes'])}{dropped})",
    )
