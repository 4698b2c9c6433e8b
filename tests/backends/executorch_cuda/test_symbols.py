import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from g4tool.backends.executorch.symbols import absent, undefined_symbols

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
SOURCE = """
int needed(void); int also_needed(void); __attribute__((weak)) int optional(void);
static int own(void) { return 1; }
int offered(void) { return needed() + also_needed() + own() + (optional ? optional() : 0); }
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "a.c").write_text(SOURCE)
    path = tmp_path / "a.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "a.c"], check=True)
    return path


def test_what_a_library_needs(library: Path) -> None:
    found = undefined_symbols(library.read_bytes())
    assert {"needed", "also_needed"} <= set(found)
    assert not {"optional", "own", "offered", "__gmon_start__"} & set(found)


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_it_is_what_nm_says() -> None:
    path = next((Path(torch.__file__).parent / "lib").glob("libc10.so"))
    lines = subprocess.run(
        ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    said = {name.partition("@")[0] for kind, name in map(str.split, lines) if kind == "U"}
    assert said
    assert set(undefined_symbols(path.read_bytes())) == said


def test_other_files_are_refused(library: Path) -> None:
    with pytest.raises(ValueError, match="no 64-bit ELF library"):
        undefined_symbols(b"PK\x03\x04 and so on")
    with pytest.raises(ValueError, match="a damaged ELF library"):
        undefined_symbols(library.read_bytes()[:2000])


def test_what_the_process_has() -> None:
    assert absent(["malloc", "g4_has_no_such_function", "free"]) == ["g4_has_no_such_function"]
