"""Files given by the user, as an input with an identity."""

import os
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import source_identity
from g4tool.pipeline.hashes import FileHashes
from g4tool.pipeline.manifest import records
from g4tool.progress import Report, silent


def resolve(
    source: Source, hashes: FileHashes, rehash: bool = False, report: Report = silent
) -> Artifact:
    """Hash what `source` names and give it as an artifact of the stage "source".

    Raises G4Error for a missing path, a name outside the folder, an empty folder.
    """
    names = list_files(source)
    root = source.path.absolute()
    files = {
        name: hashes.of(root if root.is_file() else root / name, rehash, report) for name in names
    }
    identity = source_identity({name: record.sha256 for name, record in files.items()})
    return Artifact(identity, "source", root, {"files": records(files)}, files)


def list_files(source: Source) -> list[str]:
    """The relative names of `source`'s files, sorted, with forward slashes."""
    path = source.path
    if path.is_file():
        return [path.name]
    if not path.is_dir():
        raise G4Error(f"{path} does not exist.")
    names = list(source.files) if source.files is not None else _walk(path)
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise G4Error(f"{name!r} is not a name inside {path}.")
        if not (path / name).is_file():
            raise G4Error(f"{path} has no file {name!r}.")
    if not names:
        raise G4Error(f"{path} holds no files.")
    return sorted(set(names))


def _walk(root: Path) -> list[str]:
    found = []
    for folder, folders, files in os.walk(root):
        # Hidden: .git, and .cache, which huggingface_hub leaves in a folder it downloads to.
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            (Path(folder) / name).relative_to(root).as_posix()
            for name in files
            if not name.startswith(".")
        ]
    return found
