from pathlib import Path

from g4tool.pipeline import journal
from g4tool.pipeline.journal import Entry


def test_entries_come_back_and_a_later_line_wins(tmp_path: Path) -> None:
    assert journal.read(tmp_path) == {}
    journal.append(tmp_path, Entry("a", 1, "x", {"error": 0.25}))
    journal.append(tmp_path, Entry("b", 2, "y", None))
    journal.append(tmp_path, Entry("a", 3, "z", None))
    assert journal.read(tmp_path) == {"a": Entry("a", 3, "z", None), "b": Entry("b", 2, "y", None)}


def test_a_line_torn_at_any_byte_loses_only_itself(tmp_path: Path) -> None:
    journal.append(tmp_path, Entry("a", 1, "x", None))
    path = tmp_path / "journal.jsonl"
    whole = path.read_bytes()
    journal.append(tmp_path, Entry("b", 2, "y", None))
    both = path.read_bytes()
    for cut in range(len(whole), len(both)):
        path.write_bytes(both[:cut])
        assert set(journal.read(tmp_path)) == {"a"}
        journal.repair(tmp_path)
        assert path.read_bytes() == whole
        journal.append(tmp_path, Entry("c", 3, "z", None))
        assert set(journal.read(tmp_path)) == {"a", "c"}


def test_done_counts_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"1")
    (tmp_path / "files" / "b").write_bytes(b"short")
    for name in "abc":
        journal.append(tmp_path, Entry(name, 1, "x", None))
    assert journal.done(tmp_path) == 1


def test_the_expected_number_of_files(tmp_path: Path) -> None:
    assert journal.expected(tmp_path) is None
    journal.expect(tmp_path, 7)
    assert journal.expected(tmp_path) == 7
