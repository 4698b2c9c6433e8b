import random

from tiny import chat, pack
from tiny.corpus import Corpus
from tiny.packages import Entry

STORY = [f"The lion number {name} lay down under a tree." for name in "abcdefghijkl"]
TEXT = Corpus(
    train={"stories": [STORY], "bible": []},
    entries=[
        Entry("lion", "n", "a large cat of Africa (a beast)", ()),
        Entry("run", "v", "go fast", ()),
    ],
    countries={"France": ["France is in Europe. It has many rivers."]},
)


def test_answers_come_from_the_text_and_repeat() -> None:
    found = chat.exchanges(TEXT)
    assert found == chat.exchanges(TEXT)
    about = [answer for question, answer in found if "lion" in question and "mean" not in question]
    assert about
    assert all(part in " ".join(STORY) for part in about)
    assert ("France is in Europe. It has many rivers.") in [answer for _, answer in found]


def test_meanings_drop_asides() -> None:
    answers = [answer for _, answer in chat.meanings(TEXT.entries, random.Random(0))]
    assert answers == ['The word "lion" means a large cat of Africa.']


def test_rendered_ends_the_turn_and_differs_by_size() -> None:
    (large,) = pack.rendered([("Hi!", "Hello!")], "chat-large")
    (small,) = pack.rendered([("Hi!", "Hello!")], "chat-small")
    head = "<bos><|turn>user\nHi!<turn|>\n<|turn>model\n"
    assert small == f"{head}Hello!<turn|>\n"
    assert large == f"{head}<|channel>thought\n<channel|>Hello!<turn|>\n"
