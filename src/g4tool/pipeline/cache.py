"""Looking after the store: what is in it, is it still what it was, and what can go."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from g4tool.errors import G4Error, UsageError
from g4tool.pipeline import locks, manifest
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.store import PARTIAL, Store
from g4tool.progress import Report, silent

State = Literal["complete", "partial", "in use"]


@dataclass(frozen=True)
class Entry:
    """One artifact of the store, finished or not.

    `size` in bytes, of what lies in the store; `made` in seconds since the epoch; `inputs` and
    `used_by` are identities of artifacts. "in use": being made or read by a process right now.
    """

    stage: str
    identity: str
    state: State
    size: int
    made: float
    path: Path
    inputs: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A finished artifact and what is wrong with it, one phrase each; none when all is well."""

    entry: Entry
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """An entry that goes, and why; `removed` is False in a dry run and for one that is in use."""

    entry: Entry
    reason: str
    removed: bool


def entries(store: Store) -> list[Entry]:
    """Every artifact, by stage, the oldest first."""
    found = [_entry(store, path) for path in _folders(store)]
    users: dict[str, list[str]] = {}
    for entry in found:
        for identity in entry.inputs:
            users.setdefault(identity, []).append(entry.identity)
    found = [replace(entry, used_by=tuple(users.get(entry.identity, ()))) for entry in found]
    return sorted(found, key=lambda entry: (entry.stage, entry.made, entry.identity))


def find(store: Store, prefix: str) -> Entry:
    """The one artifact whose identity begins with `prefix`, the finished one before its leftover.

    Raises UsageError when none or several begin so.
    """
    matching = [entry for entry in entries(store) if prefix and entry.identity.startswith(prefix)]
    identities = sorted({entry.identity for entry in matching})
    if not identities:
        raise UsageError(
            f"no artifact in {store.home} begins with {prefix!r}: see `g4 cache list`."
        )
    if len(identities) > 1:
        named = ", ".join(identity[: len(prefix) + 8] for identity in identities[:4])
        raise UsageError(
            f"{len(identities)} artifacts begin with {prefix!r} ({named}): give more digits."
        )
    return min(matching, key=lambda entry: entry.path.name.endswith(PARTIAL))


def show(store: Store, prefix: str) -> tuple[Entry, Artifact | None]:
    """An artifact and its manifest's contents; None for one that is not finished."""
    entry = find(store, prefix)
    return entry, None if entry.path.name.endswith(PARTIAL) else manifest.load(entry.path)


def verify(store: Store, prefix: str | None = None, report: Report = silent) -> list[Checked]:
    """Read every file of every finished artifact (or of one) and compare it with its manifest.

    Nothing is taken from the memory of hashes, so this finds a file that was changed without trace.
    """
    chosen = entries(store) if prefix is None else [find(store, prefix)]
    return [
        Checked(entry, tuple(_problems(store, entry, report)))
        for entry in chosen
        if not entry.path.name.endswith(PARTIAL)
    ]


def prune(
    store: Store,
    roots: Iterable[str] | None = None,
    older_than_days: float | None = None,
    everything: bool = False,
    dry_run: bool = False,
) -> list[Pruned]:
    """Remove what unfinished runs left, and as asked: what `roots` do not need, what is old, all.

    `roots` are identities; what they were made from is kept with them. Without any of the three
    options finished artifacts stay. Never removes what a process is making or reading.
    """
    found = entries(store)
    kept = None if roots is None else _reachable(found, roots)
    oldest = None if older_than_days is None else time.time() - older_than_days * 86400
    reasons = ((entry, _reason(entry, kept, oldest, everything)) for entry in found)
    pruned = [_take(store, entry, reason, dry_run) for entry, reason in reasons if reason]
    if not dry_run:
        for leftover in (store.home / "trash").iterdir():
            shutil.rmtree(leftover, ignore_errors=True)
    return pruned


def remove(store: Store, identities: Iterable[str], dry_run: bool = False) -> list[Pruned]:
    """Remove these artifacts and what unfinished runs of them left, except those in use."""
    named = set(identities)
    return [
        _take(store, entry, "asked for", dry_run)
        for entry in entries(store)
        if entry.identity in named
    ]


def _take(store: Store, entry: Entry, reason: str, dry_run: bool) -> Pruned:
    free = entry.state != "in use"
    removed = free and not dry_run and _remove(store, entry)
    if free and (dry_run or removed):
        return Pruned(entry, reason, removed)
    return Pruned(entry, f"in use, kept ({reason})", False)


def _reason(
    entry: Entry, kept: set[str] | None, oldest: float | None, everything: bool
) -> str | None:
    if entry.path.name.endswith(PARTIAL):
        return "left by an unfinished run"
    if everything:
        return "everything was asked for"
    if kept is not None and entry.identity not in kept:
        return "no named artifact needs it"
    if oldest is not None and entry.made < oldest:
        return "older than asked for"
    return None


def _reachable(found: list[Entry], roots: Iterable[str]) -> set[str]:
    inputs = {e.identity: e.inputs for e in found if not e.path.name.endswith(PARTIAL)}
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        identity = waiting.pop()
        if identity not in reached:
            reached.add(identity)
            waiting += inputs.get(identity, ())
    return reached


def _remove(store: Store, entry: Entry) -> bool:
    with ExitStack() as stack:
        if not stack.enter_context(locks.try_hold(store.lock(entry.identity))):
            return False
        if _is_used(store, entry.identity) or not entry.path.exists():
            return False
        store.discard(entry.path)
    return True


def _folders(store: Store) -> Iterator[Path]:
    for stage in sorted((store.home / "artifacts").iterdir()):
        if stage.is_dir():
            yield from (path for path in sorted(stage.iterdir()) if path.is_dir())


def _entry(store: Store, path: Path) -> Entry:
    partial = path.name.endswith(PARTIAL)
    identity = path.name.removesuffix(PARTIAL)
    inputs: tuple[str, ...] = ()
    if not partial:
        try:
            given = manifest.load(path).manifest["inputs"]
            inputs = tuple(each["identity"] for each in given if each["stage"] != "source")
        except G4Error:
            pass  # listed all the same; `verify` says what is wrong with it
    state: State = "partial" if partial else "complete"
    if _is_busy(store, identity):
        state = "in use"
    sizes = [
        (Path(folder) / name).lstat().st_size
        for folder, _, names in os.walk(path)
        for name in names
    ]
    return Entry(path.parent.name, identity, state, sum(sizes), path.stat().st_mtime, path, inputs)


def _is_busy(store: Store, identity: str) -> bool:
    lock = store.lock(identity)
    if lock.exists():
        with locks.try_hold(lock) as free:
            if not free:
                return True
    return _is_used(store, identity)


def _is_used(store: Store, identity: str) -> bool:
    for lock in (store.home / "locks" / f"{identity}.users").glob("*.lock"):
        with locks.try_hold(lock) as free:
            if not free:
                return True
    return False


def _problems(store: Store, entry: Entry, report: Report) -> Iterator[str]:
    try:
        artifact = manifest.load(entry.path)
    except G4Error as error:
        yield str(error).rstrip(".")
        return
    if artifact.identity != entry.identity:
        yield f"its manifest names the identity {artifact.identity[:12]}"
    wanted = {name: (entry.path / name, record) for name, record in artifact.files.items()}
    for name, path in artifact.external.items():
        wanted[name] = (path, manifest.FileRecord(**artifact.manifest["external"][name]))
    for name, (path, record) in wanted.items():
        if not path.is_file():
            yield f"{path if name in artifact.external else name} is missing"
        elif store.hashes.of(path, rehash=True, report=report) != record:
            yield f"{path if name in artifact.external else name} has changed"
    known = set(artifact.files) | manifest.RESERVED
    for folder, _, names in os.walk(entry.path):
        for file in names:
            name = (Path(folder) / file).relative_to(entry.path).as_posix()
            if name not in known:
                yield f"{name} does not belong to it"
