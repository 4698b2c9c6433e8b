"""A canonical view: a checked checkpoint's index under canonical names, without a copy of it.

`view.json` says what the view is and holds no path; `where.json` says where the source's files
are, name by name (as the store does for files an artifact refers to), and may be written anew when
they move.
"""

from pathlib import Path
from typing import Any

from g4tool.checkpoint.folder import CONFIG, read_json
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.files import write_json

VIEW = "view.json"
WHERE = "where.json"
_FORMAT = "g4 canonical view 1"


def write_view(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the view of `checkpoint` into `folder`, which is made when it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_where(folder, checkpoint.folder)
    write_json(folder / VIEW, view_content(checkpoint))


def write_where(folder: Path, source: Path) -> None:
    """Say in the view `folder` that the source's files lie in the folder `source` now."""
    names = (CONFIG, *sorted(path.name for path in source.glob("*.safetensors")))
    write_json(folder / WHERE, {name: str(source.absolute() / name) for name in names})


def open_view(folder: Path) -> Checkpoint:
    """The checkpoint a view points to; its `folder` is the source's.

    Raises G4Error when the source vanished or is not the one that was viewed.
    """
    content = read_json(folder / VIEW)
    if content.get("format") != _FORMAT:
        raise G4Error(f"{folder / VIEW} is not a view this g4 reads; convert the model again.")
    source = Path(str(read_json(folder / WHERE).get(CONFIG))).parent
    files: dict[str, SafetensorsFile] = {}
    for name, facts in content["files"].items():
        path = source / name
        if not path.is_file():
            raise G4Error(f"{path} is gone, but the view {folder} needs it; convert it again.")
        if path.stat().st_size != facts["size"]:
            raise G4Error(
                f"{path} has {path.stat().st_size} bytes, but had {facts['size']} when the view "
                f"{folder} was made; convert it again."
            )
        files[name] = SafetensorsFile(path)
    checkpoint = Checkpoint(source, content["config"], files)
    if view_content(checkpoint) != content:
        raise G4Error(f"{source} holds other tensors than the view {folder}; convert it again.")
    return checkpoint


def view_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """What view.json holds: config, files with sizes, and where each tensor's parts are."""
    return {
        "format": _FORMAT,
        "config": checkpoint.raw_config,
        "files": {path.name: {"size": path.stat().st_size} for path in checkpoint.files},
        "tensors": {name: _pieces(checkpoint, name) for name in checkpoint.names},
        "extras": {name: _pieces(checkpoint, name) for name in checkpoint.extras},
        "dropped": checkpoint.dropped,
    }


def _pieces(checkpoint: Checkpoint, name: str) -> list[dict[str, str]]:
    return [{"file": file, "key": key} for file, key in checkpoint.pieces(name)]
