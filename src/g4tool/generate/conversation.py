"""A model, its tokenizer and what has been said so far."""

from bisect import bisect_left
from collections.abc import Callable

from g4tool.generate.channels import ChannelFilter, Piece
from g4tool.generate.chat import ChatTemplate, encode_chat
from g4tool.generate.figures import Figures
from g4tool.generate.loop import LanguageModel, Session, check_prompt
from g4tool.generate.sampler import GREEDY, Sampling
from g4tool.generate.tokenizer import Tokenizer

Write = Callable[[Piece], None]

_Messages = list[dict[str, str]]


def _ignore(_: str) -> None:
    """Nobody wants to know."""


class Conversation:
    """Turns with one model. Without a template every prompt stands alone, as raw text.

    What the cache holds is used again where a turn's prompt continues it; see `Session`.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        system: str | None = None,
        thinking: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.thinking = thinking
        self.messages: _Messages = [{"role": "system", "content": system}] if system else []
        self.figures = Figures()
        self._session: Session | None = None

    def say(
        self,
        prompt: str,
        write: Write,
        sampling: Sampling = GREEDY,
        max_new_tokens: int = 512,
        note: Callable[[str], None] = _ignore,
    ) -> str:
        """Answer `prompt`: each piece of text goes to `write` as it comes; returns the answer.

        Where the model's context has no room left, the oldest turns are forgotten, which `note` is
        told; the system message stays. Raises G4Error for a prompt that even alone leaves no room
        for an answer, and leaves the conversation as it was before the turn whenever the turn does
        not end.
        """
        turn, ids = self._fitting({"role": "user", "content": prompt}, max_new_tokens, note)
        session = self._session_for(len(ids) + max_new_tokens)
        steps = session.generate(
            [ids],
            sampling=sampling,
            end_ids=self.tokenizer.end_ids,
            max_new_tokens=max_new_tokens,
        )
        pieces = ChannelFilter(self.tokenizer)
        answer: list[str] = []

        def emit(found: list[Piece]) -> None:
            for piece in found:
                write(piece)
                if piece.channel is None:
                    answer.append(piece.text)

        for (token,) in steps:
            assert token is not None, "a batch of one ends with its only row"
            emit(pieces.push(token))
        emit(pieces.finish())
        text = "".join(answer)
        if self.template is not None:
            self.messages = [*turn, {"role": "assistant", "content": text}]
        return text

    def _fitting(
        self, message: dict[str, str], max_new_tokens: int, note: Callable[[str], None]
    ) -> tuple[_Messages, list[int]]:
        """The messages that fit, `message` last, and their ids.

        Raises G4Error when not even `message` alone does.
        """
        head = [each for each in self.messages[:1] if each["role"] == "system"]
        said = self.messages[len(head) :]
        limit = self.model.config.max_position_embeddings
        # An answer cut to a few tokens is worth less than the oldest turns.
        most = limit - min(max_new_tokens, limit // 2)

        def without(turns: int) -> tuple[_Messages, list[int]]:
            messages = [*head, *said[2 * turns :], message]
            return messages, self._encode(messages)

        turns, (messages, ids) = 0, without(0)
        if len(ids) > most and said:
            turns = bisect_left(
                range(len(said) // 2), True, lo=1, key=lambda turns: len(without(turns)[1]) <= most
            )
            messages, ids = without(turns)
        check_prompt(ids, limit - 1, self.model.config.vocab_size)
        if turns:
            note(
                f"the conversation no longer fits into the model's {limit} tokens: its oldest"
                f" {'turn is' if turns == 1 else f'{turns} turns are'} forgotten."
            )
        return messages, ids

    def _encode(self, messages: _Messages) -> list[int]:
        if self.template is None:
            return self.tokenizer.encode(messages[-1]["content"], bos=True)
        return encode_chat(self.tokenizer, self.template, messages, enable_thinking=self.thinking)

    def _session_for(self, length: int) -> Session:
        limit = self.model.config.max_position_embeddings
        if self._session is None or self._session.length < min(length, limit):
            # After the first turn twice the need, so that a chat rarely starts its cache anew.
            wanted = length if self._session is None else 2 * length
            self._session = Session(self.model, wanted)
            self._session.figures = self.figures
        return self._session
