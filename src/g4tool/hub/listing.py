"""Which files of a repository are wanted, their sizes, and what their contents must hash to."""

import fnmatch
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.hub.failures import UnreachableError, explained

COMMIT = re.compile(r"[0-9a-f]{40}")

WANTED = (
    *("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README.md"),
    "additional_chat_templates/*.jinja",
)
"""Of the top folder: weights, index, configs, tokenizer, templates, licence and card. Weights in
other formats, and folders such as onnx/ or original/, are copies of the same model."""

UNWANTED = ("consolidated*.safetensors",)

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class RemoteFile:
    """One file at one commit.

    `digest` in hex: SHA-256 (64 digits) of a large file, git's blob SHA-1 (40) of a small one; None
    where it is not known.
    """

    name: str
    size: int
    digest: str | None


def wanted_files(repo: str, commit: str, endpoint: str | None, cache: Path) -> list[RemoteFile]:
    """The files g4 needs of `repo` at a commit, by name.

    Without a network it is what the cache holds of that commit, if that is whole. Raises G4Error
    for a repository without safetensors weights, or that cannot be reached.
    """
    try:
        files = _ask(repo, commit, endpoint)
    except UnreachableError:
        files = _cached(snapshot(cache, repo, commit))
        if not files:
            raise
        return files
    chosen = [file for file in files if _is_wanted(file.name)]
    if not any(file.name.endswith(".safetensors") for file in chosen):
        raise _no_weights(repo, [file.name for file in files])
    return chosen


def snapshot(cache: Path, repo: str, commit: str) -> Path:
    """Where the Hub's cache keeps the files of one commit."""
    return repo_folder(cache, repo) / "snapshots" / commit


def repo_folder(cache: Path, repo: str) -> Path:
    """The folder of one model repository in the Hub's cache."""
    return cache / f"models--{repo.replace('/', '--')}"


def tree(repo: str, commit: str, endpoint: str | None) -> list[RemoteFile]:
    """Every file of `repo` at a commit, by name. Raises huggingface_hub's errors."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi(endpoint=endpoint).list_repo_tree(repo, recursive=True, revision=commit)
    return sorted(
        (
            RemoteFile(
                entry.path,
                entry.lfs.size if entry.lfs else entry.size,
                entry.lfs.sha256 if entry.lfs else entry.blob_id,
            )
            for entry in entries
            if isinstance(entry, RepoFile)
        ),
        key=lambda file: file.name,
    )


def _ask(repo: str, commit: str, endpoint: str | None) -> list[RemoteFile]:
    from huggingface_hub import HfApi

    with explained(repo, commit, HfApi(endpoint=endpoint).endpoint):
        return tree(repo, commit, endpoint)


def _cached(folder: Path) -> list[RemoteFile]:
    """The wanted files in a snapshot folder, [] unless its weights are whole.

    Each is a link to a blob named after the hash that the Hub gave for it; where the system has no
    links it is the file itself, and its hash is not known.
    """
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not _is_wanted(name):
            continue
        blob = path.resolve()
        digest = blob.name if _DIGEST.fullmatch(blob.name) else None
        files.append(RemoteFile(name, blob.stat().st_size, digest))
    return files if _whole(folder, {file.name for file in files}) else []


def _whole(folder: Path, names: set[str]) -> bool:
    if "config.json" not in names:
        return False
    if "model.safetensors" in names:
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return names.issuperset(index["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _is_wanted(name: str) -> bool:
    return any(_same_folder(name, p) and fnmatch.fnmatchcase(name, p) for p in WANTED) and not any(
        fnmatch.fnmatchcase(name, pattern) for pattern in UNWANTED
    )


def _same_folder(name: str, pattern: str) -> bool:
    # fnmatch's * also matches the slash.
    return name.count("/") == pattern.count("/")


def _no_weights(repo: str, names: Iterable[str]) -> G4Error:
    pickles = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in _PICKLES)]
    if pickles:
        return G4Error(
            f"{repo} has its weights only as pickles ({pickles[0]}), and loading one runs code, so"
            " g4 never does: take a repository with safetensors."
        )
    return G4Error(f"{repo} has no safetensors weights: take a repository that has them.")
