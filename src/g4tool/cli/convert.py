"""`g4 convert`: a checked checkpoint under canonical names, or a GGUF file for llama.cpp."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import check_output, confirm_download, ensure, put
from g4tool.cli.output import size
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.stages.build import Build

_DTYPES = ("bfloat16", "float16", "float32")

HELP = """Check a checkpoint and give it canonical names.

Every tensor's name, shape and values are checked. The result is a view, an index over the source's
files; with --materialize, new shards.

With --to gguf it is one file for llama.cpp, of a checkpoint or of a bundle: int4 becomes Q4_1 (Q4_0
where it is symmetric), int8 Q8_0, code for code. It holds the text model; llama.cpp keeps towers
in a file of their own.

    g4 convert ./my-gemma --materialize --dtype bfloat16 --output ./canonical

    g4 convert ./my-bundle --to gguf --output ./gguf
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "convert", help=HELP)(convert)


def convert(
    env: Env,
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, GGUF file or tiny model [the recipe's].")
    ] = None,
    materialize: Annotated[
        bool, typer.Option("--materialize", help="Write new shards instead of a view.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="With --materialize or --to gguf: bfloat16, float16 or float32."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Write another format: gguf.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the result into this folder too.")
    ] = None,
) -> None:
    """Ensure the convert stage, or what --to names, and say what it found."""
    from g4tool.stages.build import build

    if to is not None:
        _check_format(to, materialize, dtype)
    flags = {
        "model": model,
        "revision": revision,
        "convert.materialize": materialize or None,
        "convert.dtype": None if to else dtype,
    }
    chosen = build(env.recipe(None, flags))
    if to is not None:
        _to_gguf(env, chosen, dtype, output)
        return
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


def _check_format(to: str, materialize: bool, dtype: str | None) -> None:
    if to != "gguf":
        raise UsageError(f"--to {to}: the formats are gguf.")
    if materialize:
        raise UsageError("--materialize writes safetensors: leave it out with --to gguf.")
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: give one of {', '.join(_DTYPES)}.")


def _to_gguf(env: Env, chosen: "Build", dtype: str | None, output: Path | None) -> None:
    from g4tool.stages.gguf import FILE, gguf_stage

    stage = gguf_stage(chosen, dtype)
    check_output(env, stage, output)
    confirm_download(env, chosen.source)
    artifact = ensure(env, stage)
    with env.store.using(artifact):
        path = put(env, artifact, output) / FILE
    facts = artifact.manifest["facts"]
    types = ", ".join(f"{count} {kind}" for kind, count in facts["types"].items())
    lost = f"; {facts['left_out']} tensors of towers left out" if facts["left_out"] else ""
    moved = f", rounded by {facts['error']:.1%} of a step at most" if facts["error"] else ""
    env.out.result(
        {"identity": artifact.identity, "path": str(path), **facts},
        f"{path}  ({size(facts['bytes'])}: {types}{moved}{lost})",
    )
