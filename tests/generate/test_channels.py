"""Thinking and answer told apart in a stream of ids."""

import itertools

import pytest

from g4tool.generate.channels import ChannelFilter, Piece
from g4tool.generate.tokenizer import Tokenizer


def _sorted(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str | None, str]]:
    channels = ChannelFilter(tokenizer)
    pieces: list[Piece] = [p for i in ids for p in channels.push(i)] + channels.finish()
    assert all(piece.text for piece in pieces)
    groups = itertools.groupby(pieces, key=lambda piece: piece.channel)
    return [(channel, "".join(p.text for p in group)) for channel, group in groups]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the answer<turn|>", [(None, "the answer")]),
        (
            "<|channel>thought\na thought\n\nmore<channel|>Paris!<turn|>",
            [("thought", "a thought\n\nmore"), (None, "Paris!")],
        ),
        ("<|channel>thought\n<channel|>Paris!", [(None, "Paris!")]),
        ("<|channel>thought<channel|>Paris!", [(None, "Paris!")]),
        ("<|channel>thought\nnever closed", [("thought", "never closed")]),
        ("<|channel>thought\ncut \U0001f600", [("thought", "cut \U0001f600")]),
        (
            "one<|channel>thought\na<channel|>two<|channel>plan\nb<channel|>three",
            [(None, "one"), ("thought", "a"), (None, "two"), ("plan", "b"), (None, "three")],
        ),
        (
            "<|channel>thought\na<|channel>plan\nb<channel|>c",
            [("thought", "a"), ("plan", "b"), (None, "c")],
        ),
        ("<channel|>stray", [(None, "stray")]),
        ("<|channel>", []),
        ("<bos>x<|turn>y<eos>z<pad>", [(None, "xyz")]),
        ("the model<|image|>", [(None, "the model<|image|>")]),
    ],
)
def test_channels(tokenizer: Tokenizer, text: str, expected: list[tuple[str | None, str]]) -> None:
    assert _sorted(tokenizer, tokenizer.encode(text, bos=False)) == expected


def test_pieces_split_at_every_character(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.id("<|channel>"), tokenizer.id("<channel|>")
    assert start is not None
    assert end is not None

    def letters(text: str) -> list[int]:
        return [i for letter in text for i in tokenizer.encode(letter, bos=False)]

    ids = [start, *letters("thought\nhm \U0001f600"), end, *letters("yes")]
    assert _sorted(tokenizer, ids) == [("thought", "hm \U0001f600"), (None, "yes")]


def test_a_marker_spelt_in_characters_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.guard("<|channel>thought\nx<channel|>y"), bos=False)
    assert _sorted(tokenizer, ids) == [(None, "<|channel>thought\nx<channel|>y")]


def test_half_a_character_before_a_marker_is_not_lost(tokenizer: Tokenizer) -> None:
    byte, end = tokenizer.id("<0xF0>"), tokenizer.id("<channel|>")
    assert byte is not None
    assert end is not None
    assert _sorted(tokenizer, [byte, end]) == [(None, "\ufffd")]
