"""What several commands do with MODEL: ask before a large download, show what each stage did."""

from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.cli.common import Env
from g4tool.cli.output import size

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
    """The folder that holds MODEL, fetched or made first where that is needed."""
    from g4tool.pipeline.artifact import Source
    from g4tool.stages.checkpoints import checkpoint_folder, checkpoint_stage

    path = Path(model).expanduser()
    if path.is_dir():
        return path
    stage = checkpoint_stage(model, revision)
    assert not isinstance(stage, Source), "only a folder is a source"
    confirm_download(env, stage)
    return checkpoint_folder(ensure(env, stage))
