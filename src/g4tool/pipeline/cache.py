"""Looking after the store: what is in it, is it still what it was, and what can go."""

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from g4tool.errors import G4Error, UsageError
from g4tool.pipeline import journal, locks, manifest
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.fingerprint import Json, source_identity, stage_identity
from g4tool.pipeline.store import PARTIAL, Store
from g4tool.progress import Report, silent

State = Literal["complete", "partial", "damaged", "in use"]


@dataclass(frozen=True)
class Entry:
    """One artifact of the store, finished or not.

    `size` in bytes, of what lies in the store; `made` in seconds since the epoch; `inputs` and
    `used_by` are identities of artifacts. "in use": being made or read by a process right now;
    "damaged": without a readable manifest. `files` counts what an unfinished one has finished.
    """

    stage: str
    identity: str
    state: State
    size: int
    made: float
    path: Path
    inputs: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()
    files: int | None = None

    @property
    def finished(self) -> bool:
        """Whether it has an artifact's name: all its files were written."""
        return not self.path.name.endswith(PARTIAL)


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
    return max(matching, key=lambda entry: entry.finished)


def show(store: Store, prefix: str) -> tuple[Entry, Artifact | None]:
    """An artifact and its manifest's contents; None for one that is not finished or damaged."""
    entry = find(store, prefix)
    try:
        return entry, manifest.load(entry.path) if entry.finished else None
    except G4Error:
        return entry, None


def verify(store: Store, prefix: str | None = None, report: Report = silent) -> list[Checked]:
    """Read every file of every finished artifact (or of one) and compare it with its manifest.

    Nothing is taken from the memory of hashes, so this finds a file that was changed without trace.
    """
    chosen = entries(store) if prefix is None else [find(store, prefix)]
    return [
        Checked(entry, tuple(_problems(store, entry, report))) for entry in chosen if entry.finished
    ]


def prune(
    store: Store,
    roots: Iterable[str] | None = None,
    older_than_days: float | None = None,
    everything: bool = False,
    partial: bool = False,
    dry_run: bool = False,
) -> list[Pruned]:
    """Remove what nobody can use, and as asked: what `roots` do not need, what is old, all.

    `roots` are identities; what they were made from is kept with them. `partial`: also what
    unfinished runs would go on with. Without an option only leftovers without a finished file go.
    Never removes what a process is making or reading. Raises UsageError for an age that is none.
    """
    if older_than_days is not None and not 0 <= older_than_days < math.inf:
        raise UsageError(f"an age of {older_than_days} days: give a number of days from 0 on.")
    found = entries(store)
    kept = None if roots is None else _reachable(found, roots)
    oldest = None if older_than_days is None else time.time() - older_than_days * 86400
    reasons = ((entry, _reason(entry, kept, oldest, everything, partial)) for entry in found)
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
    entry: Entry, kept: set[str] | None, oldest: float | None, everything: bool, partial: bool
) -> str | None:
    if not entry.finished and (partial or not entry.files):
        return "left by an unfinished run"
    if everything:
        return "everything was asked for"
    if kept is not None and entry.identity not in kept:
        return "no named artifact needs it"
    if oldest is not None and entry.made < oldest:
        return "older than asked for"
    return None


def _reachable(found: list[Entry], roots: Iterable[str]) -> set[str]:
    inputs = {entry.identity: entry.inputs for entry in found if entry.finished}
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
        try:
            store.discard(entry.path)
        except OSError as error:
            raise G4Error(f"{entry.path} cannot be removed ({error.strerror or error}).") from error
    return True


def _folders(store: Store) -> Iterator[Path]:
    for stage in sorted((store.home / "artifacts").iterdir()):
        if stage.is_dir():
            yield from (path for path in sorted(stage.iterdir()) if path.is_dir())


def _entry(store: Store, path: Path) -> Entry:
    identity = path.name.removesuffix(PARTIAL)
    inputs: tuple[str, ...] = ()
    state: State = "complete"
    files = None
    if path.name.endswith(PARTIAL):
        state, files = "partial", journal.done(path)
    else:
        try:
            given = manifest.load(path).manifest["inputs"]
            inputs = tuple(each["identity"] for each in given if each["stage"] != "source")
        except G4Error:
            state = "damaged"  # `verify` says what is wrong with it
    if _is_busy(store, identity):
        state = "in use"
    sizes = [
        (Path(folder) / name).lstat().st_size
        for folder, _, names in os.walk(path)
        for name in names
    ]
    made = path.stat().st_mtime
    return Entry(path.parent.name, identity, state, sum(sizes), made, path, inputs, (), files)


def _is_busy(store: Store, identity: str) -> bool:
    if not store.writable:
        return False  # nobody can take a lock there
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
    yield from _contradictions(store, artifact)
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


def _contradictions(store: Store, artifact: Artifact) -> Iterator[str]:
    """Where the manifest is at odds with itself or with the manifests of what it was made from."""
    about = artifact.manifest
    inputs = [given["identity"] for given in about["inputs"]]
    known: list[dict[str, Json]] = []
    shaping = (about["stage"], about["version"], about["parameters"], about["environment"])
    if stage_identity(*shaping, inputs) != artifact.identity:
        yield "its manifest does not give its identity"
    for given in about["inputs"]:
        if given["stage"] == "source":
            known.append(given.get("files", {}))
            hashes = {name: record["sha256"] for name, record in known[-1].items()}
            if source_identity(hashes) != given["identity"]:
                yield f"its manifest's hashes do not give its source {given['identity'][:12]}"
        else:
            known.append(_records(store, given["stage"], given["identity"]))
    for name, record in about["external"].items():
        said = [records[name] for records in known if name in records]
        if said and record not in said:
            yield f"{name} has another hash in what it was made from"


def _records(store: Store, stage: str, identity: str) -> dict[str, Json]:
    try:
        about = manifest.load(store.folder(stage, identity)).manifest
    except (G4Error, ValueError):
        return {}  # gone, or reported under its own name
    return {**about["files"], **about["external"]}
