"""Opens a checkpoint's folder, or a view of one, and checks that it is whole."""

from pathlib import Path

from g4tool.checkpoint.folder import open_files, read_config
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.view import VIEW, open_view

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Open a folder of config.json and safetensors, or a canonical view of one.

    Raises G4Error, naming file and tensor, for whatever makes the checkpoint unusable; values are
    not read (see `check_finite`).
    """
    folder = Path(folder)
    if (folder / VIEW).is_file():
        return open_view(folder)
    raw_config = read_config(folder)
    return Checkpoint(folder, raw_config, open_files(folder))
