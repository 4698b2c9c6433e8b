"""Makes the tokenizer of the tiny models from the training text.

The kind is Gemma 4's: BPE with byte fallback over text whose spaces are "▁", control tokens at
Gemma 4's ids where the vocabulary of 4096 has them. Its media tokens lie beyond, so they take the
last ids here. No merge touches a newline, because llama.cpp splits there.
"""

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 4096
BOS, NEWLINE = 2, 107
FIRST_BYTE = 238
SPECIAL = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": BOS,
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


def learn(texts: Iterable[str], count: int) -> tuple[list[str], list[tuple[str, str]]]:
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
        vocab_size=count,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),  # other letters are spelt in bytes
        show_progress=False,
        special_tokens=[],
    )
    trainer.train_from_iterator(texts, settings)
    model = json.loads(trainer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [(left, right) for left, right in model["merges"]]


def build(texts: Iterable[str]) -> Tokenizer:
    """The whole tokenizer, its merges learned from `texts`."""
    vocab = {**SPECIAL, "\n": NEWLINE}
    vocab.update((f"<0x{byte:02X}>", FIRST_BYTE + byte) for byte in range(256))
    taken = set(vocab.values())
    unused = [i for i in range(NEWLINE) if i not in taken]
    vocab.update((f"<unused{number}>", i) for number, i in enumerate(unused))
    free = [i for i in range(NEWLINE, VOCAB_SIZE) if i not in taken]
    runs = [left + right for left, right in SPACES]
    tokens, merges = learn(texts, len(free) - len(runs))
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
