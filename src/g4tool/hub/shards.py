"""A repository's shards fetched one at a time, when they are read, and dropped after.

Of every shard the header lies here from the beginning, in a file of the shard's size that is
otherwise a hole. What is read of it makes the whole shard come, verified; the least recently read
one makes room. A shard that the Hub's cache holds already is read where it lies.
"""

import os
import shutil
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.hub.download import default_cache
from g4tool.hub.failures import explained
from g4tool.hub.listing import RemoteFile, snapshot, wanted_files
from g4tool.hub.stall import taken_up_again
from g4tool.hub.transfer import bar_class
from g4tool.hub.verify import is_intact
from g4tool.progress import Progress, Report, silent

KEEP = 2
"""Shards on the disk at a time: a layer may lie in two."""

Check = Callable[[SafetensorsFile], None]


class Shards:
    """The shards of `repo` at a commit. `headers` has them as they are, but for their values, and
    the small files; `check` is asked about each one that has arrived."""

    def __init__(
        self,
        repo: str,
        commit: str,
        folder: Path,
        check: Check,
        report: Report = silent,
        keep: int = KEEP,
    ) -> None:
        """Fetch the small files and the headers. Raises G4Error as `hub.download` does."""
        self.headers = folder / "headers"
        self._repo, self._commit, self._check = repo, commit, check
        self._report, self._keep = report, keep
        self._whole = folder / "whole"
        self._open: OrderedDict[str, SafetensorsFile] = OrderedDict()
        self._users: dict[str, int] = {}
        self._lock = threading.RLock()
        cache = default_cache()
        self._cached = snapshot(cache, repo, commit)
        files = wanted_files(repo, commit, None, cache)
        self._files = {f.name: f for f in files if f.name.endswith(".safetensors")}
        self.headers.mkdir(parents=True, exist_ok=True)
        self._fetch([f for f in files if f.name not in self._files], self.headers)
        for file in self._files.values():
            self._fetch_header(file)

    def file(self, name: str) -> SafetensorsFile:
        """The shard `name`, of which nothing is fetched before it is read."""
        return _Streamed(self.headers / name, self)

    @contextmanager
    def whole(self, name: str) -> Iterator[SafetensorsFile]:
        """The shard with its values, which stays while this lasts."""
        with self._lock:
            if name not in self._open:
                self._make_room()
                self._open[name] = self._arrive(self._files[name])
            self._open.move_to_end(name)
            self._users[name] = self._users.get(name, 0) + 1
        try:
            yield self._open[name]
        finally:
            with self._lock:
                self._users[name] -= 1

    def close(self) -> None:
        """Give the files back and drop what lies here."""
        with self._lock:
            for name in list(self._open):
                self._drop(name)

    def _make_room(self) -> None:
        for name in list(self._open):
            if len(self._open) < self._keep:
                return
            if not self._users.get(name):
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._open.pop(name).close()
        (self._whole / name).unlink(missing_ok=True)

    def _arrive(self, file: RemoteFile) -> SafetensorsFile:
        path = self._cached / file.name
        if not path.is_file() or not is_intact(file, path):
            path = self._whole / file.name
            for other in self._whole.glob("*.safetensors"):  # left by a process that was killed
                if other.name != file.name and other.name not in self._open:
                    other.unlink()
            _check_space(file, self._whole)
            self._fetch([file], self._whole)
        opened = SafetensorsFile(path)
        with SafetensorsFile(self.headers / file.name) as header:
            if opened.header_sha256 != header.header_sha256:
                opened.close()
                raise G4Error(
                    f"{self._repo}: {file.name} has another header than it had at first: run this"
                    " again."
                )
        self._check(opened)
        return opened

    def _fetch(self, files: Sequence[RemoteFile], folder: Path) -> None:
        """Fetch files into `folder` where they are not there yet, and verify them."""
        from huggingface_hub import HfApi, hf_hub_download

        for file in files:
            path = folder / file.name
            if path.is_file() and is_intact(file, path):
                continue
            path.unlink(missing_ok=True)
            job = f"fetch {file.name}"

            def fetch(report: Report, file: RemoteFile = file, job: str = job) -> None:
                with explained(self._repo, self._commit, HfApi().endpoint):
                    hf_hub_download(
                        self._repo,
                        file.name,
                        revision=self._commit,
                        local_dir=folder,
                        tqdm_class=bar_class(job, 0, file.size, report),
                    )

            taken_up_again(fetch, self._report)
            self._report(Progress(job, file.size, file.size, "bytes"))
            if not is_intact(file, path):
                path.unlink(missing_ok=True)
                raise G4Error(
                    f"{self._repo}: {file.name} did not match the Hub's checksum and was removed:"
                    " run this again to fetch it anew."
                )

    def _fetch_header(self, file: RemoteFile) -> None:
        path = self.headers / file.name
        if path.is_file() and path.stat().st_size == file.size:
            return
        head = self._range(file.name, 0, 8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= file.size - 8:
            raise G4Error(f"{self._repo}: {file.name} is no safetensors file.")
        part = path.with_name(f".{file.name}.part")
        part.write_bytes(head + self._range(file.name, 8, length))
        os.truncate(part, file.size)
        part.replace(path)

    def _range(self, name: str, start: int, count: int) -> bytes:
        from huggingface_hub import HfApi, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        with explained(self._repo, self._commit, HfApi().endpoint):
            url = hf_hub_url(self._repo, name, revision=self._commit)
            bytes_wanted = {"Range": f"bytes={start}-{start + count - 1}"}
            answer = http_backoff("GET", url, headers={**build_hf_headers(), **bytes_wanted})
            hf_raise_for_status(answer)
        content: bytes = answer.content
        if len(content) != count:
            raise G4Error(
                f"{self._repo}: the Hub gave {len(content)} bytes of {name} where {count} were"
                " asked for: run this again later, or without --stream-source."
            )
        return content


class _Streamed(SafetensorsFile):
    """A shard whose header is here; its values are those of the whole one."""

    def __init__(self, path: Path, shards: Shards) -> None:
        self._shards = shards
        super().__init__(path)

    def _fill(self, buffer: memoryview, offset: int, name: str) -> None:
        with self._shards.whole(self.path.name) as whole:
            whole._fill(buffer, offset, name)


def _check_space(file: RemoteFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < file.size:
        raise G4Error(
            f"the disk of {folder} is too small for {file.name}: it needs {file.size / 1e9:.2f} GB"
            f" and has {free / 1e9:.2f} GB free; make room there and run this again."
        )
