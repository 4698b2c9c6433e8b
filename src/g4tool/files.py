"""Small files written whole or not at all, and the hash of any file."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

_BLOCK = 1 << 20


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: readers see the old file or the new one, never a part.

    Writes beside the target under a name of this process, flushes, renames, flushes the folder.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of `value` as indented JSON in the order given, ended by a newline."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
