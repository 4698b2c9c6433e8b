import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from g4tool.errors import G4Error, UsageError
from g4tool.pipeline.home import default_home, open_home


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("G4_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_home() == tmp_path / ".cache" / "g4"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_home() == tmp_path / ".cache" / "g4"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_home() == Path("/var/cache/me/g4")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_home() == tmp_path / "Library" / "Caches" / "g4"
    monkeypatch.setenv("G4_HOME", "~/mine")
    assert default_home() == tmp_path / "mine"


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    open_home(tmp_path)
    assert json.loads((tmp_path / "store.json").read_text()) == {"layout": 1}
    (tmp_path / "store.json").write_text('{"layout": 2}')
    with pytest.raises(G4Error, match=r"has layout 2, this version of g4 reads layout 1: update"):
        open_home(tmp_path)
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(G4Error, match="not a store's layout file"):
        open_home(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(G4Error, match=r"cannot be written \(Not a directory\): give another"):
        open_home(tmp_path / "file" / "home")


def test_a_read_only_folder_is_one_clear_error_unless_it_is_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_home(tmp_path / "store")
    # Permission bits do not stop root, who may be running this.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(G4Error, match=r"cannot be written \(.*\): give another folder with --home"):
        open_home(tmp_path / "new")
    assert open_home(tmp_path / "store") == tmp_path / "store"


def test_what_can_be_no_path_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="there is no home folder for ~no-such-user-here"):
        open_home(Path("~no-such-user-here/x"))
    with pytest.raises(UsageError, match=r"^/xxxxx.*\.\.\. cannot be a path: it is too long"):
        open_home(Path("/" + "x" * 5000))
    monkeypatch.setenv("G4_HOME", "~no-such-user-here/x")
    with pytest.raises(UsageError, match="there is no home folder for ~no-such-user-here"):
        default_home()


def test_the_room_is_importable_without_torch() -> None:
    code = (
        "import sys, g4tool.pipeline.store, g4tool.pipeline.cache, g4tool.pipeline.place;"
        "print('torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
