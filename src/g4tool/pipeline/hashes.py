"""The hash of a file, remembered as long as the file system says the file is the same.

Remembered by device, inode, size, mtime and ctime, so that nobody reads 62 GB again to hear
"cached". A file swapped under an unchanged record is found only by `rehash`.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.pipeline.artifact import FileRecord
from g4tool.progress import Progress, Report, silent

SETTLED_NS = 2_000_000_000
"""How long a file must have been at rest before its hash is remembered: the coarsest clock of a
file system in use (FAT) ticks every 2 s, and a second write within one tick leaves no trace."""

StatKey = tuple[int, int, int, int, int]
"""Device, inode, size, mtime and ctime in nanoseconds."""

_BLOCK = 1 << 22
_REFUSED = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
}
_TABLE = (
    "CREATE TABLE IF NOT EXISTS files (device INTEGER, inode INTEGER, size INTEGER, mtime INTEGER,"
    " ctime INTEGER, sha256 TEXT NOT NULL, PRIMARY KEY (device, inode))"
)


class FileHashes:
    """Hashes remembered in one SQLite file, safe between processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, path: Path, rehash: bool = False, report: Report = silent) -> FileRecord:
        """Size and SHA-256 of the file at `path`, read only where the memory does not know it.

        `rehash` reads it in any case. Raises G4Error when the file cannot be read or changes
        meanwhile.
        """
        try:
            before = path.stat()
            if not rehash and (known := self._recall(before)):
                return FileRecord(before.st_size, known)
            started = time.time_ns()
            sha256 = _read(path, before.st_size, report)
            after = path.stat()
        except OSError as error:
            raise G4Error(f"{path} cannot be read ({error.strerror or error}).") from error
        if stat_key(before) != stat_key(after):
            raise G4Error(
                f"{path} changed while it was read: wait until it is finished, run again."
            )
        if started - max(after.st_mtime_ns, after.st_ctime_ns) >= SETTLED_NS:
            self._remember(after, sha256)
        return FileRecord(after.st_size, sha256)

    def keep(self, path: Path, sha256: str) -> None:
        """Remember the hash of a file of the store's own, which nobody writes a second time."""
        self._remember(path.stat(), sha256)

    def _recall(self, stat: os.stat_result) -> str | None:
        query = (
            "SELECT sha256 FROM files WHERE device=? AND inode=? AND size=? AND mtime=? AND ctime=?"
        )
        row = self._run(lambda db: db.execute(query, stat_key(stat)).fetchone())
        return row[0] if row else None

    def _remember(self, stat: os.stat_result, sha256: str) -> None:
        insert = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)"
        self._run(lambda db: db.execute(insert, (*stat_key(stat), sha256)).fetchone())

    def _run(
        self, work: Callable[[sqlite3.Connection], tuple[str] | None], again: bool = True
    ) -> tuple[str] | None:
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as db, db:
                db.execute(_TABLE)
                return work(db)
        except sqlite3.DatabaseError as error:
            # It only saves time: what cannot be kept (a full disk, no permission) is done without,
            # and what is damaged or has another table is begun anew.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED or not again:
                return None
            try:
                self.path.unlink(missing_ok=True)
            except OSError:
                return None
            return self._run(work, again=False)


def stat_key(stat: os.stat_result) -> StatKey:
    """What the file system says of a file that changes when its content does."""
    # SQLite's integers are signed; some network file systems use all 64 bits of an inode number.
    inode = stat.st_ino - (1 << 64) if stat.st_ino >= 1 << 63 else stat.st_ino
    return stat.st_dev, inode, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(path: Path, size: int, report: Report) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            report(Progress(f"hash {path.name}", done, max(size, done), "bytes"))
    return digest.hexdigest()
