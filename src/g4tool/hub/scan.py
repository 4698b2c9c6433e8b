"""Nothing of this machine leaves it: looks for paths, names and tokens in what is published."""

import platform
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from g4tool.errors import G4Error

_BLOCK = 1 << 22
# Longer than any mark or any path of interest.
_OVERLAP = 1 << 10
# A vocabulary holds every word, paths among them.
_VOCABULARIES = {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"}
_SHORTEST = 6

_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
# Whether to look closer: a program may be 20 GB.
_HINTS = (b"/home/", b"/Users/", b"\\Users", b"/root/")
_HOMES = re.compile(rb"(?:/home|/Users)/[\w.-]+/|[A-Za-z]:\\{1,2}Users\\{1,2}[\w.-]+|/root/[\w.-]")


def machine_marks(folders: Iterable[Path] = ()) -> dict[bytes, str]:
    """What may stand in no published file, and what it is.

    The home folder, the current one and those given (the store's, say), this machine's name, and
    the login's token.
    """
    from huggingface_hub import get_token

    marks = {}
    places = (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), *folders)
    for place in {*places, *(each.resolve() for each in places)}:
        # "/" and "/tmp" also stand in texts that are no machine's.
        if len(text := f"{place}/") >= _SHORTEST and len(place.parts) > 1:
            marks[text.encode()] = "a path of this machine"
    if len(name := platform.node()) >= 2 * _SHORTEST:
        marks[name.encode()] = "this machine's name"
    if token := get_token():
        marks[token.encode()] = "an access token"
    return marks


def check_file(name: str, path: Path, marks: Mapping[bytes, str]) -> None:
    """Raise G4Error, with the kind of thing and never the thing itself, where a mark is found.

    Of safetensors files the header is read: the rest is numbers.
    """
    words = Path(name).name in _VOCABULARIES
    marks = {m: kind for m, kind in marks.items() if not words or kind == "an access token"}
    with path.open("rb", buffering=0) as file:
        limit = (
            8 + int.from_bytes(file.read(8), "little") if name.endswith(".safetensors") else None
        )
        file.seek(0)
        tail = b""
        while block := file.read(_BLOCK if limit is None else min(_BLOCK, limit - file.tell())):
            kind = _find(tail + block, marks, words)
            if kind:
                raise G4Error(
                    f"{name} holds {kind}, which must not be published: remove it from {path} or"
                    " leave the file out."
                )
            tail = block[-_OVERLAP:]


def _find(text: bytes, marks: Mapping[bytes, str], words: bool) -> str | None:
    for mark, kind in marks.items():
        if mark in text:
            return kind
    if b"hf_" in text and _TOKEN.search(text):
        return "an access token"
    if not words and any(hint in text for hint in _HINTS) and _HOMES.search(text):
        return "a path of somebody's home folder"
    return None
