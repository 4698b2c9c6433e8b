"""The model's words sorted while they stream: the answer, and what it says in a channel.

Gemma 4 thinks in a channel of its own: `<|channel>thought\\n...<channel|>answer<turn|>`. Markers
are single tokens, so they are told from text by id, and text that merely looks like one is text.
"""

from collections.abc import Collection
from dataclasses import dataclass

from g4tool.generate.tokenizer import TURN_END, TURN_START, Tokenizer

CHANNEL_START, CHANNEL_END = "<|channel>", "<channel|>"


@dataclass(frozen=True)
class Piece:
    """A bit of text; `channel` is the name of its channel ("thought"), None for the answer."""

    text: str
    channel: str | None = None


class ChannelFilter:
    """Takes ids as they come and gives pieces of text, without turn, end and channel markers.

    A channel's name runs to the first line break. A channel that is never closed stays a channel;
    opening one inside another begins the new one; a stray end marker is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int] | None = None) -> None:
        self._start = tokenizer.id(CHANNEL_START)
        self._end = tokenizer.id(CHANNEL_END)
        ends = tokenizer.end_ids if end_ids is None else end_ids
        pad = tokenizer.id(tokenizer.names.get("pad_token", "<pad>"))
        turns = (tokenizer.id(TURN_START), tokenizer.id(TURN_END), tokenizer.bos_id, pad)
        self._dropped = {*ends, *(i for i in turns if i is not None)}
        self._stream = tokenizer.stream()
        self._channel: str | None = None
        self._name: str | None = None

    def push(self, token_id: int) -> list[Piece]:
        """What `token_id` completes, in order."""
        if token_id == self._start:
            pieces = self.finish()
            self._name = ""
            return pieces
        if token_id == self._end:
            pieces = self.finish()
            self._channel = None
            return pieces
        if token_id in self._dropped:
            return self._sort(self._stream.finish())
        return self._sort(self._stream.push(token_id))

    def finish(self) -> list[Piece]:
        """What is still held back, at the end of a generation or of a channel."""
        pieces = self._sort(self._stream.finish())
        if self._name is not None:
            self._channel, self._name = self._name.strip(), None
        return pieces

    def _sort(self, text: str) -> list[Piece]:
        if self._name is not None:
            name, line_break, text = (self._name + text).partition("\n")
            if not line_break:
                self._name = name
                return []
            self._channel, self._name = name.strip(), None
        return [Piece(text, self._channel)] if text else []
