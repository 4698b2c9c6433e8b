"""A model, its tokenizer and what has been said so far."""

from collections.abc import Callable

from g4tool.generate.channels import ChannelFilter, Piece
from g4tool.generate.chat import ChatTemplate, encode_chat
from g4tool.generate.figures import Figures
from g4tool.generate.loop import LanguageModel, Session
from g4tool.generate.sampler import GREEDY, Sampling
from g4tool.generate.tokenizer import Tokenizer

Write = Callable[[Piece], None]


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
        self.messages = [{"role": "system", "content": system}] if system else []
        self.figures = Figures()
        self._session: Session | None = None

    def say(
        self,
        prompt: str,
        write: Write,
        sampling: Sampling = GREEDY,
        max_new_tokens: int = 512,
    ) -> str:
        """Answer `prompt`: each piece of text goes to `write` as it comes; returns the answer.

        Raises G4Error for a prompt that leaves no room for an answer, and leaves the conversation
        as it was before the turn whenever the turn does not end.
        """
        turn = [*self.messages, {"role": "user", "content": prompt}]
        ids = self._encode(prompt, turn)
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

    def _encode(self, prompt: str, turn: list[dict[str, str]]) -> list[int]:
        if self.template is None:
            return self.tokenizer.encode(prompt, bos=True)
        return encode_chat(self.tokenizer, self.template, turn, enable_thinking=self.thinking)

    def _session_for(self, length: int) -> Session:
        limit = self.model.config.max_position_embeddings
        if self._session is None or self._session.length < min(length, limit):
            # After the first turn twice the need, so that a chat rarely starts its cache anew.
            wanted = length if self._session is None else 2 * length
            self._session = Session(self.model, wanted)
            self._session.figures = self.figures
        return self._session
