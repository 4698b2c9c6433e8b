"""Where a checkpoint comes from: a folder, a GGUF file, the Hub, or a tiny model of g4's own."""

import difflib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from g4tool.errors import UsageError
from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.home import user_path
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.stages.gguf import FromGgufStage

TINY_MODELS = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")
_GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class DownloadStage:
    """Fetches a repository's files at one commit into the Hub's own cache, and verifies them."""

    repo: str
    commit: str
    name: str = "download"
    version: int = 1
    inputs: tuple[()] = ()

    def parameters(self) -> dict[str, Json]:
        """Repository and commit: a branch name would mean another thing tomorrow."""
        return {"repo": self.repo, "commit": self.commit}

    def environment(self) -> dict[str, Json]:
        """Nothing: the bytes are the Hub's."""
        return {}

    def run(self, work: Work) -> None:
        """Download what is missing; the artifact refers to the files where the Hub keeps them."""
        from g4tool.hub.download import download, expected

        folder = download(
            self.repo,
            self.commit,
            report=work.report,
            hash_file=lambda path: work.hash(path).sha256,
        )
        for name, _ in expected(self.repo, self.commit):
            work.refer(name, folder / name)


def checkpoint_stage(model: str, revision: str = "main") -> Stage | Source:
    """What gives the checkpoint that MODEL names.

    Raises UsageError when MODEL is neither a folder, a GGUF file, a tiny model nor a Hub id.
    """
    if model in TINY_MODELS:
        from g4tool.checkpoint.tiny import tiny_folder

        return Source(tiny_folder(model))
    path = user_path(Path(model))
    if path.is_dir():
        given = gguf_of(path)
        return folder_source(path) if given is None else FromGgufStage(Source(given))
    if path.suffix == _GGUF:
        if not path.is_file():
            raise UsageError(f"{model} does not exist.")
        return FromGgufStage(Source(path))
    if path.is_file():
        raise UsageError(
            f"{model}: this is a file; give a .gguf file or the folder of a safetensors checkpoint."
        )
    if _HUB_ID.fullmatch(model) and not model.startswith((".", "~")):
        from g4tool.hub.download import resolve

        return DownloadStage(model, resolve(model, revision))
    raise UsageError(_unknown(model))


def folder_source(folder: Path) -> Source:
    """A checkpoint's folder as an input: its safetensors files and the small ones beside them.

    Other weights in the folder (GGUF, pickles) are no part of it, and are not hashed. A view stands
    for the folder that it refers to.
    """
    from g4tool.checkpoint.folder import side_files
    from g4tool.checkpoint.view import VIEW, source_folder

    if (folder / VIEW).is_file():
        folder = source_folder(folder)
    shards = [
        path.name
        for path in folder.glob("*.safetensors*")
        if path.is_file() and not path.name.startswith(".")
    ]
    return Source(folder, tuple(sorted({*side_files(folder), *shards})))


def gguf_of(folder: Path) -> Path | None:
    """The GGUF file whose view lies in `folder`; None for any other folder."""
    from g4tool.checkpoint.view import VIEW, gguf_source

    return gguf_source(folder) if (folder / VIEW).is_file() else None


def checkpoint_folder(artifact: Artifact) -> Path:
    """Where the files of a checkpoint artifact lie: its own folder, or where it refers to."""
    if "config.json" in artifact.external:
        return artifact.external["config.json"].parent
    return artifact.path


def copy_file(source: Path, target: Path) -> None:
    """Copy one small file; `Work.file` flushes and hashes it."""
    shutil.copyfile(source, target)


def tiny_model_of(files: Mapping[str, Mapping[str, Json]]) -> str | None:
    """The tiny model that consists of exactly these files (name -> record with its SHA-256)."""
    from g4tool.checkpoint.tiny import tiny_folder
    from g4tool.files import sha256

    for name in TINY_MODELS:
        folder = tiny_folder(name)
        if files.keys() == {path.name for path in folder.iterdir()} and all(
            sha256(folder / file) == record["sha256"] for file, record in files.items()
        ):
            return name
    return None


def _unknown(model: str) -> str:
    near = difflib.get_close_matches(model, TINY_MODELS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"{model!r} is no folder, no Hub id (owner/name) and none of the tiny models "
        f"{', '.join(TINY_MODELS)}.{hint}"
    )
