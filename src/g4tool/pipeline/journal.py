"""Which files of an unfinished artifact are whole: one line each, appended and flushed.

An unfinished artifact is a folder with the journal and, in `files`, what becomes the artifact by
one rename: the journal stays valid until the artifact exists.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from g4tool.files import sync_folder, write_json
from g4tool.pipeline.fingerprint import Json

FILES = "files"
_NAME = "journal.jsonl"
_EXPECTED = "expected.json"


@dataclass(frozen=True)
class Entry:
    """A finished file: its name, size in bytes, SHA-256, and what its maker returned."""

    file: str
    size: int
    sha256: str
    result: Json


def read(folder: Path) -> dict[str, Entry]:
    """The finished files that `folder`'s journal names; a later line replaces an earlier one.

    Reading stops at the first line that is not whole: the process died while writing it.
    """
    return _parse(_content(folder))[0]


def done(folder: Path) -> int:
    """How many of the files that the journal names are there with the size it says."""
    return sum(_has_size(folder / FILES / e.file, e.size) for e in read(folder).values())


def repair(folder: Path) -> None:
    """Cut off a torn last line, so that the next one starts cleanly."""
    whole = _parse(_content(folder))[1]
    if (folder / _NAME).exists():
        os.truncate(folder / _NAME, whole)


def append(folder: Path, entry: Entry) -> None:
    """Add `entry`; when this returns, it survives a power cut."""
    path = folder / _NAME
    new = not path.exists()
    with path.open("ab") as file:
        file.write(json.dumps(asdict(entry), sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(folder)


def expect(folder: Path, files: int) -> None:
    """Note how many files the artifact in `folder` will have."""
    write_json(folder / _EXPECTED, files)


def expected(folder: Path) -> int | None:
    """How many files the artifact in `folder` will have, None when that is not known yet."""
    try:
        return int(json.loads((folder / _EXPECTED).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _content(folder: Path) -> bytes:
    try:
        return (folder / _NAME).read_bytes()
    except FileNotFoundError:
        return b""


def _parse(content: bytes) -> tuple[dict[str, Entry], int]:
    entries: dict[str, Entry] = {}
    whole = 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            entry = Entry(**json.loads(line))
        except (ValueError, TypeError):
            break
        entries[entry.file] = entry
        whole += len(line)
    return entries, whole
