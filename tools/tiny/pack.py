"""The corpus as token ids: what travels to the machine that trains."""

from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer

from g4tool.generate.chat import ChatTemplate
from tiny.arrays import Ids
from tiny.chat import Exchange, exchanges
from tiny.corpus import Corpus, Documents
from tiny.export import chat_template
from tiny.tokenizer import BOS, NEWLINE

CHAT_KINDS = ("chat-large", "chat-small")
"""Conversations as the large models' template writes them (an empty thought) and the small's."""
DEV_CHATS = 400
_NAMES = {"bos_token": "<bos>"}


def pack(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Ids]:
    """Arrays `train/SOURCE`, `dev/SOURCE`, `held-out/SOURCE` of ids.

    A text document is <bos> and its paragraphs, each ended by a newline. A conversation is <bos>
    and its turns.
    """
    arrays: dict[str, Ids] = {}
    for source, texts in corpus.train.items():
        arrays[f"train/{source}"] = text_ids(tokenizer, texts)
        arrays[f"dev/{source}"] = text_ids(tokenizer, [corpus.dev[source]])
        arrays[f"held-out/{source}"] = text_ids(tokenizer, [corpus.held_out[source]])
    found = exchanges(corpus)
    for kind in CHAT_KINDS:
        arrays[f"dev/{kind}"] = chat_ids(tokenizer, found[:DEV_CHATS], kind)
        arrays[f"train/{kind}"] = chat_ids(tokenizer, found[DEV_CHATS:], kind)
    return arrays


def text_ids(tokenizer: Tokenizer, documents: Documents) -> Ids:
    """Ids of documents one after another."""
    return joined(
        np.concatenate(
            [
                np.asarray([BOS], dtype=np.uint16),
                *(
                    np.asarray([*encoding.ids, NEWLINE], dtype=np.uint16)
                    for encoding in tokenizer.encode_batch(paragraphs, add_special_tokens=False)
                ),
            ]
        )
        for paragraphs in documents
    )


def chat_ids(tokenizer: Tokenizer, found: Iterable[Exchange], kind: str) -> Ids:
    """Ids of conversations in the checkpoint's own chat format, one after another."""
    texts = list(rendered(found, kind))
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return joined(np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings)


def rendered(found: Iterable[Exchange], kind: str) -> Iterator[str]:
    """Each exchange through the shipped template, as prompt and answer appear when it runs."""
    template = ChatTemplate(chat_template(large=kind == "chat-large"))
    for question, answer in found:
        prompt = template.render([{"role": "user", "content": question}], names=_NAMES)
        yield f"{prompt}{answer}<turn|>\n"


def joined(pieces: Iterable[Ids]) -> Ids:
    """One array of all pieces."""
    return np.concatenate([np.zeros(0, dtype=np.uint16), *pieces])
