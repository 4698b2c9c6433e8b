"""`g4 upload`: what a recipe made, as one repository on the Hub."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4tool.cli.common import Env, Flag, command
from g4tool.cli.models import confirm_download, ensure
from g4tool.cli.output import size, table
from g4tool.errors import G4Error, UsageError

if TYPE_CHECKING:
    from g4tool.hub.upload import Published, Remote
    from g4tool.pipeline.artifact import Artifact
    from g4tool.recipe.model import Recipe
    from g4tool.stages.build import Build
    from g4tool.stages.upload import Publication

HELP = """Publish a bundle on the Hub, with a model card.

What the recipe makes is taken from the store, or made first. The repository is laid out here, read
as its users will read it, and appears on the Hub in one commit, verified. Interrupt it at any
moment; the next run sends what is missing. Log in with `hf auth login` first.

ARTIFACT is published beside the bundle, in a folder of its name: export-cpu, export-cuda,
compile-neuron, another layout of the recipe's quantize.formats, or the folder of an exported
program.

    g4 upload gasoonjia/Gemma4-31B-HQQ-INT4 --dry-run

    g4 upload gasoonjia/Gemma4-31B-HQQ-INT4 export-cuda
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "upload", help=HELP)(upload)


def upload(
    env: Env,
    repo_id: Annotated[
        str | None, typer.Argument(metavar="REPO_ID", help="owner/name [the recipe's].")
    ] = None,
    artifacts: Annotated[
        list[str] | None, typer.Argument(metavar="ARTIFACT", help="What to add to the bundle.")
    ] = None,
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository [public].")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show files, sizes and card; send nothing.")
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Which layout of the bundle to publish [the first]."),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option("--eval", metavar="FILE", help="What `g4 eval --json` printed, for the card."),
    ] = None,
) -> None:
    """Make what is missing, lay it out, check it, publish it."""
    from g4tool.hub.upload import check_login
    from g4tool.stages.build import build

    flags: dict[str, Flag] = {
        "upload.repo": repo_id,
        "upload.private": private,
        "upload.layout": layout,
    }
    recipe = env.recipe(None, flags, section="upload")
    figures = None if evaluation is None else _figures(evaluation)
    if not dry_run:
        check_login()
    publish(env, recipe, build(recipe), artifacts or [], dry_run, figures)


def publish(
    env: Env,
    recipe: "Recipe",
    built: "Build",
    names: list[str],
    dry_run: bool = False,
    figures: Any = None,
) -> None:
    """Publish the recipe's bundle and the artifacts in `names`, and print what came of it."""
    from g4tool.stages.upload import LAYOUTS, lay_out

    assert recipe.upload is not None, "the section is there"
    if built.quantize is None:
        raise UsageError(f"the recipe {recipe.name} quantizes nothing, so there is no bundle.")
    asked = list(dict.fromkeys([*recipe.upload.artifacts, *names]))
    others = _programs(env, built, [name for name in asked if name not in LAYOUTS], dry_run)
    bundle = _made(env, built, built.quantize, dry_run)
    with ExitStack() as stack:
        for artifact in (bundle, *others.values()):
            if artifact.stage != "source":
                stack.enter_context(env.store.using(artifact))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="g4-upload-")))
        extra = [name for name in asked if name in LAYOUTS]
        publication = lay_out(recipe, bundle, others, extra, folder, figures)
        for note in publication.notes:
            env.out.note(note)
        _check(env, publication)
        if dry_run:
            _show(env, publication)
            return
        remote = _ask(env, recipe.upload.repo, recipe.upload.private)
        done = _send(env, publication, recipe.upload.private, remote)
    _result(env, publication, done)


def _programs(env: Env, built: "Build", names: list[str], dry_run: bool) -> "dict[str, Artifact]":
    """Folder name -> artifact of every program that is asked for."""
    from g4tool.stages.upload import PROGRAMS

    stages = {
        "export-cpu": built.export_cpu,
        "export-cuda": built.export_cuda,
        "compile-neuron": built.neuron,
    }
    found = {}
    for name in names:
        if name in PROGRAMS:
            if name in built.missing and (name != "compile-neuron" or stages[name] is None):
                raise G4Error(f"{name} cannot be published: {built.missing[name]}")
            stage = stages[name]
            if stage is None:
                raise UsageError(f"{name}: the recipe has no such section, so nothing makes it.")
            found[name] = _made(env, built, stage, dry_run)
        else:
            found[Path(name).absolute().name] = _given(env, name)
    return found


def _made(env: Env, built: "Build", stage: Any, dry_run: bool) -> "Artifact":
    """The stage's artifact; for a dry run only if it is there."""
    with env.out.progress() as report:
        decision = env.store.plan(stage, report)
    if dry_run and decision.action != "reuse":
        raise G4Error(
            f"{stage.name} is not made yet ({decision.reason}): make it with g4 build, then"
            " --dry-run shows what would be published."
        )
    if decision.action != "reuse":
        confirm_download(env, built.source)
    return ensure(env, stage)


def _given(env: Env, name: str) -> "Artifact":
    """The folder of an exported program that the user names."""
    from g4tool.backends.executorch.folder import is_export
    from g4tool.pipeline.artifact import Source
    from g4tool.pipeline.home import user_path
    from g4tool.pipeline.manifest import RESERVED
    from g4tool.pipeline.source import list_files, resolve
    from g4tool.stages.upload import LAYOUTS, PROGRAMS

    path = user_path(Path(name))
    if not path.is_dir() or not is_export(path):
        raise UsageError(
            f"{name} is none of {', '.join((*PROGRAMS, *LAYOUTS))} and no folder of an exported"
            " program."
        )
    files = tuple(file for file in list_files(Source(path)) if file not in RESERVED)
    return resolve(Source(path, files), env.store.hashes)


def _check(env: Env, publication: "Publication") -> None:
    from g4tool.hub.assemble import check_files
    from g4tool.hub.scan import machine_marks
    from g4tool.stages.upload import reread

    with env.out.progress() as report:
        check_files(publication.files, machine_marks([env.store.home]), report)
        for note in reread(publication, report):
            env.out.warn(note)


def _ask(env: Env, repo: str, private: bool) -> "Remote | None":
    """What is on the Hub now. What somebody else put there is never replaced."""
    from g4tool.hub.upload import look

    remote = look(repo)
    if remote is None or remote.is_new:
        return remote
    if private and not remote.private:
        raise UsageError(
            f"{repo} is there already and public: make it private in its settings on the Hub, or"
            " leave out --private."
        )
    if not remote.is_ours:
        raise G4Error(
            f"{repo} exists already and holds files that g4 did not publish, such as"
            f" {remote.files[0].name}: give another name."
        )
    return remote


def _send(
    env: Env, publication: "Publication", private: bool, remote: "Remote | None"
) -> "Published":
    from g4tool.hub.upload import differs, upload

    if remote is not None and not remote.is_new and differs(publication.files, remote):
        env.confirm(f"{publication.repo} holds another bundle, which this one replaces.")
    with env.out.progress() as report:
        return upload(
            publication.repo,
            publication.files,
            f"Upload {publication.repo.partition('/')[2]} with g4",
            remote,
            private,
            report=report,
        )


def _show(env: Env, publication: "Publication") -> None:
    files = {file.name: file.size for file in publication.files}
    rows = [(name, size(count)) for name, count in files.items()]
    total = f"{len(files)} files, {size(sum(files.values()))}, for {publication.repo}"
    env.out.result(
        {"repo": publication.repo, "files": files, "card": publication.card, "sent": []},
        f"{table(rows, ('file', 'size'))}\n{total}\n\n{publication.card.rstrip()}",
    )


def _result(env: Env, publication: "Publication", done: "Published") -> None:
    files = {file.name: {"size": file.size, "sha256": file.sha256} for file in publication.files}
    total = size(sum(file.size for file in publication.files))
    news = f"{len(done.sent)} sent" if done.sent or done.removed else "all there already"
    env.out.result(
        {
            "repo": done.repo,
            "commit": done.commit,
            "url": done.url,
            "files": files,
            "sent": list(done.sent),
            "removed": list(done.removed),
        },
        f"{done.url}  ({len(files)} files, {total}, {news}, verified)",
    )


def _figures(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--eval {path}: {error}.") from error
