"""Opens a checkpoint's folder, a view of one, or a GGUF file, and checks that it is whole."""

from pathlib import Path

from g4tool.checkpoint.folder import open_files, quantized_already, read_config
from g4tool.checkpoint.gguf import SUFFIX, open_gguf
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.view import VIEW, open_view
from g4tool.errors import G4Error

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Open a folder of config.json and safetensors, a canonical view of one, or a GGUF file.

    Raises G4Error, naming file and tensor, for whatever makes the checkpoint unusable; values are
    not read (see `check_finite`).
    """
    folder = Path(folder)
    if folder.suffix == SUFFIX and not folder.is_dir():
        return open_gguf(folder)
    if (folder / VIEW).is_file():
        return open_view(folder)
    raw_config = read_config(folder)
    files = open_files(folder)
    for file in files.values():
        if "tensor_names" in file.metadata:
            raise G4Error(quantized_already(file.path, "torchao's tensors"))
        for end, form in (("_packed", "compressed-tensors"), (".scales", "MLX")):
            if any(name.endswith(end) for name in file.tensors):
                raise G4Error(quantized_already(file.path, form))
    return Checkpoint(folder, raw_config, files)
