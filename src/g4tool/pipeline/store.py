"""The store of artifacts: says what has to be done for a stage, and does it at most once."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.files import sync_folder
from g4tool.pipeline import explain, journal, locks, manifest, source
from g4tool.pipeline.artifact import Artifact, Decision, Source
from g4tool.pipeline.fingerprint import Json, stage_identity
from g4tool.pipeline.hashes import FileHashes
from g4tool.pipeline.home import default_home, open_home
from g4tool.pipeline.stage import Intact, SelfFed, Stage
from g4tool.pipeline.watch import watch
from g4tool.pipeline.work import Work
from g4tool.progress import Report, silent

__all__ = ["PARTIAL", "OnDecision", "Store", "default_home"]

OnDecision = Callable[[Decision], None]
PARTIAL = ".partial"


class Store:
    """Artifacts under one folder (`home`, by default G4_HOME or the user's cache folder).

    A finished store on a read-only file system can be read. Raises G4Error when the folder cannot
    be made or belongs to a newer version.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = open_home(home or default_home())
        self.writable = os.access(self.home / "artifacts", os.W_OK)
        self.hashes = FileHashes(self.home / "hashes.sqlite")

    def identity(self, item: Stage | Source, report: Report = silent) -> str:
        """Identity of a stage's artifact or of a source, whether or not it was ever made."""
        if isinstance(item, Source):
            return source.resolve(item, self.hashes, report=report).identity
        inputs = [self.identity(each, report) for each in item.inputs]
        return stage_identity(
            item.name, item.version, item.parameters(), item.environment(), inputs
        )

    def folder(self, stage: str, identity: str) -> Path:
        """Where the finished artifact lies or will lie."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", stage):
            raise ValueError(f"{stage!r} cannot name a stage")
        return self.home / "artifacts" / stage / identity

    def lock(self, identity: str) -> Path:
        """The lock file of an artifact."""
        return self.home / "locks" / f"{identity}.lock"

    def plan(self, stage: Stage, report: Report = silent) -> Decision:
        """What `ensure` would do for this stage alone, and why. Makes nothing."""
        identity = self.identity(stage, report)
        folder = self.folder(stage.name, identity)
        partial = folder.with_name(identity + PARTIAL)
        if folder.exists():
            reason = self._unusable(stage, folder, report)
            if reason is None:
                return Decision("reuse", stage.name, identity, "cached")
            if not journal.done(partial):
                return Decision("make", stage.name, identity, f"made again: {reason}")
        if done := journal.done(partial):
            total = journal.expected(partial)
            count = f"{done} of {total} files" if total else f"{done} file{'s' * (done != 1)}"
            return Decision("resume", stage.name, identity, f"{count} done")
        others = (each.manifest for each in self._finished(stage.name) if each.path != folder)
        reason = explain.difference(self._wanted(stage, report), others)
        return Decision("make", stage.name, identity, reason)

    def plan_all(self, stage: Stage, report: Report = silent) -> list[Decision]:
        """What `ensure` would do, inputs first, each artifact once.

        What a reused artifact was made from is not needed again, so it is not in the list.
        """
        decisions: dict[str, Decision] = {}

        def visit(each: Stage) -> None:
            decision = self.plan(each, report)
            if decision.identity in decisions:
                return
            if decision.action != "reuse":
                for item in each.inputs:
                    if not isinstance(item, Source):
                        visit(item)
            decisions[decision.identity] = decision

        visit(stage)
        return list(decisions.values())

    def ensure(
        self,
        stage: Stage,
        report: Report = silent,
        on_decision: OnDecision | None = None,
        on_wait: locks.Waiting | None = None,
    ) -> Artifact:
        """The stage's artifact: the one that is there, else made now, inputs first.

        `on_decision` hears what is done for each stage just before it is done; `on_wait` hears who
        is making the same artifact at this moment, before this process waits for it.
        """
        decision = self.plan(stage, report)
        folder = self.folder(stage.name, decision.identity)
        if decision.action == "reuse":
            if on_decision:
                on_decision(decision)
            self._clear_leftover(decision.identity, folder)
            return manifest.load(folder)
        with ExitStack() as stack:
            inputs = tuple(
                source.resolve(item, self.hashes, report=report)
                if isinstance(item, Source)
                else self._ensure_in_use(stack, item, report, on_decision, on_wait)
                for item in (() if isinstance(stage, SelfFed) and stage.fetches else stage.inputs)
            )
            stack.enter_context(locks.hold(self.lock(decision.identity), on_wait))
            # The files are looked at before they are hashed once more: what is watched is then
            # what the identity says.
            check_inputs = watch(stage.name, inputs)
            # Another process may have finished it, or gone on with it, while this one waited.
            again = self.plan(stage, report)
            if again.identity != decision.identity:
                raise _changed(stage)
            if on_decision:
                on_decision(again)
            if again.action != "reuse":
                self._check_whole(inputs, report)
                self._make(stage, decision.identity, inputs, check_inputs, report)
            return manifest.load(folder)

    @contextmanager
    def using(self, artifact: Artifact) -> Iterator[None]:
        """Keep `artifact` from being pruned while this lasts. Raises G4Error when it is gone."""
        if not self.writable:
            yield  # then nobody prunes it either
            return
        users = self.home / "locks" / f"{artifact.identity}.users"
        with ExitStack() as stack:
            with locks.hold(self.lock(artifact.identity)):
                try:
                    users.mkdir(exist_ok=True)
                except OSError as error:
                    raise locks.unusable(users, error) from error
                number = 0
                while not stack.enter_context(locks.try_hold(users / f"{number}.lock")):
                    number += 1
                if not artifact.path.exists():
                    raise G4Error(
                        f"{artifact.stage} {artifact.identity[:12]} was removed from the store "
                        "meanwhile: run the same command again."
                    )
            yield

    def discard(self, folder: Path) -> None:
        """Take `folder` out of the store at once, then delete it; the caller holds its lock."""
        trash = Path(tempfile.mkdtemp(dir=self.home / "trash"))
        folder.rename(trash / folder.name)
        sync_folder(folder.parent)
        # Errors do not matter here: what stays, `cache prune` removes.
        shutil.rmtree(trash, ignore_errors=True)

    def _ensure_in_use(
        self,
        stack: ExitStack,
        stage: Stage,
        report: Report,
        on_decision: OnDecision | None,
        on_wait: locks.Waiting | None,
    ) -> Artifact:
        artifact = self.ensure(stage, report, on_decision, on_wait)
        stack.enter_context(self.using(artifact))
        return artifact

    def _check_whole(self, inputs: tuple[Artifact, ...], report: Report) -> None:
        """Raise G4Error when a file of a stage's input changed since it was ensured."""
        for given in inputs:
            # A source has just been hashed for the identity.
            reason = given.stage != "source" and self._damage(given, report)
            if reason:
                raise G4Error(
                    f"{given.stage} {given.identity[:12]} changed meanwhile ({reason}): run the "
                    "same command again."
                )

    def _make(
        self,
        stage: Stage,
        identity: str,
        inputs: tuple[Artifact, ...],
        check_inputs: Callable[[], None],
        report: Report,
    ) -> None:
        folder = self.folder(stage.name, identity)
        partial = folder.with_name(identity + PARTIAL)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            work = Work(stage.name, partial, inputs, self.hashes, report, check_inputs)
            stage.run(work)
            work.finish()
            if self.identity(stage, report) != identity:
                # No input's file was seen to change, so no finished file can be trusted.
                self.discard(partial)
                raise _changed(stage)
            wanted = self._wanted(stage, report)
            about = manifest.build(wanted, identity, work.files, work.external, work.facts)
            manifest.write(work.path, about, work.where)
            if folder.exists():
                self.discard(folder)
            work.path.rename(folder)
            sync_folder(folder.parent)
            self.discard(partial)
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise G4Error(
                    f"{stage.name} cannot be made in {self.home} ({error.strerror}: "
                    f"{error.filename}): give another folder with --home or G4_HOME."
                ) from error
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self.home).free
            raise G4Error(
                f"the disk of {self.home} is full ({free:,} bytes free) while {stage.name} was "
                "being made: what is finished is kept; make room there (see g4 cache list) and "
                "run the same command again to go on."
            ) from error

    def _clear_leftover(self, identity: str, folder: Path) -> None:
        """Remove the journal of a process that died after the artifact had got its name."""
        partial = folder.with_name(identity + PARTIAL)
        if self.writable and partial.exists():
            with locks.try_hold(self.lock(identity)) as free:
                if free and partial.exists():
                    self.discard(partial)

    def _unusable(self, stage: Stage, folder: Path, report: Report) -> str | None:
        """Why the finished artifact in `folder` cannot be used, None when it can."""
        try:
            artifact = manifest.load(folder)
        except G4Error as error:
            return str(error).rstrip(".")
        if reason := self._damage(artifact, report):
            return reason
        return stage.intact(artifact) if isinstance(stage, Intact) else None

    def _damage(self, artifact: Artifact, report: Report) -> str | None:
        """Which file is not what the manifest says; only what changed since is read again."""
        for name, record in artifact.files.items():
            path = artifact.path / name
            if not path.is_file():
                return f"its file {name} is missing"
            if path.stat().st_size != record.size:
                return f"its file {name} has another size"
            if self.hashes.of(path, report=report) != record:
                return f"its file {name} has changed"
        for name, path in artifact.external.items():
            if not path.is_file():
                return f"{path}, which it refers to, is gone"
            if self.hashes.of(path, report=report)._asdict() != artifact.manifest["external"][name]:
                return f"{path}, which it refers to, has changed"
        return None

    def _finished(self, stage: str) -> Iterator[Artifact]:
        root = self.home / "artifacts" / stage
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if not folder.name.endswith(PARTIAL):
                try:
                    yield manifest.load(folder)
                except G4Error:
                    continue  # `cache verify` is where a damaged manifest is reported

    def _wanted(self, stage: Stage, report: Report) -> dict[str, Json]:
        inputs: list[Json] = []
        for item in stage.inputs:
            if isinstance(item, Source):
                given = source.resolve(item, self.hashes, report=report)
                inputs.append({"stage": "source", "identity": given.identity, **given.manifest})
            else:
                inputs.append({"stage": item.name, "identity": self.identity(item, report)})
        return {
            "stage": stage.name,
            "version": stage.version,
            "parameters": stage.parameters(),
            "environment": stage.environment(),
            "inputs": inputs,
        }


def _changed(stage: Stage) -> G4Error:
    return G4Error(
        f"what {stage.name} is made from changed meanwhile: wait until it is finished and run the "
        "same command again."
    )
