"""What several commands do with MODEL: ask before a large download, show what each stage did."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.cli.common import Env
from g4tool.cli.output import size
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.artifact import Artifact, Decision, Source
    from g4tool.pipeline.locks import Holder
    from g4tool.pipeline.stage import Stage

LARGE_DOWNLOAD = 1_000_000_000
"""Bytes from which a download that a command implies is asked about first."""

_WORDS = {"reuse": "cached", "resume": "resuming", "make": "making"}


def show_decision(env: Env, decision: "Decision") -> None:
    """One line a stage, once: what is done, its identity, and why."""
    if decision.identity in env.shown:
        return
    env.shown.add(decision.identity)
    why = "" if decision.reason == "cached" else f"  {decision.reason}"
    word = _WORDS[decision.action]
    env.out.note(f"{decision.stage:<10} {word:<9} {decision.identity[:12]}{why}")


def show_wait(env: Env, holder: "Holder | None") -> None:
    """Who is making the same artifact."""
    env.out.note(f"waiting for {holder or 'another process'}, which is making the same artifact")


def ensure(env: Env, stage: "Stage") -> "Artifact":
    """The stage's artifact, made where it is missing, with notes and progress on stderr."""
    with env.out.progress() as report:
        return env.store.ensure(
            stage,
            report,
            lambda decision: show_decision(env, decision),
            lambda holder: show_wait(env, holder),
        )


def check_output(env: Env, stage: "Stage | Source", output: Path | None) -> None:
    """Refuse an --output that cannot take the stage's artifact, before the work for it."""
    if output:
        from g4tool.pipeline.artifact import Source
        from g4tool.pipeline.place import check_target

        with env.out.progress() as report:
            given = isinstance(stage, Source)
            identity = None if given else env.store.identity(stage, report)
            check_target(output, identity, env.store.home)


def put(env: Env, artifact: "Artifact", output: Path | None) -> Path:
    """Place the artifact for --output; returns the folder to name to the user.

    A view stays a view: it refers to the source's files, and only a download's are copied.
    """
    if not output:
        return artifact.path
    from g4tool.pipeline.place import place

    with env.out.progress() as report:
        place(artifact, output, external=artifact.stage == "download", report=report)
    return output


def confirm_download(env: Env, source: "Stage | Source") -> None:
    """Ask before gigabytes are fetched for a command that is about something else."""
    from g4tool.stages.checkpoints import DownloadStage

    if not isinstance(source, DownloadStage) or env.store.plan(source).action == "reuse":
        return
    from g4tool.hub.download import missing

    files = missing(source.repo, source.commit)
    total = sum(count for _, count in files)
    if total >= LARGE_DOWNLOAD:
        env.confirm(f"{source.repo} must be downloaded first: {size(total)} in {len(files)} files.")


def find_model(env: Env, model: str, revision: str) -> Path:
    """The folder that holds MODEL, fetched or made first where that is needed.

    `using_model` also keeps it from being pruned while it is read.
    """
    with using_model(env, model, revision) as folder:
        return folder


@contextmanager
def using_model(env: Env, model: str, revision: str) -> Iterator[Path]:
    """The folder that holds MODEL, which nobody prunes while this lasts."""
    from g4tool.pipeline.artifact import Source
    from g4tool.pipeline.home import user_path
    from g4tool.stages.checkpoints import TINY_MODELS, checkpoint_folder, checkpoint_stage

    path = user_path(Path(model))
    if model not in TINY_MODELS and path.is_dir():
        with _using_folder(env, path):
            yield path
        return
    stage = checkpoint_stage(model, revision)
    if isinstance(stage, Source):
        yield stage.path
        return
    confirm_download(env, stage)
    artifact = ensure(env, stage)
    with env.store.using(artifact):
        yield checkpoint_folder(artifact)


@contextmanager
def _using_folder(env: Env, folder: Path) -> Iterator[None]:
    """Keep `folder` if it is an artifact of the store; a folder elsewhere needs no store."""
    from g4tool.pipeline import manifest
    from g4tool.pipeline.store import default_home

    real = Path(os.path.realpath(folder))
    try:
        artifacts = os.path.realpath((env.home or default_home()) / "artifacts")
    except UsageError:
        artifacts = None
    if str(real.parent.parent) != artifacts or not (real / manifest.NAME).is_file():
        yield
        return
    with env.store.using(manifest.load(real)):
        yield
