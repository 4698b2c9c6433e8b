"""GGUF files as a source, against files that the gguf package wrote and values that it decodes."""

import dataclasses
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from g4tool.checkpoint.gguf import GgufFile, open_gguf
from g4tool.checkpoint.gguf_config import check_expressible
from g4tool.checkpoint.gguf_header import read_header
from g4tool.checkpoint.gguf_names import canonical_name, gguf_name
from g4tool.checkpoint.gguf_small_files import small_files
from g4tool.checkpoint.gguf_tokenizer import tokenizer_metadata
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.names import hf_name
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error
from g4tool.generate.tokenizer import Tokenizer
from g4tool.model.config import LayerConfig, RopeConfig, TextConfig
from tests.checkpoint.gguf_files import add_metadata, foreign_gguf, foreign_name, text_of

KINDS = {
    r"layers\.0\..*(mlp\.down|o_proj)": "Q4_K",
    r"layers\.1\..*(mlp\.down|o_proj)": "Q6_K",
    "embed_tokens": "Q8_0",
    r"mlp\.gate": "Q4_0",
    r"mlp\.up|experts\.(gate|down)": "Q4_1",
    "q_proj": "F16",
    "k_proj": "BF16",
}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_folders: dict[str, Path]) -> bytes:
    """A GGUF file of tiny-e2b, to damage."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    foreign_gguf(path, tiny_folders["tiny-e2b"], {".*": "BF16"})
    return path.read_bytes()


@pytest.mark.parametrize("model", list(TINY))
def test_names_are_those_of_the_packages_table(model: str) -> None:
    for name in text_tensors(TINY[model]):
        key = foreign_name(hf_name(name, "model."), TINY[model].num_layers)
        assert gguf_name(name) == key
        assert canonical_name(key) == name


@pytest.mark.parametrize("model", list(TINY))
def test_every_type_reads_as_the_package_decodes_it(
    model: str, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    path = tmp_path / "model.gguf"
    kinds = {k: v for k, v in KINDS.items() if model == "tiny-31b" or v not in ("Q4_K", "Q6_K")}
    values = foreign_gguf(path, tiny_folders[model], kinds)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == TINY[model]
    assert set(values) == set(checkpoint.names)
    for name, expected in values.items():
        found = checkpoint.read(name)
        assert torch.equal(found.float(), torch.from_numpy(np.array(expected)))
        rows = checkpoint.info(name).rows
        middle = checkpoint.read(name, rows // 3, rows - rows // 3)
        assert torch.equal(middle, found[rows // 3 : rows - rows // 3])
    dtypes = {checkpoint.info(name).dtype for name in values if name.endswith("_proj.weight")}
    assert dtypes == {torch.float32, torch.float16, torch.bfloat16}
    checkpoint.check_finite()


def test_bytes_of_a_tensor_are_those_of_its_values(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    path = tmp_path / "model.gguf"
    foreign_gguf(path, tiny_folders["tiny-31b"], KINDS)
    with GgufFile(path) as file:
        for key in ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"):
            whole = file.read(key).reshape(-1).view(torch.uint8)
            part = torch.empty(1000, dtype=torch.uint8)
            file.read_bytes(key, 777, part)
            assert torch.equal(part, whole[777:1777])


def test_experts_in_two_halves_are_put_together(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    path = tmp_path / "model.gguf"
    source = open_checkpoint(tiny_folders["tiny-26b-a4b"])
    name = "layers.1.experts.gate_up_proj.weight"
    whole = source.read(name).float()
    gate, up = whole.chunk(2, dim=1)
    _rewrite(
        path,
        tiny_folders["tiny-26b-a4b"],
        drop="blk.1.ffn_gate_up_exps.weight",
        more={"blk.1.ffn_gate_exps.weight": gate, "blk.1.ffn_up_exps.weight": up},
    )
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read(name), whole)
    assert torch.equal(checkpoint.read(name, 2, 5), whole[2:5])

    _rewrite(
        path,
        tiny_folders["tiny-26b-a4b"],
        drop="blk.1.ffn_gate_up_exps.weight",
        more={"blk.1.ffn_up_exps.weight": up},
    )
    with pytest.raises(G4Error, match=r"blk\.1\.ffn_up_exps\.weight without the other one"):
        open_checkpoint(path)


def test_keys_and_values_that_a_layer_shares_are_dropped(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    path = tmp_path / "model.gguf"
    dead = {"blk.3.attn_k.weight": torch.ones(32, 128), "blk.3.attn_k_norm.weight": torch.ones(32)}
    foreign_gguf(path, tiny_folders["tiny-e2b"], {}, more=dead)
    checkpoint = open_checkpoint(path)
    assert checkpoint.dropped == {
        f"model.layers.3.self_attn.{key}.weight": "layer 3 reads the keys and values of 1"
        for key in ("k_proj", "k_norm")
    }


def test_the_tokenizer_comes_back(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    source = tiny_folders["tiny-31b"]
    path = tmp_path / "model.gguf"
    foreign_gguf(path, source, {})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(open_checkpoint(path).raw_config))
    for name, content in _small_files(path).items():
        (folder / name).write_text(content)
    ours, theirs = Tokenizer(folder), Tokenizer(source)
    text = text_of(source)
    assert ours.encode(text, bos=True) == theirs.encode(text, bos=True)
    assert ours.decode(ours.encode(text, bos=False)) == text
    assert (ours.bos_id, ours.end_ids) == (theirs.bos_id, theirs.end_ids)
    assert ours.names == theirs.names
    assert ours.guard("<|turn>") == theirs.guard("<|turn>")
    for name in ("chat_template.jinja", "generation_config.json"):
        assert _read(folder / name) == _read(source / name)


def _small_files(path: Path) -> dict[str, str]:
    vocab = open_checkpoint(path).config.vocab_size
    return small_files(path, read_header(path, texts=True).metadata, vocab)


def _read(path: Path) -> Any:
    text = path.read_text()
    if path.suffix != ".json":
        return text
    return {key: sorted(v) if isinstance(v, list) else v for key, v in json.loads(text).items()}


def test_token_types_are_those_of_llama_cpps_converter(tiny_folders: dict[str, Path]) -> None:
    found = tokenizer_metadata(tiny_folders["tiny-31b"], 4096 + 2)
    kinds = found["tokenizer.ggml.token_type"]
    assert [kinds[i] for i in (0, 5, 50, 100, 105, 238, 500, 4095, 4097)] == [
        *(3, 1, 4, 4, 3, 6, 1, 3, 5)
    ]
    assert found["tokenizer.ggml.tokens"][4096:] == ["[PAD4096]", "[PAD4097]"]
    assert found["tokenizer.ggml.merges"][:2] == ["▁ t", "h e"]
    ends = [found[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot", "eom")]
    assert ends == [1, 106, 50]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture is 'gemma3', but g4 reads"),
        ({"gemma4.block_count": None}, "gemma4.block_count is missing from the metadata"),
        ({"gemma4.block_count": 2**31}, "block_count is 2147483648, but the file has"),
        ({"gemma4.context_length": "long"}, "context_length is 'long', not a whole number"),
        ({"gemma4.attention.head_count": [8, 4, 8, 8, 8]}, "head_count is [8, 4, 8, 8, 8], not a"),
        ({"gemma4.attention.head_count_kv": [1, 1]}, "head_count_kv is no list of 5 numbers"),
        ({"gemma4.attention.shared_kv_layers": 1}, "would have layer 4 read the keys and values"),
        ({"gemma4.attention.shared_kv_layers": 9}, "9 of 5 layers cannot share keys"),
        ({"gemma4.attention.head_count_kv": 3}, "3 key-value heads, which do not divide"),
        ({"gemma4.rope.freq_base": -1.0}, "freq_base is -1.0, not a number above zero"),
        ({"tokenizer.ggml.bos_token_id": None}, "key tokenizer.ggml.bos_token_id is missing"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama', but g4 knows"),
        ({"tokenizer.ggml.merges": None}, "key tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has not one entry a token"),
        ({"tokenizer.ggml.tokens": ["a"] * 4097}, "tokens has 4097 tokens, but the model's"),
        ({"split.count": 3}, "is one of 3 files that make one model; join them first"),
        ({"general.alignment": 0}, "general.alignment is 0, not a number of bytes"),
    ],
)
def test_metadata_that_does_not_do(
    change: dict[str, Any], message: str, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    path = tmp_path / "model.gguf"
    foreign_gguf(path, tiny_folders["tiny-e2b"], {}, change=change)
    with pytest.raises(G4Error, match=re.escape(message)) as caught:
        _small_files(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"blk.0.ssm_a": torch.ones(4)}, "no Gemma 4 text model has the tensor blk.0.ssm_a"),
        ({"v.patch_embd.weight": torch.ones(4)}, "has the tensor v.patch_embd.weight"),
        ({"blk.9.attn_q.weight": torch.ones(4, 4)}, "nobody reads the tensor model.layers.9"),
    ],
)
def test_tensors_that_are_none_of_the_models(
    more: dict[str, torch.Tensor], message: str, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    path = tmp_path / "model.gguf"
    foreign_gguf(path, tiny_folders["tiny-e2b"], {}, more=more)
    with pytest.raises(G4Error, match=re.escape(message)):
        open_checkpoint(path)


def test_a_file_cut_short_is_noticed_wherever_it_is_cut(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 7, 23, 40, 900, 60_000, 155_000, len(small) // 2, len(small) - 1):
        path.write_bytes(small[:length])
        with pytest.raises(G4Error, match=r"truncated|not a GGUF file"):
            open_checkpoint(path)


def test_a_broken_header_is_one_error(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "broken.gguf"
    start = small.index(b"gemma4.block_count")
    entry = small.index(b"token_embd.weight") + len(b"token_embd.weight")
    for place, value, message in [
        (4, struct.pack("<I", 1), "GGUF version 1"),
        (4, struct.pack(">I", 3), "little-endian"),
        (8, struct.pack("<Q", 2**40), "more than any model has"),
        (start, b"gemma4.block\x07count", "a metadata key is 'gemma4.block\\x07count'"),
        (start, b"\xff", "a metadata key is not UTF-8 text"),
        (start + 18, struct.pack("<I", 99), "is of the type 99, which GGUF does not have"),
        (entry, struct.pack("<I", 7), "token_embd.weight has 7 dimensions"),
        (entry + 20, struct.pack("<I", 77), "token_embd.weight holds values of the type 77"),
        (entry + 20, struct.pack("<I", 4), "token_embd.weight holds values of the type 4"),
        (entry + 4, struct.pack("<Q", 100), "is truncated|asks for"),
        (entry + 24, struct.pack("<Q", 2**50), "token_embd.weight ends at byte"),
        (entry + 24, struct.pack("<Q", 32), "overlaps the tensor before it"),
    ]:
        path.write_bytes(small[:place] + value + small[place + len(value) :])
        with pytest.raises(G4Error, match=message.replace("\\", "\\\\")):
            open_checkpoint(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(G4Error, match=r"none\.gguf does not exist"):
        open_gguf(tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 not at all")
    with pytest.raises(G4Error, match="is not a GGUF file: it does not begin with GGUF"):
        open_checkpoint(other)


def test_the_package_is_asked_for_where_it_is_missing(
    tmp_path: Path, small: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(G4Error, match=re.escape("pip install 'g4tool[gguf]'")):
        open_checkpoint(path)


SLIDING = LayerConfig("sliding", 32, 1, 64)
FULL = LayerConfig("full", 64, 1, 64)


def config(*layers: LayerConfig, **more: Any) -> TextConfig:
    return TextConfig(64, 32, 2, layers, 8, 64, **more)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            config(SLIDING, FULL, FULL, dataclasses.replace(SLIDING, kv_source=0), FULL),
            "layer 3 read the keys and values of layer 2, not of layer 0",
        ),
        (config(FULL, FULL), "this model has full ones only"),
        (
            config(
                SLIDING, FULL, rope={"sliding": RopeConfig(1e4, 0.5), "full": RopeConfig(1e6, 0.25)}
            ),
            "rotates the whole head of a sliding layer",
        ),
        (
            config(SLIDING, FULL, per_layer_dim=8, per_layer_vocab_size=65),
            "has 65 and 64; it cannot be a GGUF file",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(model: TextConfig, message: str) -> None:
    with pytest.raises(G4Error, match=re.escape(message)):
        check_expressible(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["model"].update(type="Unigram"), "no tokenizer such as Gemma 4's"),
        (lambda raw: raw["model"].update(byte_fallback=False), "no tokenizer such as Gemma 4's"),
        (lambda raw: raw.update(normalizer=None), "no tokenizer such as Gemma 4's"),
        (lambda raw: raw["model"]["merges"].append(["a b", "c"]), "cannot be said in a GGUF"),
        (lambda raw: raw["model"]["vocab"].update(more=4096), "embedding has 4096 rows"),
    ],
)
def test_tokenizers_that_llama_cpp_would_read_otherwise(
    change: Any, message: str, tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    raw = json.loads((tiny_folders["tiny-31b"] / "tokenizer.json").read_text())
    change(raw)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(G4Error, match=re.escape(message)):
        tokenizer_metadata(tmp_path, 4096)


def _rewrite(path: Path, folder: Path, drop: str, more: dict[str, torch.Tensor]) -> None:
    """As `foreign_gguf` in F32, with one tensor less."""
    whole = path.with_name("whole.gguf")
    foreign_gguf(whole, folder, {}, more=more)
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(path, "gemma4")
    fields = {key: field.contents() for key, field in reader.fields.items()}
    add_metadata(writer, {k: v for k, v in fields.items() if not k.startswith("GGUF.")})
    for tensor in reader.tensors:
        if tensor.name != drop:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
