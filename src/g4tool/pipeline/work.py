"""What a running stage is given: its inputs, and a way to write files that survive a kill."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import TypeVar

from g4tool.errors import G4Error
from g4tool.files import sha256, sync_folder
from g4tool.pipeline import journal
from g4tool.pipeline.artifact import Artifact, FileRecord
from g4tool.pipeline.fingerprint import Json, canonical_json
from g4tool.pipeline.hashes import FileHashes
from g4tool.pipeline.manifest import RESERVED
from g4tool.progress import Progress, Report

Make = Callable[[Path], Json | None]
Made = TypeVar("Made")


class Work:
    """One attempt at one artifact: `path` is the folder that becomes it, still under another name.

    `partial` holds the journal and `path`. What an earlier attempt left unfinished is removed.
    `check_inputs` raises when an input is no longer what the artifact's identity says.
    """

    def __init__(
        self,
        stage: str,
        partial: Path,
        inputs: tuple[Artifact, ...],
        hashes: FileHashes,
        report: Report,
        check_inputs: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage = stage
        self.path = partial / journal.FILES
        self.inputs = inputs
        self.report = report
        self.files: dict[str, FileRecord] = {}
        self.external: dict[str, FileRecord] = {}
        self.where: dict[str, Path] = {}
        self.facts: dict[str, Json] = {}
        self._hashes = hashes
        self._check_inputs = check_inputs
        self._partial = partial
        self._lock = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)
        journal.repair(partial)
        self._journal = journal.read(partial)
        self._expected = journal.expected(partial)
        _remove_strays(self.path, set(self._journal))

    def expect(self, files: int) -> None:
        """Say how many files there will be, for progress and for `plan`'s "3 of 7 files done"."""
        if files != self._expected:
            journal.expect(self._partial, files)
            self._expected = files

    def need(self, size: int) -> None:
        """Say how many bytes the artifact takes in all; raises G4Error when the disk lacks them."""
        done = sum(entry.size for entry in self._journal.values())
        free = shutil.disk_usage(self.path).free
        if size - done > free:
            raise G4Error(
                f"{self.stage} needs {size - done:,} bytes more in {self._partial.parent}, where "
                f"{free:,} are free: make room there (see g4 cache list), or give another disk "
                "with --home, and run the same command again."
            )

    def file(self, name: str, make: Make) -> Json | None:
        """Have the file `name`: skipped when an earlier attempt finished it, else `make(path)`.

        `make` writes the whole file at the path it is given and returns what is worth keeping about
        it; this returns that as JSON reads it back, made now or earlier. A file whose size or hash
        is not what the journal says is made again, and the report says so.
        """
        _check_name(name)
        if name in self.files or name in self.external:
            raise ValueError(f"{self.stage} writes {name} twice")
        path = self.path / name
        entry = self._journal.get(name)
        if entry and _is_whole(path, entry):
            self._hashes.keep(path, entry.sha256)
            return self._have(entry, f"{name}: already done")
        again = f"{name}: damaged since it was written, made again" if entry else name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # Through JSON, so that a file made now and one made earlier give the same value.
        result = json.loads(canonical_json(make(path)))
        entry = journal.Entry(name, _flush(path), sha256(path), result)
        # Before the journal vouches for the file: were it noticed only at the end, a process
        # killed in between would leave a file of other inputs to be gone on with.
        self._check_inputs()
        self._hashes.keep(path, entry.sha256)
        self._sync_folders(path.parent)
        with self._lock:
            journal.append(self._partial, entry)
            self._journal[name] = entry
        return self._have(entry, again)

    def together(self, tasks: Sequence[Callable[[], Made]], at_once: int = 1) -> list[Made]:
        """Do tasks that call `file`, up to `at_once` of them at a time, each in a thread.

        After a failure none is begun any more; it is raised when those under way have ended.
        """
        if at_once == 1:
            return [task() for task in tasks]
        with ThreadPoolExecutor(at_once) as pool:
            made = [pool.submit(task) for task in tasks]
            try:
                for future in as_completed(made):
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
            return [future.result() for future in made]

    def refer(self, name: str, path: Path) -> FileRecord:
        """Take in a file outside the store, without a copy: hashed now and checked by `plan`."""
        _check_name(name)
        if name in self.files or name in self.external:
            raise ValueError(f"{self.stage} writes {name} twice")
        record = self.hash(path)
        self.external[name] = record
        self.where[name] = path.absolute()
        return record

    def hash(self, path: Path) -> FileRecord:
        """Size and SHA-256 of a file anywhere, from the store's memory where it is known."""
        return self._hashes.of(path, report=self.report)

    def fact(self, key: str, value: Json) -> None:
        """Add something worth knowing to the manifest; the same for the same identity."""
        canonical_json(value)
        self.facts[key] = value

    def finish(self) -> None:
        """Check the inputs, and that the folder holds the files asked for in this attempt."""
        self._check_inputs()
        unknown = _names(self.path) - set(self.files) - set(self._journal)
        if unknown:
            raise RuntimeError(f"{self.stage} wrote {min(unknown)} past Work.file")
        _remove_strays(self.path, set(self.files))

    def _have(self, entry: journal.Entry, note: str) -> Json | None:
        with self._lock:
            self.files[entry.file] = FileRecord(entry.size, entry.sha256)
            done = len(self.files)
            self.report(Progress(self.stage, done, max(self._expected or 0, done), "files", note))
        return entry.result

    def _sync_folders(self, folder: Path) -> None:
        while folder != self.path:
            sync_folder(folder)
            folder = folder.parent
        sync_folder(self.path)


def _check_name(name: str) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != name or name in RESERVED | {"."}:
        raise ValueError(f"{name!r} cannot name a file of an artifact")


def _is_whole(path: Path, entry: journal.Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size and sha256(path) == entry.sha256


def _flush(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _names(root: Path) -> set[str]:
    return {
        (Path(folder) / name).relative_to(root).as_posix()
        for folder, _, files in os.walk(root)
        for name in files
    }


def _remove_strays(root: Path, keep: set[str]) -> None:
    for name in _names(root) - keep:
        (root / name).unlink()
    for folder, _, _ in os.walk(root, topdown=False):
        if folder != str(root) and not os.listdir(folder):
            os.rmdir(folder)
