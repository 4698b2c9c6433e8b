"""Several turns with one model: caching, system message, thoughts, interrupts, a full context."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, write_tiny
from g4tool.errors import G4Error
from g4tool.generate.channels import Piece
from g4tool.generate.chat import load_chat_template
from g4tool.generate.conversation import Conversation
from g4tool.generate.tokenizer import Tokenizer
from g4tool.model.text import TextModel

TALK = ["Tell me about the sea.", "And the ships that sail on it?", "Thank you."]


def ignore(_: Piece) -> None:
    """Nobody reads along."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextModel, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny("tiny-e2b", folder)
    return load_text_model(open_checkpoint(folder), torch.float32), folder


def talk_to(tiny: tuple[TextModel, Path], system: str | None = None) -> Conversation:
    model, folder = tiny
    return Conversation(model, Tokenizer(folder), load_chat_template(folder), system)


class Scripted:
    """A model that says what it is told to, and notes the prompts that it is given."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Tokenizer, limit: int) -> None:
        config = TINY["tiny-31b"]
        self.config = replace(
            config, vocab_size=tokenizer.vocab_size, max_position_embeddings=limit
        )
        self.tokenizer = tokenizer
        self.script: Iterator[int] = iter(())
        self.fed: list[int] = []

    def say(self, text: str, stop: Iterable[str] = ("<turn|>",)) -> None:
        ids = self.tokenizer.encode(text, bos=False)
        ids += [found for each in stop if (found := self.tokenizer.id(each)) is not None]
        self.script = iter(ids)

    def hidden(
        self, input_ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor:
        at = 0 if start is None else int(start)
        self.fed = [*self.fed[:at], *input_ids[0].tolist()]
        return torch.zeros(*input_ids.shape, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        row = torch.zeros(self.config.vocab_size)
        row[next(self.script)] = 1
        return row.expand(*hidden.shape[:2], -1)

    def allocate_cache(self, *_: object) -> None:
        """There is nothing to remember."""

    def reset_cache(self) -> None:
        """Nor to forget."""

    def drop_cache(self) -> None:
        """Nor to free."""


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Scripted:
    return Scripted(tokenizer, 200)


def converse(scripted: Scripted, folder: Path, **options: object) -> Conversation:
    template = load_chat_template(folder)
    return Conversation(scripted, scripted.tokenizer, template, **options)  # type: ignore[arg-type]


def test_later_turns_equal_a_fresh_start_and_reuse_the_cache(
    tiny: tuple[TextModel, Path],
) -> None:
    going = talk_to(tiny)
    answers = [going.say(prompt, ignore, max_new_tokens=24) for prompt in TALK]
    assert len(set(answers)) > 1
    assert [m["content"] for m in going.messages] == [
        text for pair in zip(TALK, answers, strict=True) for text in pair
    ]

    fed = 0
    for turn in range(len(TALK)):
        fresh = talk_to(tiny)
        fresh.messages = going.messages[: 2 * turn]
        assert fresh.say(TALK[turn], ignore, max_new_tokens=24) == answers[turn]
        fed += fresh.figures.prefill_tokens
    assert going.figures.prefill_tokens < fed


def test_the_system_message_shapes_every_turn(scripted: Scripted, folder: Path) -> None:
    conversation = converse(scripted, folder, system="numbers only")
    for prompt in ("one", "two"):
        scripted.say("1")
        conversation.say(prompt, ignore)
        seen = scripted.tokenizer.decode(scripted.fed)
        assert seen.startswith("<bos><|turn>system\nnumbers only<turn|>\n<|turn>user\n")
        assert seen.count("numbers only") == 1
    assert [m["role"] for m in conversation.messages] == ["system", *["user", "assistant"] * 2]


def test_thoughts_are_told_apart_and_not_remembered(scripted: Scripted, folder: Path) -> None:
    conversation = converse(scripted, folder, thinking=True)
    scripted.say("<|channel>thought\nthe answer is 2<channel|>numbers")
    pieces: list[Piece] = []
    assert conversation.say("1 and 1", pieces.append) == "numbers"
    assert "".join(p.text for p in pieces if p.channel == "thought") == "the answer is 2"
    assert "".join(p.text for p in pieces if p.channel is None) == "numbers"
    assert "<|think|>" in scripted.tokenizer.decode(scripted.fed)
    assert conversation.messages[-1] == {"role": "assistant", "content": "numbers"}


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_interrupted_turn_leaves_no_trace(tiny: tuple[TextModel, Path], after: int) -> None:
    conversation = talk_to(tiny)
    first = conversation.say(TALK[0], ignore, max_new_tokens=8)
    before = list(conversation.messages)
    pieces: list[Piece] = []

    def stop(piece: Piece) -> None:
        pieces.append(piece)
        if len(pieces) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.say("What do you know of rivers?", stop, max_new_tokens=24)
    assert conversation.messages == before

    undisturbed = talk_to(tiny)
    assert undisturbed.say(TALK[0], ignore, max_new_tokens=8) == first
    expected = undisturbed.say(TALK[1], ignore, max_new_tokens=24)
    assert conversation.say(TALK[1], ignore, max_new_tokens=24) == expected


def test_the_oldest_turns_go_when_the_context_is_full(scripted: Scripted, folder: Path) -> None:
    conversation = converse(scripted, folder, system="numbers")
    notes: list[str] = []
    prompts = [f"question {number} " + "the model " * 12 for number in range(9)]
    for prompt in prompts:
        scripted.say("a thought")
        assert conversation.say(prompt, ignore, max_new_tokens=20, note=notes.append) == "a thought"
        seen = scripted.tokenizer.decode(scripted.fed)
        assert "system\nnumbers" in seen
        assert prompt.strip() in seen
        assert len(scripted.fed) <= 200
    assert len(notes) > 2
    assert notes[0] == (
        "the conversation no longer fits into the model's 200 tokens: its oldest turn is forgotten."
    )
    # As many as fit are kept, in whole turns, the latest ones.
    kept = [m["content"] for m in conversation.messages if m["role"] == "user"]
    assert kept == prompts[-len(kept) :]
    assert 1 < len(kept) < 9
    assert [m["role"] for m in conversation.messages][:3] == ["system", "user", "assistant"]


def test_a_long_turn_may_push_out_all_before_it(scripted: Scripted, folder: Path) -> None:
    conversation = converse(scripted, folder)
    notes: list[str] = []
    for prompt in ("the model " * 12, "a question " * 12):
        scripted.say("1")
        conversation.say(prompt, ignore, max_new_tokens=4, note=notes.append)
    assert notes == []
    scripted.say("2")
    long = "1 " * 160
    conversation.say(long, ignore, max_new_tokens=4, note=notes.append)
    assert [m["content"] for m in conversation.messages] == [long, "2"]
    assert notes == [
        "the conversation no longer fits into the model's 200 tokens: its oldest 2 turns are"
        " forgotten."
    ]


def test_a_turn_too_long_by_itself_is_refused_and_the_chat_goes_on(
    scripted: Scripted, folder: Path
) -> None:
    conversation = converse(scripted, folder)
    scripted.say("1")
    conversation.say("one", ignore, max_new_tokens=4)
    before, session = list(conversation.messages), conversation._session
    notes: list[str] = []
    with pytest.raises(G4Error, match=r"tokens and there is room for 199 and an answer"):
        conversation.say("1 " * 300, ignore, max_new_tokens=4, note=notes.append)
    assert conversation.messages == before
    assert conversation._session is session
    assert notes == []
    scripted.say("2")
    assert conversation.say("two", ignore, max_new_tokens=4) == "2"


def test_without_a_template_every_prompt_stands_alone(scripted: Scripted) -> None:
    conversation = Conversation(scripted, scripted.tokenizer, None)
    for prompt in ("the user asks", "a question"):
        scripted.say("1", stop=["<eos>"])
        assert conversation.say(prompt, ignore, max_new_tokens=4) == "1"
        assert scripted.tokenizer.decode(scripted.fed).startswith(f"<bos>{prompt}")
    assert conversation.messages == []
