import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from g4tool.errors import G4Error
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.store import Store
from g4tool.pipeline.work import Make, Work
from g4tool.progress import Progress, silent


@pytest.fixture
def begin(tmp_path: Path, store: Store) -> Callable[..., Work]:
    (tmp_path / "partial").mkdir()

    def start(report: Callable[[Progress], None] = silent) -> Work:
        return Work("copies", tmp_path / "partial", (), store.hashes, report)

    return start


def write(content: bytes) -> Callable[[Path], dict[str, int]]:
    def make(path: Path) -> dict[str, int]:
        path.write_bytes(content)
        return {"bytes": len(content)}

    return make


def test_a_result_is_what_json_makes_of_it(begin: Callable[..., Work]) -> None:
    def make(path: Path) -> dict[str, tuple[int, float]]:
        path.write_bytes(b"")
        return {"pair": (1, 0.1)}

    assert begin().file("a", make) == {"pair": [1, 0.1]} == begin().file("a", never)


def never(path: Path) -> None:
    raise AssertionError(f"{path} was made again")


def test_a_finished_file_is_not_made_again(begin: Callable[..., Work]) -> None:
    assert begin().file("sub/a", write(b"abc")) == {"bytes": 3}
    steps: list[Progress] = []
    second = begin(steps.append)
    second.expect(4)
    assert second.file("sub/a", never) == {"bytes": 3}
    assert steps == [Progress("copies", 1, 4, "files", "sub/a: already done")]
    assert second.files["sub/a"].size == 3


@pytest.mark.parametrize("damage", [b"abd", b"ab", b"abcd", None])
def test_a_damaged_file_is_made_again_and_said_so(
    begin: Callable[..., Work], damage: bytes | None
) -> None:
    work = begin()
    work.file("a", write(b"abc"))
    if damage is None:
        (work.path / "a").unlink()
    else:
        (work.path / "a").write_bytes(damage)
    steps: list[Progress] = []
    again = begin(steps.append)
    again.file("a", write(b"abc"))
    assert (again.path / "a").read_bytes() == b"abc"
    assert [step.note for step in steps] == ["a: damaged since it was written, made again"]
    assert begin().file("a", never) == {"bytes": 3}


def test_strays_go_at_the_start_and_unasked_files_at_the_end(begin: Callable[..., Work]) -> None:
    work = begin()
    work.file("kept", write(b"1"))
    work.file("old/unasked", write(b"1"))
    (work.path / "stray.part").write_bytes(b"half")
    (work.path / "empty").mkdir()
    again = begin()
    assert sorted(os.listdir(again.path)) == ["kept", "old"]
    again.file("kept", never)
    again.finish()
    assert os.listdir(again.path) == ["kept"]


def test_a_file_written_past_the_journal_is_the_stages_mistake(begin: Callable[..., Work]) -> None:
    work = begin()
    (work.path / "direct").write_bytes(b"1")
    with pytest.raises(RuntimeError, match=r"copies wrote direct past Work\.file"):
        work.finish()


@pytest.mark.parametrize("name", ["manifest.json", "where.json", "../a", "/a", "a//b", ".", ""])
def test_names_that_cannot_be(begin: Callable[..., Work], name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        begin().file(name, write(b""))


def test_one_name_twice_is_the_stages_mistake(begin: Callable[..., Work]) -> None:
    work = begin()
    work.file("a", write(b""))
    with pytest.raises(ValueError, match="writes a twice"):
        work.file("a", write(b""))


def test_need_counts_what_is_done(
    begin: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = begin()
    work.file("a", write(b"x" * 600))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=400))
    work.need(1000)
    with pytest.raises(G4Error, match=r"needs 401 bytes more in .*, where 400 are free: make room"):
        work.need(1001)


def each(work: Work, makes: Mapping[str, Make], at_once: int) -> list[Json | None]:
    """A file for every name."""
    return work.together([partial(work.file, *made) for made in makes.items()], at_once)


@pytest.mark.parametrize("at_once", [1, 3])
def test_together_gives_results_in_order_and_resumes(
    begin: Callable[..., Work], at_once: int
) -> None:
    names = [f"{number}" for number in range(9)]
    begin().file("4", write(b"four!"))
    work = begin()
    makes = {name: never if name == "4" else write(b"x" * int(name)) for name in names}
    sizes = [5 if name == "4" else int(name) for name in names]
    assert each(work, makes, at_once) == [{"bytes": size} for size in sizes]
    assert set(work.files) == set(names)
    assert each(begin(), dict.fromkeys(names, never), at_once) == [{"bytes": s} for s in sizes]


def test_together_makes_several_at_a_time(begin: Callable[..., Work]) -> None:
    together = threading.Barrier(3, timeout=20)

    def make(path: Path) -> None:
        together.wait()
        path.write_bytes(b"x")

    assert each(begin(), dict.fromkeys("abc", make), 3) == [None] * 3


def test_together_keeps_what_was_whole_when_one_fails(begin: Callable[..., Work]) -> None:
    whole = threading.Event()

    def first(path: Path) -> None:
        path.write_bytes(b"a")
        whole.set()

    def failing(path: Path) -> None:
        path.write_bytes(b"half")
        whole.wait(20)
        raise G4Error("no more.")

    later = [f"later{number}" for number in range(20)]
    made: list[str] = []

    def slow(path: Path) -> None:
        made.append(path.name)
        time.sleep(0.05)
        path.write_bytes(b"c")

    with pytest.raises(G4Error, match="no more"):
        each(begin(), {"a": first, "b": failing, **dict.fromkeys(later, slow)}, 2)
    assert len(made) < len(later)
    again = begin()
    assert again.file("a", never) is None
    assert not (again.path / "b").exists()
