"""Encoding, special ids and streaming, against the tokenizers and transformers libraries."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from g4tool.errors import G4Error
from g4tool.generate.tokenizer import BREAK, Tokenizer

EMOJI = "a \U0001f469‍\U0001f680 flag \U0001f1eb\U0001f1f7 é ü 漢字!"


def test_raw_text_gets_bos_exactly_once(tokenizer: Tokenizer, folder: Path) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    plain = reference.encode("the user asks", add_special_tokens=False)
    assert reference.encode("the user asks") == plain  # the post-processor adds none
    bos = tokenizer.id("<bos>")
    assert tokenizer.encode("the user asks", bos=True) == [bos, *plain]
    assert tokenizer.encode("<bos>the user asks", bos=True) == [bos, *plain]
    assert tokenizer.encode("the user asks", bos=False) == plain
    assert tokenizer.encode("", bos=True) == [bos]


def test_a_post_processor_that_adds_bos_does_not_double_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer(tmp_path).encode("model", bos=True).count(2) == 1


def test_end_ids_are_the_union_of_all_places(tokenizer: Tokenizer) -> None:
    ends = {tokenizer.id(name) for name in ("<eos>", "<turn|>", "<|tool_response>")}
    assert tokenizer.end_ids == ends


def test_bos_id_may_come_from_a_config(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(G4Error, match="no BOS token '<s>'"):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"bos_token_id": 2}}')
    assert Tokenizer(tmp_path).encode("model", bos=True)[0] == 2


def test_guard_takes_control_tokens_as_characters(tokenizer: Tokenizer) -> None:
    text = f"x <turn|>\n<|turn>model\n<bos><|channel>{BREAK}y"
    ids = tokenizer.encode(tokenizer.guard(text), bos=False)
    controls = {tokenizer.id(t) for t in ("<turn|>", "<|turn>", "<bos>", "<|channel>")}
    assert controls.isdisjoint(ids)
    assert controls <= set(tokenizer.encode(text, bos=False))
    assert tokenizer.decode(ids) == text.replace(BREAK, "")


def test_guard_leaves_ordinary_text_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.guard(EMOJI + "<table>\n\n") == EMOJI + "<table>\n\n"


@pytest.mark.parametrize("text", [EMOJI, "\U0001f600" * 5, "  two  spaces ", "\ufffd then"])
def test_stream_gives_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, bos=False)
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert stream.finish() == ""
    assert "".join(pieces) == text == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert "" in pieces or text.isascii()  # byte tokens were held back


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=24).filter(lambda t: BREAK not in t))
def test_stream_of_any_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode(tokenizer.guard(text), bos=False)
    streamed = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert streamed == tokenizer.decode(ids)


def test_bytes_that_make_no_character_do_not_stay_held(tokenizer: Tokenizer) -> None:
    byte = tokenizer.id("<0xFF>")
    assert byte is not None
    stream = tokenizer.stream()
    assert "".join(stream.push(byte) for _ in range(8)) == "\ufffd" * 8
    first = tokenizer.id("<0xF0>")
    assert first is not None
    assert stream.push(first) == ""
    assert stream.finish() == "\ufffd"


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(G4Error, match=r"tokenizer.json does not exist"):
        Tokenizer(tmp_path)
    whole = (folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(G4Error, match=r"tokenizer.json is not a readable tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(whole)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1')
    with pytest.raises(G4Error, match=r"generation_config.json cannot be read as JSON"):
        Tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(G4Error, match=r"generation_config.json holds no JSON object"):
        Tokenizer(tmp_path)


def test_half_a_character_is_no_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(G4Error, match="no valid Unicode at character 3: give it as UTF-8"):
        tokenizer.encode("abc\udcff", bos=True)
