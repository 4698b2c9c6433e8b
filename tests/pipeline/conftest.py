from pathlib import Path

import pytest

from g4tool.pipeline.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"first")
    (folder / "sub" / "b.txt").write_bytes(b"second")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "junk").write_bytes(b"junk")
    return folder
