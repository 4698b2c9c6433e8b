"""A model repository to this machine: what g4 needs of it, resumed and verified.

Files lie in the Hub's own cache, where every other tool finds them too, or in a folder of choice.
huggingface_hub fetches them, but takes a file of the right size for the right file, so every one is
hashed here, and one that is wrong is removed, so that the next run fetches it again. Within a run
it goes on where a connection broke; the next run goes on with the files that are not whole.
"""

import glob
import shutil
from collections.abc import Sequence
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.files import sha256, write_text
from g4tool.hub.failures import UnreachableError, explained
from g4tool.hub.listing import COMMIT, RemoteFile, repo_folder, snapshot, wanted_files
from g4tool.hub.stall import PATIENCE, taken_up_again
from g4tool.hub.transfer import bar_class
from g4tool.hub.verify import HashFile, is_intact
from g4tool.progress import Progress, Report, silent

_SPARE = 64 << 20
"""Bytes to leave free on the disk."""


def resolve(
    repo: str, revision: str = "main", *, endpoint: str | None = None, cache: Path | None = None
) -> str:
    """The commit (40 hex digits) that a branch, tag or commit of `repo` stands for.

    Without a network it is the one that the cache remembers. Raises G4Error where there is no such
    repository or revision, or it is gated.
    """
    if COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    folder = repo_folder(cache or default_cache(), repo)
    reference = folder / "refs" / revision
    api = HfApi(endpoint=endpoint)
    try:
        with explained(repo, revision, api.endpoint):
            commit = api.model_info(repo, revision=revision).sha
    except UnreachableError:
        known = reference.read_text().strip() if reference.is_file() else ""
        if not COMMIT.fullmatch(known):
            raise
        return known
    if commit is None:
        raise G4Error(f"the Hub names no commit for {repo} at {revision!r}: run this again later.")
    _remember(reference, folder, commit)
    return commit


def expected(
    repo: str, revision: str = "main", *, endpoint: str | None = None, cache: Path | None = None
) -> list[tuple[str, int]]:
    """Name and size in bytes of every file that `download` would leave on the disk."""
    cache = cache or default_cache()
    commit = resolve(repo, revision, endpoint=endpoint, cache=cache)
    return [(f.name, f.size) for f in wanted_files(repo, commit, endpoint, cache)]


def missing(
    repo: str, revision: str = "main", *, endpoint: str | None = None, cache: Path | None = None
) -> list[tuple[str, int]]:
    """Those of `expected` that the cache does not hold yet."""
    cache = cache or default_cache()
    commit = resolve(repo, revision, endpoint=endpoint, cache=cache)
    files = wanted_files(repo, commit, endpoint, cache)
    return [(f.name, f.size) for f in _absent(files, snapshot(cache, repo, commit))]


def download(
    repo: str,
    revision: str = "main",
    *,
    local_dir: Path | None = None,
    endpoint: str | None = None,
    cache: Path | None = None,
    report: Report = silent,
    hash_file: HashFile = sha256,
    patience: float = PATIENCE,
) -> Path:
    """Fetches what is missing, verifies everything, and returns the folder that holds it.

    The folder is the commit's snapshot in the Hub's cache, or `local_dir`. `hash_file` gives the
    SHA-256 of a file, for a caller that remembers it. A transfer that brings nothing for `patience`
    seconds is cut and taken up again. Raises G4Error when the Hub or the network refuses, the disk
    is too small, or a file is corrupt; what has arrived whole is kept.
    """
    cache = cache or default_cache()
    commit = resolve(repo, revision, endpoint=endpoint, cache=cache)
    files = wanted_files(repo, commit, endpoint, cache)
    folder = snapshot(cache, repo, commit) if local_dir is None else local_dir
    absent = _absent(files, folder)
    if absent:
        _check_space(repo, absent, folder)
    if absent or local_dir is not None:
        # A plain folder may hold another commit's files; the library looks and replaces those.
        _fetch(repo, commit, files, absent, local_dir, endpoint, cache, report, patience)
    _verify(repo, files, folder, hash_file, report)
    return folder


def default_cache() -> Path:
    """The Hub's own cache, where every other tool finds the files too."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _remember(reference: Path, folder: Path, commit: str) -> None:
    """Notes the revision's commit as huggingface_hub does, for a later run without a network.

    A note that points to files which are here is replaced only once those of the new commit are.
    """
    known = reference.read_text().strip() if reference.is_file() else ""
    if commit == known or (known and not (folder / "snapshots" / commit).is_dir()):
        return
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_text(reference, commit)
    except OSError:
        # A cache that one may only read is still good to read from.
        return


def _absent(files: Sequence[RemoteFile], folder: Path) -> list[RemoteFile]:
    return [file for file in files if not (folder / file.name).is_file()]


def _check_space(repo: str, absent: Sequence[RemoteFile], folder: Path) -> None:
    needed = sum(file.size for file in absent) + _SPARE
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise G4Error(
            f"the disk of {place} is too small for {repo}: it needs {needed / 1e9:.2f} GB and has"
            f" {free / 1e9:.2f} GB free; make room or set HF_HOME to a folder on a larger disk."
        )


def _fetch(
    repo: str,
    commit: str,
    files: Sequence[RemoteFile],
    absent: Sequence[RemoteFile],
    local_dir: Path | None,
    endpoint: str | None,
    cache: Path,
    report: Report,
    patience: float,
) -> None:
    from huggingface_hub import HfApi, snapshot_download

    job = f"download {repo}"
    total = sum(file.size for file in files)
    there = total - sum(file.size for file in absent)
    report(Progress(job, there, total, "bytes"))

    def fetch(report: Report) -> None:
        with explained(repo, commit, HfApi(endpoint=endpoint).endpoint):
            snapshot_download(
                repo,
                revision=commit,
                cache_dir=cache,
                local_dir=local_dir,
                endpoint=endpoint,
                allow_patterns=[
                    glob.escape(file.name) for file in (absent if local_dir is None else files)
                ],
                tqdm_class=bar_class(job, there, total, report),
            )

    taken_up_again(fetch, report, patience)
    report(Progress(job, total, total, "bytes"))


def _verify(
    repo: str, files: Sequence[RemoteFile], folder: Path, hash_file: HashFile, report: Report
) -> None:
    total = sum(file.size for file in files)
    done = 0
    corrupt = []
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise G4Error(f"{path} is missing after the download of {repo}: run this again.")
        report(Progress(f"verify {repo}", done, total, "bytes", file.name))
        if not is_intact(file, path, hash_file):
            corrupt.append(file.name)
        done += file.size
    report(Progress(f"verify {repo}", total, total, "bytes"))
    for name in corrupt:  # only now: two files of the same content share their bytes
        _remove(folder, name)
    if corrupt:
        raise G4Error(
            f"{repo}: {', '.join(corrupt)} did not match the Hub's checksum and"
            f" {'was' if len(corrupt) == 1 else 'were'} removed: run this again to fetch anew."
        )


def _remove(folder: Path, name: str) -> None:
    # In the Hub's cache the file is a link to a blob; in a plain folder a note beside says that it
    # is up to date.
    path = folder / name
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    note = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    note.unlink(missing_ok=True)
