import hashlib
import json
import shutil
from pathlib import Path

import pytest

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.view import VIEW, WHERE, write_view, write_where
from g4tool.errors import G4Error
from g4tool.files import sha256


@pytest.fixture
def source(tmp_path: Path, tiny_folders: dict[str, Path]) -> Path:
    """A copy of tiny-e2b that may be moved."""
    return Path(shutil.copytree(tiny_folders["tiny-e2b"], tmp_path / "source"))


def test_a_view_reads_the_source(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    write_view(checkpoint, tmp_path / "view")
    view = open_checkpoint(tmp_path / "view")
    assert view.names == checkpoint.names
    assert view.config == checkpoint.config
    assert view.folder == source
    for name in view.names:
        assert view.read(name).equal(checkpoint.read(name))
    assert sorted(path.name for path in (tmp_path / "view").iterdir()) == [VIEW, WHERE]
    content = json.loads((tmp_path / "view" / VIEW).read_text())
    assert content["tensors"]["norm.weight"] == [
        {"file": "model-00004-of-00004.safetensors", "key": "model.norm.weight"}
    ]


def test_a_view_holds_no_path_and_survives_a_move(source: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    write_view(open_checkpoint(source), view)
    assert str(tmp_path) not in (view / VIEW).read_text()
    before = sha256(view / VIEW)
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(G4Error, match=r"source/model-00001-of-00004\.safetensors is gone"):
        open_checkpoint(view)
    write_where(view, moved)
    assert open_checkpoint(view).folder == moved
    write_view(open_checkpoint(moved), tmp_path / "again")
    assert sha256(tmp_path / "again" / VIEW) == before


def test_a_changed_source_is_seen(source: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    write_view(open_checkpoint(source), view)
    shard = source / "model-00003-of-00004.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content + b" ")
    with pytest.raises(G4Error) as error:
        open_checkpoint(view)
    assert str(error.value).startswith(f"{shard} has {len(content) + 1} bytes, but had")
    shard.write_bytes(
        content.replace(b"model.layers.3.layer_scalar", b"model.layers.3.layer_scalaz")
    )
    with pytest.raises(G4Error, match=r"00003-of-00004\.safetensors has another header than when"):
        open_checkpoint(view)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / VIEW).write_text('{"format": "g4 canonical view 9"}')
    with pytest.raises(G4Error, match="not a view this g4 reads"):
        open_checkpoint(tmp_path)


def test_swapped_names_are_seen_and_changed_values_are_not(source: Path, tmp_path: Path) -> None:
    """Two tensors alike change places, so that size and index still fit; then a value changes."""
    view = tmp_path / "view"
    write_view(open_checkpoint(source), view)
    query, key = (b"layers.0.self_attn.%c_norm" % letter for letter in b"qk")
    shard = next(p for p in sorted(source.glob("*.safetensors")) if key in p.read_bytes())
    content = shard.read_bytes()
    swapped = content.replace(query, b"<one>").replace(key, query).replace(b"<one>", key)
    shard.write_bytes(swapped)
    open_checkpoint(source)
    with pytest.raises(G4Error, match=rf"{shard.name} has another header than when"):
        open_checkpoint(view)
    shard.write_bytes(content[:-2] + bytes(2))
    open_checkpoint(view)


def test_the_header_is_recorded_as_hashlib_sees_it(source: Path, tmp_path: Path) -> None:
    write_view(open_checkpoint(source), tmp_path / "view")
    recorded = json.loads((tmp_path / "view" / VIEW).read_text())["files"]
    for path in source.glob("*.safetensors"):
        content = path.read_bytes()
        length = 8 + int.from_bytes(content[:8], "little")
        assert recorded.pop(path.name) == {
            "size": len(content),
            "header_sha256": hashlib.sha256(content[:length]).hexdigest(),
        }
    assert recorded == {}


def test_a_view_among_its_files_needs_no_where(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    write_view(checkpoint, source)
    (source / WHERE).unlink()
    view = open_checkpoint(source)
    assert view.folder == source
    assert view.names == checkpoint.names
    (source / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(G4Error, match=r"source/model-00002-of-00004\.safetensors is gone"):
        open_checkpoint(source)


def test_where_without_a_config_is_an_error(source: Path, tmp_path: Path) -> None:
    view = tmp_path / "view"
    write_view(open_checkpoint(source), view)
    (view / WHERE).write_text("{}")
    with pytest.raises(G4Error, match=r"where\.json says None of config\.json"):
        open_checkpoint(view)


def test_hidden_files_are_not_the_sources(source: Path, tmp_path: Path) -> None:
    (source / "._model-00001-of-00004.safetensors").write_bytes(b"\0\5\x16\7")
    write_view(open_checkpoint(source), tmp_path / "view")
    assert not any(
        name.startswith(".") for name in json.loads((tmp_path / "view" / WHERE).read_text())
    )
