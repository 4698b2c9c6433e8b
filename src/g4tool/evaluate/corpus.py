"""Held-out text as windows of token ids.

A text is cut into runs of `length` tokens that do not overlap, and each run gets a BOS in front:
the model was never trained without one. So every token of the text is scored exactly once, from
what precedes it in its own window. A window spans several sliding windows, so that most tokens
are scored by layers that no longer see its start. The rest of a text is a shorter window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from g4tool.errors import G4Error, UsageError
from g4tool.generate.tokenizer import Tokenizer
from g4tool.model.config import TextConfig

# Sliding windows in a window.
SPAN = 8


@dataclass(frozen=True)
class Text:
    """A source of held-out text; `name` is its file's."""

    name: str
    content: str


@dataclass(frozen=True)
class Window:
    """Token ids that begin with BOS; `nbytes` is the UTF-8 size of the text after it."""

    source: str
    ids: tuple[int, ...]
    nbytes: int

    @property
    def scored(self) -> int:
        """How many tokens are predicted: all but BOS."""
        return len(self.ids) - 1


def shipped_texts() -> list[Text]:
    """The held-out texts that come with g4, in the order of their names."""
    folder = resources.files("g4tool.evaluate") / "data"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=lambda f: f.name)
    return [
        Text(file.name.removesuffix(".txt"), _decode(file.read_bytes(), file.name))
        for file in files
    ]


def read_text(path: Path) -> Text:
    """A text file. Raises UsageError when it is missing, G4Error when it is empty or not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    text = _decode(content, str(path))
    if not text.strip():
        raise G4Error(f"{path} is empty: there is nothing to predict.")
    return Text(path.name, text)


def window_length(config: TextConfig) -> int:
    """Tokens in a window, BOS not counted: eight sliding windows, or what the model can take."""
    return min(SPAN * config.sliding_window, config.max_position_embeddings - 1)


def cut(
    texts: Sequence[Text], tokenizer: Tokenizer, length: int, limit: int | None = None
) -> list[Window]:
    """Windows of `length` tokens from every text, in order.

    With a `limit` of tokens, whole windows spread evenly over all of the text are chosen. Raises
    G4Error when no text fills a window, UsageError when the limit is below one.
    """
    if limit is not None and limit < length:
        raise UsageError(f"{limit} tokens are less than one window of {length}: give more.")
    windows: list[Window] = []
    longest = 0
    for text in texts:
        ids = tokenizer.encode(text.content, bos=True)[1:]
        longest = max(longest, len(ids))
        runs = [ids[start : start + length] for start in range(0, len(ids), length)]
        for run in runs:
            nbytes = len(tokenizer.decode(run).encode())
            windows.append(Window(text.name, (tokenizer.bos_id, *run), nbytes))
    if longest < length:
        names = ", ".join(text.name for text in texts) or "no text"
        raise G4Error(
            f"{names}: {longest} tokens do not fill one window of {length}; give a longer text."
        )
    if limit is None or sum(window.scored for window in windows) <= limit:
        return windows
    return spread([window for window in windows if window.scored == length], limit // length)


def spread(windows: Sequence[Window], count: int) -> list[Window]:
    """`count` of the windows, or all, at even distances."""
    count = min(count, len(windows))
    return [windows[index * len(windows) // count] for index in range(count)]


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise G4Error(f"{where} is not UTF-8 text: byte {error.start} does not fit.") from None
