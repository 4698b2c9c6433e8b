"""One maker at a time: a file lock that dies with its process, and a note of who holds it."""

import contextlib
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from g4tool.errors import G4Error
from g4tool.files import write_json


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: process, machine, command line, and since when (local time)."""

    pid: int
    host: str
    command: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.command})"


_UNNOTICED = 0.5
"""Seconds of waiting that nobody is told of: to look whether a lock is free is to hold it briefly,
and who takes one needs a moment to write its note."""

Waiting = Callable[[Holder | None], None]
"""Called once when somebody else holds a lock for more than a moment. None: it is not known who.
May raise to give up."""


@contextmanager
def hold(path: Path, waiting: Waiting | None = None) -> Iterator[None]:
    """Hold the lock file `path`, waiting as long as it takes.

    The lock is the kernel's: it is free the moment its process is gone, however that ended.
    """
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=_UNNOTICED, poll_interval=0.02)
    except Timeout:
        if waiting:
            waiting(holder(path))
        lock.acquire(poll_interval=0.1)
    except OSError as error:
        raise unusable(path, error) from error
    note = _note(path)
    try:
        with contextlib.suppress(OSError):  # a full disk must not cost more than this note
            write_json(note, asdict(_me()))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


@contextmanager
def try_hold(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` if it is free; yields whether it is held."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    except OSError as error:
        raise unusable(path, error) from error
    try:
        yield True
    finally:
        lock.release()


def holder(path: Path) -> Holder | None:
    """What the holder of the lock file `path` wrote about itself, None if nothing yet.

    A killed process leaves its note; it is not taken for the next holder's.
    """
    try:
        found = Holder(**json.loads(_note(path).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    here = found.host == socket.gethostname()
    return None if here and not process_lives(found.pid) else found


def process_lives(pid: int) -> bool:
    """Whether a process of this machine has the number `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def unusable(path: Path, error: OSError) -> G4Error:
    """The error for a lock that the file system refuses."""
    return G4Error(
        f"the lock {path} cannot be used ({error.strerror or error}): remove it if it is no file "
        "of the store, or give another folder with --home or G4_HOME."
    )


def _me() -> Holder:
    command = shlex.join([Path(sys.argv[0] or "python").name, *sys.argv[1:]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return Holder(os.getpid(), socket.gethostname(), command[:200], since)


def _note(path: Path) -> Path:
    return path.with_suffix(".json")
