"""Text to token ids and back, from a checkpoint folder's tokenizer.json.

Two rules of Gemma's tokenizer shape this file. Its post-processor adds no BOS, so raw text gets one
here, and text that already begins with one (a chat template's) gets no second. And it reads
`<|turn>` inside a text as the control token: right for text the caller wrote as a prompt, wrong for
what a user typed into a chat. `guard` makes control tokens in such text harmless.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from g4tool.errors import G4Error
from g4tool.generate.files import read_json

BREAK = "\U0010ffff"
"""Parts a text: nothing is merged across it and it leaves no token. A Unicode noncharacter."""

TURN_START, TURN_END = "<|turn>", "<turn|>"

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UTF8_LONGEST = 4


class Tokenizer:
    """The tokenizer of one checkpoint folder, with its special ids.

    `names`: the special tokens by role, as chat templates want them ("bos_token": "<bos>").
    `end_ids`: every id that ends a generation. Raises G4Error when a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._backend = _load(folder / "tokenizer.json")
        self.names = _names(read_json(folder / "tokenizer_config.json"))
        configs = [read_json(folder / "generation_config.json"), read_json(folder / "config.json")]
        configs += [c["text_config"] for c in configs if isinstance(c.get("text_config"), dict)]
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._bos(configs)
        self.end_ids = frozenset(self._ends(configs))
        self._controls = self._control_pattern()

    def id(self, token: str) -> int | None:
        """The id of a token by its exact text, None if the vocabulary lacks it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """The text of one vocabulary entry, as the vocabulary spells it."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def encode(self, text: str, bos: bool) -> list[int]:
        """Token ids of `text`; with `bos` they begin with BOS exactly once.

        Control tokens written in the text are read as such; see `guard`. Raises G4Error for text
        with half a character in it (a lone surrogate), which no UTF-8 can hold.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise G4Error(
                f"the text is no valid Unicode at character {error.start}: give it as UTF-8."
            ) from error
        ids: list[int] = []
        for part in text.split(BREAK):
            ids += self._backend.encode(part, add_special_tokens=False).ids
        if bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def guard(self, text: str) -> str:
        """`text` such that `encode` reads every control token in it as plain characters."""
        text = text.replace(BREAK, "")
        return self._controls.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of `ids`; `skip_special` leaves control tokens out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def stream(self) -> "TextStream":
        """A decoder for ids that come one at a time."""
        return TextStream(self)

    def _bos(self, configs: Sequence[Mapping[str, Any]]) -> int:
        name = self.names.get("bos_token", "<bos>")
        found = self.id(name)
        if found is None:
            found = next((i for c in configs for i in _ids(c.get("bos_token_id"))), None)
        if found is None:
            raise G4Error(
                f"{self.folder / 'tokenizer.json'}: the vocabulary has no BOS token {name!r} and no"
                " config names its id; Gemma needs one, so take the folder's original tokenizer."
            )
        return found

    def _ends(self, configs: Sequence[Mapping[str, Any]]) -> set[int]:
        named = (self.id(name) for name in (TURN_END, self.names.get("eos_token", "<eos>")))
        listed = {i for config in configs for i in _ids(config.get("eos_token_id"))}
        return listed | {i for i in named if i is not None}

    def _control_pattern(self) -> re.Pattern[str]:
        # Gemma also lists newline runs and HTML tags as added tokens: ordinary text, no control.
        added = self._backend.get_added_tokens_decoder().values()
        controls = {t.content for t in added if t.special or _control_shape(t.content)}
        longest_first = sorted((c for c in controls if len(c) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class TextStream:
    """Decodes ids one by one, in whole characters; `finish` gives what is still held back.

    Byte tokens (`<0xF0>` ...) are held until they make a character. Four that do not are no UTF-8
    and come out as replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The token before, since some decoders write a token otherwise at the start of a text.
        # Never a byte token: decoders judge a run of those as a whole.
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps none."""
        self._held.append(token_id)
        text = self._text()
        if text.endswith("\ufffd") and len(self._held) < _UTF8_LONGEST:
            return ""
        token = self._tokenizer.token(token_id) or ""
        self._before = [] if _BYTE_TOKEN.fullmatch(token) else [token_id]
        self._held = []
        return text

    def finish(self) -> str:
        """Whatever is held back; unfinished characters as replacement characters."""
        text = self._text()
        self._before, self._held = [], []
        return text

    def _text(self) -> str:
        before = len(self._tokenizer.decode(self._before))
        return self._tokenizer.decode(self._before + self._held)[before:]


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise G4Error(f"{path} does not exist: the folder has no tokenizer; download it whole.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise G4Error(f"{path} is not a readable tokenizer ({error}); fetch it again.") from error


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            names[key] = value
    return names


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if type(v) is int]


def _control_shape(token: str) -> bool:
    return token.startswith("<|") or token.endswith("|>")
