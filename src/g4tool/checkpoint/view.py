"""A canonical view: a checked checkpoint's index under canonical names, without a copy of it.

`view.json` says what the view is and holds no path; `where.json` says where the source's files
are, name by name (as the store does for files an artifact refers to), and may be written anew when
they move. Without `where.json` they are taken to lie beside `view.json`.

Of each file the view keeps the size and the hash of the header. Opening it therefore notices a
file that was cut, swapped for one of another model or laid out anew, at the cost of reading a few
kilobytes. It does not notice values that were changed in place, nor a file of the same layout with
other values: only hashing whole files can, which `g4 cache verify` does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4tool.checkpoint.folder import CONFIG, read_json, weight_files
from g4tool.checkpoint.gguf import SUFFIX, GgufFile
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.settings import shown
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.files import write_json

VIEW = "view.json"
WHERE = "where.json"
_FORMAT = "g4 canonical view 2"


def write_view(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the view of `checkpoint` into `folder`, which is made when it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_where(folder, checkpoint.folder)
    write_json(folder / VIEW, view_content(checkpoint))


def write_where(folder: Path, source: Path) -> None:
    """Say in the view `folder` that the source's files lie in the folder `source` now."""
    names = (CONFIG, *(path.name for path in weight_files(source)))
    write_json(folder / WHERE, {name: str(source.absolute() / name) for name in names})


def open_view(folder: Path) -> Checkpoint:
    """The checkpoint a view points to; its `folder` is the source's.

    Raises G4Error when a file of the source is gone, or differs in size or header from the one
    that was viewed. Values are not looked at.
    """
    content = read_json(folder / VIEW)
    recorded, config = content.get("files"), content.get("config")
    known = content.get("format") == _FORMAT
    if not (known and isinstance(recorded, dict) and isinstance(config, dict)):
        raise G4Error(f"{folder / VIEW} is not a view this g4 reads; convert the model again.")
    source = source_folder(folder)
    files = {
        name: _open(_place(folder, source, name), facts, folder) for name, facts in recorded.items()
    }
    checkpoint = Checkpoint(source, config, files)
    if view_content(checkpoint) != content:
        raise G4Error(f"{source} holds other tensors than the view {folder}; convert it again.")
    return checkpoint


def view_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """What view.json holds: config, the files' sizes and headers, where each tensor's parts are."""
    return {
        "format": _FORMAT,
        "config": checkpoint.raw_config,
        "files": {name: _facts(file) for name, file in checkpoint.open_files.items()},
        "tensors": {name: _pieces(checkpoint, name) for name in checkpoint.names},
        "extras": {name: _pieces(checkpoint, name) for name in checkpoint.extras},
        "dropped": checkpoint.dropped,
    }


def source_folder(folder: Path) -> Path:
    """Where the view in `folder` says its source lies. G4Error for a broken where.json."""
    where = folder / WHERE
    if not where.exists():
        return folder
    config = read_json(where).get(CONFIG)
    if config is None and (folder / CONFIG).is_file():
        # A GGUF file's view has small files of its own: there are none beside the file.
        return folder
    if not isinstance(config, str):
        raise G4Error(f"{where} says {shown(config)} of {CONFIG}, not a path; convert it again.")
    return Path(config).parent


def gguf_source(folder: Path) -> Path | None:
    """The GGUF file that the view in `folder` is of; None where it is of a folder."""
    where = folder / WHERE
    names = [name for name in (read_json(where) if where.exists() else {}) if _is_gguf(name)]
    return _place(folder, folder, names[0]) if names else None


def _is_gguf(name: str) -> bool:
    return name.endswith(SUFFIX)


def _place(folder: Path, source: Path, name: str) -> Path:
    """Where the file `name` of the view in `folder` lies."""
    if not _is_gguf(name):
        return source / name
    path = read_json(folder / WHERE).get(name)
    if not isinstance(path, str):
        raise G4Error(f"{folder / WHERE} says {shown(path)} of {name}, not a path.")
    return Path(path)


def _open(path: Path, recorded: Mapping[str, Any], view: Path) -> SafetensorsFile:
    """A file of the source, checked against what the view `view` keeps of it."""
    if not path.exists():
        raise G4Error(f"{path} is gone, but the view {view} needs it; convert it again.")
    size = path.stat().st_size
    if size != recorded["size"]:
        raise G4Error(
            f"{path} has {size} bytes, but had {recorded['size']} when the view {view} was made; "
            f"convert it again."
        )
    file = GgufFile(path) if _is_gguf(path.name) else SafetensorsFile(path)
    if file.header_sha256 != recorded["header_sha256"]:
        file.close()
        raise G4Error(
            f"{path} has another header than when the view {view} was made; convert it again."
        )
    return file


def _facts(file: SafetensorsFile) -> dict[str, Any]:
    return {"size": file.size, "header_sha256": file.header_sha256}


def _pieces(checkpoint: Checkpoint, name: str) -> list[dict[str, str]]:
    return [{"file": file, "key": key} for file, key in checkpoint.pieces(name)]
