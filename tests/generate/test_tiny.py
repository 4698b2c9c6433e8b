"""The whole way from a checkpoint folder to text, against transformers' own classes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import write_tiny
from g4tool.generate.chat import encode_chat, load_chat_template
from g4tool.generate.loop import generate
from g4tool.generate.tokenizer import Tokenizer

TURNS = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "Why is the sea salt? " * 30},
    {"role": "assistant", "content": "Rivers carry salt."},
    {"role": "user", "content": "And \U0001f30a waves?"},
]


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_greedy_text_equals_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny(name, tmp_path)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    their_tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    model = load_text_model(open_checkpoint(tmp_path), torch.float32)

    chat = encode_chat(tokenizer, load_chat_template(tmp_path), TURNS)
    options = {"add_generation_prompt": True, "return_dict": False}
    assert chat == their_tokenizer.apply_chat_template(TURNS, **options)
    raw = tokenizer.encode(TURNS[1]["content"], bos=True)
    assert raw == [2, *their_tokenizer.encode(TURNS[1]["content"], add_special_tokens=False)]
    assert min(len(chat), len(raw)) > 4 * model.config.sliding_window

    for ids in (chat, raw):
        steps = generate(model, [ids], end_ids=tokenizer.end_ids, max_new_tokens=24)
        ours = [token for (token,) in steps if token is not None]
        tensor = torch.tensor([ids])
        theirs = reference.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=24, do_sample=False
        )[0, len(ids) :].tolist()
        assert ours == theirs
        stream = tokenizer.stream()
        text = "".join([*map(stream.push, ours), stream.finish()])
        assert text == their_tokenizer.decode(theirs)
