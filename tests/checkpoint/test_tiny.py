import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, tiny_folder, write_tiny
from g4tool.errors import UsageError

# Parameters without the layer scalars, which are buffers.
COUNTS = {"tiny-31b": 2_805_312, "tiny-e2b": 3_141_280, "tiny-26b-a4b": 3_529_112}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<|channel>thought\nA greeting.<channel|>Hi!"},
    {"role": "user", "content": [{"type": "text", "text": "Bye "}]},
]


@pytest.mark.parametrize("name", TINY)
def test_transformers_gives_the_same_logits(name: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders[name]
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in theirs.parameters()) == COUNTS[name]
    ours = load_text_model(open_checkpoint(folder), torch.float32)
    ids = torch.randint(0, 4096, (2, 100), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected, got = theirs(ids).logits, ours(ids)
    assert expected.std() > 1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_every_weight_matters(tiny_folders: dict[str, Path]) -> None:
    """A loader that skips layer scalars, router scales or expert scales gives other logits."""
    ids = torch.randint(0, 4096, (1, 40), generator=torch.Generator().manual_seed(4))
    model = load_text_model(open_checkpoint(tiny_folders["tiny-26b-a4b"]), torch.float32)
    with torch.inference_mode():
        logits = model(ids)
        for skipped in ("layer_scalar", "router.scale", "router.per_expert_scale"):
            value = model.state_dict()[f"layers.1.{skipped}"]
            kept = value.clone()
            value.fill_(1)
            assert (model(ids) - logits).abs().max() > 0.01, skipped
            value.copy_(kept)
        assert model(ids).equal(logits)


def test_the_three_fit_in_the_package() -> None:
    sizes = {n: sum(p.stat().st_size for p in tiny_folder(n).iterdir()) for n in TINY}
    assert max(sizes.values()) <= 8_000_000
    assert sum(sizes.values()) <= 20_000_000


@pytest.mark.parametrize("name", TINY)
def test_the_layout_is_the_published_one(name: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders[name]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    assert "lm_head.weight" not in index["weight_map"]
    assert "model.layers.0.layer_scalar" in index["weight_map"]
    assert (name == "tiny-26b-a4b") == ("model.layers.0.experts.down_proj" in index["weight_map"])
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 106, 50]
    config = json.loads((folder / "config.json").read_text())
    assert config["global_head_dim"] == 64
    assert "per_layer_config" not in config


def test_an_unknown_name_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'tiny-4b'; the names are tiny-31b"):
        write_tiny("tiny-4b", tmp_path)


TEXTS = [
    "Hello, what's the capital of France? It is Paris.",
    "two  spaces,   three, and a trailing one ",
    "\n\n\nruns\n\nof newlines \n \n",
    "def f(x):\n    return {x: [1, 22, 333]}\t# tab",
    "grüße, naïve café, 日本語, Ελληνικά, עברית",
    "emoji \U0001f600\U0001f469\u200d\U0001f680 and \x00 \x7f control",
    "<0x41> is text and <unused3> too",
    "x" * 3000,
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_the_text_back(text: str, tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["tiny-31b"]
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ids.count(107) == text.count("\n")
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids


def test_control_tokens_have_gemma_4s_ids(tiny_folders: dict[str, Path]) -> None:
    theirs = AutoTokenizer.from_pretrained(tiny_folders["tiny-e2b"])
    text = "<bos><|turn>user\nhi<turn|>\n<|channel>thought<channel|><|think|><eos><pad>"
    hi = theirs("hi")["input_ids"]
    user, thought = theirs("user")["input_ids"], theirs("thought")["input_ids"]
    expected = [2, 105, *user, 107, *hi, 106, 107, 100, *thought, 101, 98, 1, 0]
    assert theirs(text)["input_ids"] == expected
    ids = theirs.convert_tokens_to_ids(["<|tool>", "<|tool_response>", '<|"|>', "<unk>", "<mask>"])
    assert ids == [46, 50, 52, 3, 4]
    assert len(theirs) == 4096
    listed = {"<|turn>", "<|channel>", "<|image|>"}
    assert listed <= set(theirs.all_special_tokens)


def test_chat_template(tiny_folders: dict[str, Path]) -> None:
    large = AutoTokenizer.from_pretrained(tiny_folders["tiny-31b"])
    small = AutoTokenizer.from_pretrained(tiny_folders["tiny-e2b"])
    turns = (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n"
        "<|turn>model\nHi!<turn|>\n<|turn>user\nBye<turn|>\n"
    )
    empty = "<|channel>thought\n<channel|>"
    prompt = {"tokenize": False, "add_generation_prompt": True}
    assert large.apply_chat_template(CHAT, tokenize=False) == turns
    assert large.apply_chat_template(CHAT, **prompt) == f"{turns}<|turn>model\n{empty}"
    assert small.apply_chat_template(CHAT, **prompt) == f"{turns}<|turn>model\n"
    thinking = turns.replace("system\n", "system\n<|think|>")
    for tokenizer in (large, small):
        text = tokenizer.apply_chat_template(CHAT, enable_thinking=True, **prompt)
        assert text == f"{thinking}<|turn>model\n"
    alone = small.apply_chat_template(CHAT[1:2], enable_thinking=True, tokenize=False)
    assert alone == "<bos><|turn>system\n<|think|><turn|>\n<|turn>user\nHello<turn|>\n"
    assert small.apply_chat_template(CHAT[1:2], tokenize=False) == (
        "<bos><|turn>user\nHello<turn|>\n"
    )
    image = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(Exception, match="takes text only, not image"):
        small.apply_chat_template(image, tokenize=False)
