import errno
import os
from pathlib import Path

import pytest

from g4tool.errors import G4Error, UsageError
from g4tool.pipeline import manifest, source
from g4tool.pipeline import place as room
from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.place import check_target, place
from g4tool.pipeline.store import Store

from .helpers import Copies, Pointer, tree


@pytest.fixture
def made(store: Store) -> Artifact:
    return store.ensure(Copies())


def test_a_copy_that_shares_nothing_with_the_store(made: Artifact, tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    assert place(made, target)
    assert tree(target) == tree(made.path)
    before = tree(made.path)
    with (target / "unit-0.bin").open("r+b") as file:
        file.write(b"edited in place")
    assert tree(made.path) == before
    assert os.listdir(target.parent) == ["out"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~room._umask()


def test_the_same_content_is_already_there(made: Artifact, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert place(made, tmp_path / "out")
    assert not place(made, tmp_path / "out")


@pytest.mark.parametrize("change", ["extra", "changed", "missing", "other"])
def test_a_folder_with_anything_else_is_refused(
    made: Artifact, tmp_path: Path, change: str
) -> None:
    target = tmp_path / "out"
    place(made, target)
    if change == "extra":
        (target / "mine.txt").write_text("")
    elif change == "changed":
        (target / "unit-0.bin").write_bytes(b"x" * (target / "unit-0.bin").stat().st_size)
    else:
        (target / "unit-0.bin").unlink()
        if change == "other":
            (target / "unit-9.bin").write_text("")
    before = tree(target)
    with pytest.raises(UsageError, match="out already holds other files: give an empty or a new"):
        place(made, target)
    assert tree(target) == before


def test_a_file_is_no_folder(made: Artifact, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UsageError, match="is a file: give a folder"):
        place(made, tmp_path / "out")


def test_a_damaged_store_is_not_passed_on(made: Artifact, tmp_path: Path) -> None:
    path = made.path / "unit-1.bin"
    path.write_bytes(b"y" * path.stat().st_size)
    with pytest.raises(G4Error, match=r"unit-1\.bin is not what its manifest says"):
        place(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_full_disk_leaves_nothing(
    made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with pytest.raises(G4Error, match=r"out cannot be written \(No space left on device\)"):
        place(made, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_without_copy_file_range(
    made: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refused, raising=False)
    place(made, tmp_path / "one")
    monkeypatch.delattr(os, "copy_file_range")
    place(made, tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(made.path)


def test_files_outside_come_along_if_asked(store: Store, given: Path, tmp_path: Path) -> None:
    made = store.ensure(Pointer(Source(given)))
    place(made, tmp_path / "with")
    assert (tmp_path / "with" / "sub" / "b.txt").read_bytes() == b"second"
    place(made, tmp_path / "without", external=False)
    assert sorted(tree(tmp_path / "without")) == ["index.txt", "manifest.json", "where.json"]
    assert manifest.load(tmp_path / "without").locate("sub/b.txt") == given / "sub" / "b.txt"


def test_a_source_has_no_manifest_to_place(store: Store, given: Path, tmp_path: Path) -> None:
    artifact = source.resolve(Source(given), store.hashes)
    assert place(artifact, tmp_path / "out")
    assert tree(tmp_path / "out") == {"a.txt": b"first", "sub/b.txt": b"second"}
    assert not place(artifact, tmp_path / "out")


@pytest.mark.parametrize("where", ["file/out", "file/a/b/out", "/proc/nowhere/out", "loop/out"])
def test_where_no_folder_can_be_is_one_clear_error(
    made: Artifact, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(G4Error, match=r"out cannot be written \("):
        place(made, tmp_path / where)


def test_a_target_is_refused_before_the_work(made: Artifact, store: Store, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(UsageError) as error:
            check_target(folder, made.identity, store.home)
        return str(error.value)

    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    (tmp_path / "link").symlink_to(store.home)
    assert "is a file: give a folder" in refused(tmp_path / "file")
    assert "already holds other files" in refused(tmp_path / "full")
    assert "is inside the store" in refused(store.home / "artifacts" / "mine")
    assert "is inside the store" in refused(tmp_path / "link" / "mine")
    assert "there is no home folder for ~nosuchuser" in refused(Path("~nosuchuser/x"))
    assert "cannot be a path: it is too long" in refused(tmp_path / ("x" * 300))
    check_target(tmp_path / "new" / "folder", made.identity, store.home)
    place(made, tmp_path / "out")
    check_target(tmp_path / "out", made.identity, store.home)
    with pytest.raises(UsageError, match="already holds other files"):
        check_target(tmp_path / "out", "another identity", store.home)


def test_what_a_killed_copy_left_is_removed(made: Artifact, tmp_path: Path) -> None:
    dead = tmp_path / (room._prefix(tmp_path / "out", 2**22 + 1) + "x")
    alive = tmp_path / (room._prefix(tmp_path / "out", os.getppid()) + "x")
    dead.mkdir()
    alive.mkdir()
    place(made, tmp_path / "out")
    assert not dead.exists()
    assert alive.exists()
