"""A folder's files to a model repository, in one commit.

Large files are sent first, outside of any revision; the Hub keeps them by their hash, so that a run
that breaks off goes on where it was. The commit at the end names them all at once: until then
nobody sees anything, and after it everybody sees the whole.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from g4tool.errors import G4Error
from g4tool.formats.bundle import BUNDLE
from g4tool.hub.assemble import ATTRIBUTES, LocalFile
from g4tool.hub.failures import UnreachableError
from g4tool.hub.listing import RemoteFile, tree
from g4tool.hub.refusals import LOGIN, publishing
from g4tool.hub.verify import is_intact
from g4tool.progress import Progress, Report, silent

_BATCH = 5
"""Files sent at a time, each over its own connection."""


@dataclass(frozen=True)
class Remote:
    """What main holds."""

    commit: str
    private: bool
    files: tuple[RemoteFile, ...]

    @property
    def is_new(self) -> bool:
        """Whether nobody has put anything into it yet."""
        return all(file.name == ATTRIBUTES for file in self.files)

    @property
    def is_ours(self) -> bool:
        """Whether g4 published it."""
        return any(file.name == BUNDLE for file in self.files)


@dataclass(frozen=True)
class Published:
    """What came of it: `sent` and `removed` by name; both empty where all was there already."""

    repo: str
    commit: str
    url: str
    sent: tuple[str, ...]
    removed: tuple[str, ...]


def check_login(endpoint: str | None = None) -> None:
    """Raise G4Error where nobody is logged in: before hours of work for an upload."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise G4Error(f"publishing needs a login on the Hub: {LOGIN}, then run this again.")


def look(repo: str, endpoint: str | None = None) -> Remote | None:
    """What the repository holds now, None where there is none that this login may see."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi(endpoint=endpoint)
    with publishing(repo, api.endpoint):
        try:
            about = api.model_info(repo)
        except RepositoryNotFoundError as error:
            # The Hub answers 401 both for a repository that is not there and to a bad token.
            if error.response.status_code == 401:
                api.whoami()
            return None
        assert about.sha is not None
        return Remote(about.sha, bool(about.private), tuple(tree(repo, about.sha, endpoint)))


def differs(files: Sequence[LocalFile], remote: Remote) -> bool:
    """Whether publishing `files` would change weights or lineage that are there."""
    there = {file.name: file for file in remote.files}
    changed = any(
        file.name in there and not _same(file, there[file.name])
        for file in files
        if file.name == BUNDLE or file.name.endswith(".safetensors")
    )
    return changed or bool(_stale(files, there))


def upload(
    repo: str,
    files: Sequence[LocalFile],
    message: str,
    remote: Remote | None,
    private: bool = False,
    endpoint: str | None = None,
    report: Report = silent,
) -> Published:
    """Publish `files` as what main of `repo` holds, and verify what the Hub then has.

    `remote` is what `look` gave; where main has moved since, nothing is published. Files of other
    names stay, but for weights and folders that these replace. Raises G4Error; until the commit
    nothing is visible.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(endpoint=endpoint)
    with publishing(repo, api.endpoint):
        if remote is None:
            remote = _create(repo, private, endpoint)
        there = {file.name: file for file in remote.files}
        wanted = [f for f in files if f.name not in there or not _same(f, there[f.name])]
        stale = _stale(files, there)
        if wanted or stale:
            additions = [CommitOperationAdd(file.name, file.path) for file in wanted]
            for addition, file in zip(additions, wanted, strict=True):
                addition.upload_info.sha256 = bytes.fromhex(file.sha256)
            _send(repo, wanted, additions, endpoint, report)
            removals = [CommitOperationDelete(name) for name in stale]
            commit = _commit(
                repo, [*additions, *removals], message, remote.commit, files, stale, endpoint
            )
        else:
            commit = remote.commit
        _verify(repo, files, stale, commit, endpoint)
    url = f"{api.endpoint}/{repo}/tree/{commit}"
    return Published(repo, commit, url, tuple(f.name for f in wanted), tuple(stale))


def _create(repo: str, private: bool, endpoint: str | None) -> Remote:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi(endpoint=endpoint).create_repo(repo, private=private)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        # There is one after all; it may be another process's of this moment.
        if (found := look(repo, endpoint)) is not None and found.is_new:
            return found
        raise G4Error(
            f"the name {repo} is taken by a repository that this login may not see: publish under"
            " another name."
        ) from error
    found = look(repo, endpoint)
    if found is None:
        raise UnreachableError(f"{repo} was made but is not there yet: run this again.")
    return found


def _send(
    repo: str,
    files: Sequence[LocalFile],
    additions: Sequence[object],
    endpoint: str | None,
    report: Report,
) -> None:
    """Send what the Hub keeps by hash; it is asked first which of it is there."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from huggingface_hub.utils import enable_progress_bars as enable

    api = HfApi(endpoint=endpoint)
    total = sum(file.size for file in files)
    done = 0
    drawn = not are_progress_bars_disabled()
    disable_progress_bars()  # ours are enough
    try:
        for start in range(0, len(files), _BATCH):
            batch = files[start : start + _BATCH]
            report(Progress(f"upload {repo}", done, total, "bytes", batch[0].name))
            api.preupload_lfs_files(
                repo,
                additions[start : start + _BATCH],  # type: ignore[arg-type]
                num_threads=_BATCH,
                free_memory=False,
            )
            done += sum(file.size for file in batch)
    finally:
        if drawn:
            enable()
    report(Progress(f"upload {repo}", total, total, "bytes"))


def _commit(
    repo: str,
    operations: Iterable[object],
    message: str,
    parent: str,
    files: Sequence[LocalFile],
    stale: Sequence[str],
    endpoint: str | None,
) -> str:
    from huggingface_hub import HfApi, errors

    try:
        made = HfApi(endpoint=endpoint).create_commit(
            repo,
            operations,  # type: ignore[arg-type]
            commit_message=message,
            parent_commit=parent,
        )
    except errors.HTTPError:
        # The answer may have been lost after the commit was made.
        try:
            now = look(repo, endpoint)
        except G4Error:
            now = None
        if now is None or now.commit == parent or _wrong(files, stale, now.files):
            raise
        return now.commit
    return made.oid


def _verify(
    repo: str,
    files: Sequence[LocalFile],
    stale: Sequence[str],
    commit: str,
    endpoint: str | None,
) -> None:
    if wrong := _wrong(files, stale, tree(repo, commit, endpoint)):
        raise G4Error(
            f"{repo} at {commit[:12]} does not hold what was sent ({', '.join(wrong[:3])}): run"
            " this again to send it anew."
        )


def _wrong(
    files: Sequence[LocalFile], stale: Sequence[str], there: Sequence[RemoteFile]
) -> list[str]:
    held = {file.name: file for file in there}
    wrong = [f.name for f in files if f.name not in held or not _same(f, held[f.name])]
    return [*wrong, *(name for name in stale if name in held)]


def _same(file: LocalFile, remote: RemoteFile) -> bool:
    return is_intact(remote, file.path, lambda _: file.sha256)


def _stale(files: Sequence[LocalFile], there: Iterable[str]) -> list[str]:
    """Names to remove: weights that would lie beside ours, and what folders of ours held."""
    ours = {file.name for file in files}
    folders = {PurePosixPath(name).parts[0] for name in ours if "/" in name}
    return sorted(
        name
        for name in there
        if name not in ours
        and (
            PurePosixPath(name).parts[0] in folders
            if "/" in name
            else name.endswith((".safetensors", ".safetensors.index.json"))
        )
    )
