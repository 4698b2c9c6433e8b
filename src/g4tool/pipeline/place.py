"""Giving an artifact to the user: a folder of their own with a copy of its files.

A copy, never a hard link: an edit of a linked file in place would change the store's file too,
behind its manifest. Where the file system shares blocks between copies, it costs no space.
"""

import errno
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from g4tool.errors import G4Error, UsageError
from g4tool.files import sha256, sync_folder
from g4tool.pipeline.artifact import Artifact, FileRecord
from g4tool.pipeline.home import user_path
from g4tool.pipeline.locks import process_lives
from g4tool.pipeline.manifest import NAME, WHERE
from g4tool.progress import Progress, Report, silent

_CANNOT = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def check_target(folder: Path, identity: str | None, home: Path) -> None:
    """Refuse, before any work, a `folder` that the artifact `identity` cannot be put into.

    Raises UsageError for a file, a folder inside the store `home`, and one that holds anything
    but this artifact, which it says by its manifest; `place` compares every file. None stands for
    a source, which has no manifest.
    """
    target = _resolve(folder)
    if target.is_relative_to(home.resolve()):
        raise UsageError(f"{folder} is inside the store {home}: give another folder.")
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise UsageError(f"{folder} is a file: give a folder.")
        if identity is None or not os.listdir(target):
            return
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        same = json.loads((target / NAME).read_text())["identity"] == identity
    except (OSError, ValueError, TypeError, KeyError):
        same = False
    if not same:
        raise UsageError(f"{folder} already holds other files: give an empty or a new folder.")


def place(artifact: Artifact, folder: Path, external: bool = True, report: Report = silent) -> bool:
    """Put the artifact's files and its manifest into `folder`, which appears whole or not at all.

    `external`: also copy the files it only refers to; else `folder` refers to them as the artifact
    does. Returns False when exactly these files are there already. Raises UsageError when `folder`
    holds anything else, G4Error when a file of the artifact is not what its manifest says or
    `folder` cannot be written.
    """
    target = _resolve(folder)
    try:
        return _place(target, _wanted(artifact, external), folder, report)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _place(
    target: Path, wanted: dict[str, tuple[Path, FileRecord]], folder: Path, report: Report
) -> bool:
    if target.exists():
        if not target.is_dir():
            raise UsageError(f"{folder} is a file: give a folder.")
        if os.listdir(target):
            if _holds(target, wanted):
                return False
            raise UsageError(f"{folder} already holds other files: give an empty or a new folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    part = Path(tempfile.mkdtemp(prefix=_prefix(target, os.getpid()), dir=target.parent))
    try:
        part.chmod(0o777 & ~_umask())
        total = sum(record.size for _, record in wanted.values())
        done = 0
        for name, (path, record) in wanted.items():
            _copy(path, part / name, record)
            done += record.size
            report(Progress(f"copy to {folder.name}", done, total, "bytes", name))
        for inside, _, _ in os.walk(part, topdown=False):
            sync_folder(Path(inside))
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync_folder(target.parent)
    return True


def _resolve(folder: Path) -> Path:
    # Path.resolve raises on a loop of symbolic links.
    return Path(os.path.realpath(user_path(folder)))


def _unwritable(folder: Path, error: OSError) -> G4Error:
    return G4Error(f"{folder} cannot be written ({error.strerror or error}).")


def _wanted(artifact: Artifact, external: bool) -> dict[str, tuple[Path, FileRecord]]:
    wanted = {name: (artifact.locate(name), record) for name, record in artifact.files.items()}
    about = [] if artifact.stage == "source" else [NAME]
    if external:
        for name, path in artifact.external.items():
            wanted[name] = (path, FileRecord(**artifact.manifest["external"][name]))
    elif artifact.external:
        about.append(WHERE)
    for name in about:
        path = artifact.path / name
        wanted[name] = (path, FileRecord(path.stat().st_size, sha256(path)))
    return wanted


def _holds(folder: Path, wanted: dict[str, tuple[Path, FileRecord]]) -> bool:
    there = {
        (Path(inside) / name).relative_to(folder).as_posix()
        for inside, _, names in os.walk(folder)
        for name in names
    }
    return there == set(wanted) and all(
        (folder / name).stat().st_size == record.size and sha256(folder / name) == record.sha256
        for name, (_, record) in wanted.items()
    )


def _copy(source: Path, target: Path, record: FileRecord) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb") as write:
        if not _copy_in_kernel(read.fileno(), write.fileno(), record.size):
            read.seek(0)
            shutil.copyfileobj(read, write, 1 << 22)
        write.flush()
        os.fsync(write.fileno())
    if target.stat().st_size != record.size or sha256(target) != record.sha256:
        raise G4Error(
            f"{source} is not what its manifest says: run `g4 cache verify`, then make it again."
        )


def _copy_in_kernel(read: int, write: int, size: int) -> bool:
    """Copy by copy_file_range, which shares blocks on btrfs and XFS; False where it is refused."""
    if not hasattr(os, "copy_file_range"):
        return False
    try:
        done = 0
        while done < size:
            count = os.copy_file_range(read, write, size - done)
            if count == 0:
                break
            done += count
    except OSError as error:
        if error.errno in _CANNOT:
            os.ftruncate(write, 0)
            os.lseek(write, 0, os.SEEK_SET)
            return False
        raise
    return True


def _prefix(target: Path, pid: int) -> str:
    return f".{target.name}.g4-{socket.gethostname()}-{pid}-"


def _remove_leftovers(target: Path) -> None:
    """Remove what processes of this machine left that were killed while they copied to `target`."""
    start = f".{target.name}.g4-{socket.gethostname()}-"
    for path in target.parent.iterdir():
        pid = path.name.removeprefix(start).split("-")[0]
        if path.name.startswith(start) and pid.isdigit() and not process_lives(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
