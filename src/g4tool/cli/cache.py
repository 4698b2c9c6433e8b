"""`g4 cache list | show | verify | prune`: the store."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.output import size, table
from g4tool.errors import G4Error, UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.cache import Entry, Pruned

app = typer.Typer(help="The artifact store.", no_args_is_help=True, rich_markup_mode=None)

PREFIX = "The first digits of an artifact's identity."


@command(app, "list", help="List every artifact, finished or not.")
def list_artifacts(env: Env) -> None:
    """Print stage, identity, state, size, age and how many artifacts were made from each."""
    from g4tool.pipeline.cache import entries

    found = entries(env.store)
    rows = [
        (e.stage, e.identity[:12], e.state, size(e.size), _when(e.made), str(len(e.used_by)))
        for e in found
    ]
    total = f"{size(sum(e.size for e in found))} in {env.store.home}"
    listing = table(rows, ("stage", "identity", "state", "size", "made", "used by"))
    env.out.result(
        {"home": str(env.store.home), "artifacts": [_data(e) for e in found]},
        f"{listing}\n{total}" if rows else f"nothing yet in {env.store.home}",
    )


@command(app, "show", help="Show one artifact: where it is, what it was made from, its files.")
def show(env: Env, identity: Annotated[str, typer.Argument(help=PREFIX)]) -> None:
    """Print the entry and its manifest."""
    import yaml

    from g4tool.pipeline.cache import show as show_artifact

    entry, artifact = show_artifact(env.store, identity)
    data = _data(entry) | {"manifest": dict(artifact.manifest) if artifact else None}
    parts: dict[str, Any] = {"stage": entry.stage, "identity": entry.identity}
    parts |= {"state": entry.state, "path": str(entry.path), "made": _when(entry.made)}
    if artifact:
        manifest = artifact.manifest
        parts |= {"parameters": manifest["parameters"], "environment": manifest["environment"]}
        parts["inputs"] = [f"{each['stage']} {each['identity']}" for each in manifest["inputs"]]
        parts["files"] = {
            name: f"{size(record['size'])}  {record['sha256']}"
            for name, record in {**manifest["files"], **manifest["external"]}.items()
        }
    env.out.result(data, yaml.safe_dump(parts, sort_keys=False, width=120).rstrip())


@command(app, "verify", help="Read every file again and compare it with its manifest.")
def verify(
    env: Env, identity: Annotated[str | None, typer.Argument(help=PREFIX + " [all]")] = None
) -> None:
    """Exit 1 when a file is missing, changed or does not belong."""
    from g4tool.pipeline.cache import verify as verify_artifacts

    with env.out.progress() as report:
        checked = verify_artifacts(env.store, identity, report)
    bad = [each for each in checked if each.problems]
    for each in bad:
        for problem in each.problems:
            env.out.warn(f"{each.entry.stage} {each.entry.identity[:12]}: {problem}")
    if bad and not env.as_json:
        raise G4Error(
            f"{len(bad)} of {len(checked)} artifacts are damaged: remove each with "
            "`g4 cache prune IDENTITY`, and the next build makes it again."
        )
    env.out.result(
        {"checked": [_data(c.entry) | {"problems": list(c.problems)} for c in checked]},
        f"{len(checked)} artifacts checked, all as their manifests say",
    )
    if bad:
        raise typer.Exit(1)


@command(app, "prune", help="Remove leftovers that nobody can use; with options, more.")
def prune(
    env: Env,
    identity: Annotated[
        list[str] | None, typer.Argument(metavar="IDENTITY", help="Remove these artifacts.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="IDENTITY", help="Remove all but this and what it was made from."),
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Remove what was made before that.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Remove what an interrupted run would go on with.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Remove every artifact.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Never removes what a process is making or reading."""
    from g4tool.pipeline import cache

    if identity and (keep or older_than is not None or everything or partial):
        raise UsageError("name the artifacts to remove, or say which with an option, not both.")
    roots = [cache.find(env.store, each).identity for each in keep] if keep else None
    named = [cache.find(env.store, each).identity for each in identity or ()]
    if named:
        pruned = cache.remove(env.store, named, dry_run)
    else:
        chosen = (env.store, roots, older_than, everything, partial)
        pruned = cache.prune(*chosen, dry_run=True)
        if not dry_run:
            _confirm(env, pruned)
            pruned = cache.prune(*chosen)
    gone = {each.entry.path for each in pruned if each.removed or dry_run}
    left = [e for e in cache.entries(env.store) if e.state == "partial" and e.path not in gone]
    if left:
        env.out.note(
            f"{len(left)} unfinished artifact(s) with {size(sum(e.size for e in left))} kept: the "
            "command that was interrupted goes on with them; --partial removes them."
        )
    freed = sum(each.entry.size for each in pruned if each.removed)
    rows = [
        (each.entry.stage, each.entry.identity[:12], size(each.entry.size), each.reason)
        for each in pruned
    ]
    verb = "would be freed" if dry_run else "freed"
    amount = sum(each.entry.size for each in pruned) if dry_run else freed
    listing = table(rows, ("stage", "identity", "size", "why")) + "\n" if rows else ""
    env.out.result(
        {
            "pruned": [_data(p.entry) | {"reason": p.reason, "removed": p.removed} for p in pruned],
            "freed_bytes": freed,
            "unfinished": [_data(each) for each in left],
        },
        f"{listing}{size(amount)} {verb}",
    )


def _confirm(env: Env, pruned: "list[Pruned]") -> None:
    doomed = [each.entry for each in pruned if each.entry.finished and each.entry.state != "in use"]
    if doomed:
        env.confirm(
            f"{len(doomed)} finished artifact(s) with {size(sum(e.size for e in doomed))} in "
            f"{env.store.home} would be removed."
        )


def _data(entry: "Entry") -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _when(made: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(made))
