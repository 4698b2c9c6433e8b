"""`g4 download`: a model's files, verified."""

from pathlib import Path
from typing import Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import check_output, ensure, put
from g4tool.cli.output import size
from g4tool.errors import UsageError

HELP = """Fetch a model's files and verify them.

Weights, config, tokenizer, chat template and processor; goes on where it was cut off, and checks
every file against the Hub's checksums.

    g4 download google/gemma-4-E2B-it
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "download", help=HELP)(download)


def download(
    env: Env,
    model: Annotated[str, typer.Argument(help="Hub id (owner/name) or a tiny model's name.")],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "main",
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the files into this folder too.")
    ] = None,
) -> None:
    """Ensure the download stage and say where its files are."""
    from g4tool.pipeline.artifact import Source
    from g4tool.pipeline.source import resolve
    from g4tool.stages.checkpoints import (
        TINY_MODELS,
        DownloadStage,
        checkpoint_folder,
        checkpoint_stage,
    )

    stage = checkpoint_stage(model, revision)
    if not isinstance(stage, DownloadStage) and model not in TINY_MODELS:
        kind = "folder" if isinstance(stage, Source) else "file"
        raise UsageError(f"{model} is a {kind} on this machine: there is nothing to download.")
    check_output(env, stage, output)
    if isinstance(stage, Source):
        artifact = resolve(stage, env.store.hashes)
        folder = put(env, artifact, output)
    else:
        artifact = ensure(env, stage)
        with env.store.using(artifact):
            folder = put(env, artifact, output) if output else checkpoint_folder(artifact)
    records = {**artifact.manifest["files"], **artifact.manifest.get("external", {})}
    total = sum(record["size"] for record in records.values())
    env.out.result(
        {
            "model": model,
            **artifact.manifest.get("parameters", {}),
            "identity": artifact.identity,
            "files": records,
            "path": str(folder),
        },
        f"{folder}  ({len(records)} files, {size(total)}, verified)",
    )
