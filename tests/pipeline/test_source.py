import shutil
from pathlib import Path

import pytest

from g4tool.errors import G4Error
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.source import list_files, resolve
from g4tool.pipeline.store import Store


def test_identity_is_content_and_names_wherever_it_lies(
    store: Store, given: Path, tmp_path: Path
) -> None:
    shutil.copytree(given, tmp_path / "elsewhere")
    here = resolve(Source(given), store.hashes)
    there = resolve(Source(tmp_path / "elsewhere"), store.hashes)
    assert here.identity == there.identity
    assert sorted(here.files) == ["a.txt", "sub/b.txt"]
    assert here.locate("sub/b.txt").read_bytes() == b"second"
    (given / "a.txt").write_bytes(b"FIRST")
    assert resolve(Source(given), store.hashes).identity != there.identity
    (given / "a.txt").write_bytes(b"first")
    (given / "a.txt").rename(given / "c.txt")
    assert resolve(Source(given), store.hashes).identity != there.identity


def test_named_files_only(store: Store, given: Path) -> None:
    one = resolve(Source(given, ("a.txt",)), store.hashes)
    (given / "sub" / "b.txt").write_bytes(b"other")
    assert resolve(Source(given, ("a.txt",)), store.hashes).identity == one.identity


def test_a_single_file_is_named_by_its_name(store: Store, given: Path) -> None:
    file = resolve(Source(given / "a.txt"), store.hashes)
    assert file.identity == resolve(Source(given, ("a.txt",)), store.hashes).identity
    assert file.locate("a.txt") == given / "a.txt"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("a.txt", "no.txt"), "has no file 'no.txt'"),
        (("../x",), r"'\.\./x' is not a name inside"),
        (("/etc/passwd",), "is not a name inside"),
        ((), "holds no files"),
    ],
)
def test_wrong_files_are_errors(given: Path, files: tuple[str, ...], message: str) -> None:
    with pytest.raises(G4Error, match=message):
        list_files(Source(given, files))


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(G4Error, match="gone does not exist"):
        list_files(Source(tmp_path / "gone"))


def test_links_to_files_are_files(given: Path, tmp_path: Path, store: Store) -> None:
    plain = resolve(Source(given), store.hashes).identity
    (given / "a.txt").rename(tmp_path / "blob")
    (given / "a.txt").symlink_to(tmp_path / "blob")
    assert resolve(Source(given), store.hashes).identity == plain
