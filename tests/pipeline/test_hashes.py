import hashlib
import os
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest

from g4tool.errors import G4Error
from g4tool.pipeline import hashes as room
from g4tool.pipeline.hashes import FileHashes
from g4tool.progress import Progress


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileHashes:
    monkeypatch.setattr(room, "SETTLED_NS", 0)
    return FileHashes(tmp_path / "hashes.sqlite")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = room._read

    def count(path: Path, size: int, report: object) -> str:
        seen.append(path.name)
        return real(path, size, report)  # type: ignore[arg-type]

    monkeypatch.setattr(room, "_read", count)
    return seen


def test_a_hash_is_right_and_read_once(
    memory: FileHashes, reads: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10_000_000)
    steps: list[Progress] = []
    for _ in range(3):
        record = memory.of(path, report=steps.append)
        assert record == (10_000_000, hashlib.sha256(b"x" * 10_000_000).hexdigest())
    assert reads == ["f"]
    assert [step.done for step in steps] == [4194304, 8388608, 10_000_000]
    assert steps[-1] == Progress("hash f", 10_000_000, 10_000_000, "bytes")


def test_a_touched_file_is_read_again(memory: FileHashes, reads: list[str], tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    memory.of(path)
    os.utime(path, ns=(1, 1))
    memory.of(path)
    assert reads == ["f", "f"]


def test_a_swap_with_the_old_times_is_seen_by_ctime(memory: FileHashes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    stat = path.stat()
    old = memory.of(path)
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert memory.of(path) != old


def test_rehash_reads_what_the_memory_would_answer(
    memory: FileHashes, reads: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    memory.of(path)
    with sqlite3.connect(memory.path) as db:
        db.execute("UPDATE files SET sha256 = 'wrong'")
    assert memory.of(path).sha256 == "wrong"
    right = hashlib.sha256(b"one").hexdigest()
    assert memory.of(path, rehash=True).sha256 == right
    assert memory.of(path).sha256 == right
    assert reads == ["f", "f"]


def test_a_file_written_a_moment_ago_is_not_remembered(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SETTLED_NS", 10**15)
    memory = FileHashes(tmp_path / "hashes.sqlite")
    path = tmp_path / "f"
    path.write_bytes(b"one")
    memory.of(path)
    memory.of(path)
    assert reads == ["f", "f"]


def test_a_damaged_memory_is_begun_anew(memory: FileHashes, tmp_path: Path) -> None:
    memory.path.write_bytes(b"this is no database, but long enough to look like one" * 40)
    path = tmp_path / "f"
    path.write_bytes(b"one")
    assert memory.of(path).sha256 == hashlib.sha256(b"one").hexdigest()
    assert memory.of(path).sha256 == hashlib.sha256(b"one").hexdigest()


@pytest.mark.parametrize(
    "table",
    [
        "CREATE TABLE files (name TEXT)",
        "CREATE TABLE files (device INTEGER, inode INTEGER, size INTEGER, mtime INTEGER, ctime)",
        "CREATE VIEW files AS SELECT 1 AS sha256",
    ],
)
def test_a_memory_with_another_table_is_begun_anew(
    memory: FileHashes, reads: list[str], tmp_path: Path, table: str
) -> None:
    with closing(sqlite3.connect(memory.path)) as db, db:
        db.execute(table)
    path = tmp_path / "f"
    path.write_bytes(b"one")
    for _ in range(3):
        assert memory.of(path).sha256 == hashlib.sha256(b"one").hexdigest()
    assert reads == ["f"]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY])
def test_what_cannot_be_remembered_is_read_again(
    memory: FileHashes, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    memory.of(path)

    def refuse(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("refused")
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", refuse)
        assert memory.of(path).sha256 == hashlib.sha256(b"one").hexdigest()
    memory.of(path)
    assert reads == ["f", "f"], "and what was remembered before is still there"


def test_a_folder_in_the_place_of_the_memory(memory: FileHashes, tmp_path: Path) -> None:
    memory.path.mkdir()
    (tmp_path / "f").write_bytes(b"one")
    assert memory.of(tmp_path / "f").sha256 == hashlib.sha256(b"one").hexdigest()


def test_a_file_that_changes_while_it_is_read_is_an_error(
    memory: FileHashes, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")

    def grow(step: Progress) -> None:
        with path.open("ab") as file:
            file.write(b"more")
            file.flush()

    with pytest.raises(G4Error, match="f changed while it was read"):
        memory.of(path, report=lambda step: grow(step) if step.done < 100 else None)


def test_a_missing_file_is_named(memory: FileHashes, tmp_path: Path) -> None:
    with pytest.raises(G4Error, match=r"nothing cannot be read \(No such file or directory\)"):
        memory.of(tmp_path / "nothing")


def _hash_all(folder: str) -> list[str]:
    memory = FileHashes(Path(folder) / "hashes.sqlite")
    return [memory.of(Path(folder) / f"f{n}").sha256 for n in range(30)]


def test_many_processes_share_one_memory(tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / f"f{n}").write_bytes(bytes([n]) * 100)
        os.utime(tmp_path / f"f{n}", ns=(1, 1))
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        answers = list(pool.map(_hash_all, [str(tmp_path)] * 8))
    right = [hashlib.sha256(bytes([n]) * 100).hexdigest() for n in range(30)]
    assert answers == [right] * 8
