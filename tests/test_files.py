import hashlib
from pathlib import Path

import pytest

from g4tool import files


def test_write_json_keeps_order_and_letters(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"b": "é", "a": [1]})
    assert path.read_text(encoding="utf-8") == '{\n  "b": "é",\n  "a": [\n    1\n  ]\n}\n'


def test_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_text(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


def test_write_json_refuses_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_sha256_of_more_than_one_block(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192 + b"end"
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    assert files.sha256(path) == hashlib.sha256(content).hexdigest()
