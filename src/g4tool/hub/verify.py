"""Whether a downloaded file holds the bytes that the Hub announced."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from g4tool.files import sha256
from g4tool.hub.listing import RemoteFile

_SHA256_DIGITS = 64

HashFile = Callable[[Path], str]
"""A file's SHA-256 in hex. A caller that remembers hashes spares 62 GB of reading."""


def is_intact(file: RemoteFile, path: Path, hash_file: HashFile = sha256) -> bool:
    """Compares the size, and the hash where the Hub's is known."""
    if path.stat().st_size != file.size:
        return False
    if file.digest is None:
        return True
    if len(file.digest) == _SHA256_DIGITS:
        return hash_file(path) == file.digest
    return git_sha1(path.read_bytes()) == file.digest


def git_sha1(content: bytes) -> str:
    """The hash under which git stores a file: SHA-1 of "blob <size>", a zero byte, the content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
