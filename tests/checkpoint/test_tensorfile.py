import errno
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

from g4tool.checkpoint.tensorfile import DTYPES, SafetensorsFile, row_blocks
from g4tool.errors import G4Error


def write_raw(path: Path, header: object, values: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_reads_what_safetensors_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (7, 3, 2)).to(dtype)
    path = tmp_path / "a.safetensors"
    save_file({"x": values, "scalar": values[0, 0, 0].clone()}, path, metadata={"key": "value"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"key": "value"}
        assert file.info("x").shape == (7, 3, 2)
        assert file.info("x").nbytes == values.nbytes
        assert file.read("x").dtype == dtype
        # Equality is not defined for every float8 and unsigned dtype; bytes always are.
        assert file.read("x", 2, 5).view(torch.uint8).equal(values[2:5].view(torch.uint8))
        scalar = file.read("scalar")
        assert scalar.shape == ()
        assert scalar.reshape(1).view(torch.uint8).equal(values[0, 0, :1].view(torch.uint8))


def test_empty_tensors_and_row_ranges(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"none": torch.empty(0, 4), "x": torch.arange(6.0).view(3, 2)}, path)
    file = SafetensorsFile(path)
    assert file.read("none").shape == (0, 4)
    assert file.read("x", 1, 1).shape == (0, 2)
    with pytest.raises(ValueError, match="rows 1:4 of x"):
        file.read("x", 1, 4)
    with pytest.raises(G4Error, match=r"a\.safetensors has no tensor y"):
        file.read("y")
    file.close()


def test_row_blocks_cover_all_rows_once() -> None:
    assert list(row_blocks(10, 30, block=100)) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert list(row_blocks(2, 500, block=100)) == [(0, 1), (1, 2)]
    assert list(row_blocks(0, 0)) == []


@pytest.mark.parametrize(
    ("header", "values", "message"),
    [
        ({"x": entry([4], 0, 4)}, b"abc", "truncated: x ends at byte"),
        ({"x": entry([4], 0, 4)}, b"abcde", "1 bytes at the end belong to no tensor"),
        ({"x": entry([4], 1, 5)}, b"abcde", "1 bytes before x belong to no tensor"),
        ({"x": entry([4], 0, 4), "y": entry([2], 2, 4)}, b"abcd", "y overlaps"),
        ({"x": entry([4], 0, 3)}, b"abc", "x spans 3 bytes, but U8 [4] needs 4"),
        ({"x": entry([4], 0, 4, "F4")}, b"abcd", "x has the dtype 'F4'"),
        ({"x": entry([-4], 0, 4)}, b"abcd", "x has the shape"),
        ({"x": {"dtype": "U8", "shape": [4]}}, b"abcd", "x has the data_offsets None"),
        ({"x": 5}, b"", "entry for x is not a JSON object"),
        ([], b"", "not a JSON object"),
        ({"__metadata__": {"a": 1}}, b"", "not a table of strings"),
        (b"{", b"", "not valid JSON"),
        (b'{"x": {}, "x": {}}', b"", "'x' is named twice"),
        (b"\xff\xfe{}", b"", "not valid JSON"),
    ],
)
def test_bad_header_is_one_error(
    tmp_path: Path, header: object, values: bytes, message: str
) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, values)
    with pytest.raises(G4Error) as error:
        SafetensorsFile(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_other_kinds_of_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(G4Error, match="does not exist"):
        SafetensorsFile(path)
    path.write_bytes(b"abc")
    with pytest.raises(G4Error, match="truncated: 3 bytes"):
        SafetensorsFile(path)
    # A pickle's first bytes, taken for a length.
    path.write_bytes(b"PK\x03\x04\x00\x00\x08\x08 and more")
    with pytest.raises(G4Error, match="not a safetensors file"):
        SafetensorsFile(path)
    path.write_bytes(struct.pack("<Q", 50) + b"{}")
    with pytest.raises(G4Error, match="truncated: the header needs 58 bytes"):
        SafetensorsFile(path)


def test_a_file_cut_while_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(100)}, path)
    with SafetensorsFile(path) as file:
        with path.open("r+b") as handle:
            handle.truncate(path.stat().st_size - 4)
        with pytest.raises(G4Error, match="x ends too early"):
            file.read("x")


SAMPLE = save({"a": torch.arange(4.0).view(2, 2), "b": torch.ones(3, dtype=torch.bfloat16)})


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    cut=st.integers(0, len(SAMPLE)),
    changes=st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), max_size=4),
    whole=st.booleans(),
)
def test_garbled_files_are_errors_or_what_safetensors_reads(
    tmp_path: Path, cut: int, changes: list[tuple[int, int]], whole: bool
) -> None:
    content = bytearray(SAMPLE)
    for at, value in changes:
        content[at] = value
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(content if whole else content[:cut]))
    try:
        file = SafetensorsFile(path)
    except G4Error:
        return
    with file:
        expected = load(path.read_bytes())
        assert set(expected) == set(file.tensors)
        for name, value in expected.items():
            assert file.read(name).view(torch.uint8).equal(value.view(torch.uint8))


def test_truncation_anywhere_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for cut in range(len(SAMPLE)):
        path.write_bytes(SAMPLE[:cut])
        with pytest.raises(G4Error):
            SafetensorsFile(path)
        with pytest.raises(SafetensorError), safe_open(path, "pt"):
            pass


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    folder, pipe = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    folder.mkdir()
    with pytest.raises(G4Error, match=r"a\.safetensors is a folder, not a safetensors file"):
        SafetensorsFile(folder)
    os.mkfifo(pipe)
    with pytest.raises(G4Error, match=r"b\.safetensors is no regular file"):
        SafetensorsFile(pipe)


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "a.safetensors"
    path.write_bytes(SAMPLE)
    with SafetensorsFile(path) as file, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(G4Error, match=r"a\.safetensors: a cannot be read: Input/output error"):
            file.read("a")
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(G4Error, match=r"a\.safetensors cannot be read: Input/output error"):
        SafetensorsFile(path)


def test_half_a_surrogate_pair_is_no_name(tmp_path: Path) -> None:
    header = b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    path = write_raw(tmp_path / "a.safetensors", header, b"x")
    with pytest.raises(G4Error, match="surrogates not allowed"):
        SafetensorsFile(path)
    with pytest.raises(SafetensorError):
        load(path.read_bytes())
