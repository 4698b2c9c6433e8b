"""GGUF files as written here: read by the gguf package, and by our own reader."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from g4tool.checkpoint.gguf_config import config_metadata
from g4tool.checkpoint.gguf_names import gguf_name
from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.errors import G4Error
from g4tool.formats.gguf import file_type, plan_entries, type_counts, write_gguf
from g4tool.formats.load import load_bundle
from g4tool.formats.weights import open_weights
from g4tool.model.text import TextModel
from tests.formats.bundles import make_bundle

torch.set_num_threads(1)
IDS = torch.randint(0, 4096, (1, 70), generator=torch.Generator().manual_seed(3))


def write(source: Path, path: Path, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Write the file and return the entries."""
    weights = open_weights(source)
    entries = plan_entries(weights, dtype)
    metadata = {f"gemma4.{k}": v for k, v in config_metadata(weights.config).items()}
    ids = {f"tokenizer.ggml.{role}_token_id": number for role, number in (("bos", 2), ("eos", 1))}
    write_gguf(path, weights, entries, metadata | ids)
    weights.close()
    return dict(entries)


def values(path: Path) -> tuple[dict[str, Tensor], gguf.GGUFReader]:
    """What the package reads and decodes, by GGUF name."""
    reader = gguf.GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        decoded = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(decoded)
        assert decoded.shape == tuple(int(size) for size in reversed(tensor.shape))
    return found, reader


def logits(model: TextModel) -> Tensor:
    with torch.no_grad():
        return model(IDS)


@pytest.mark.parametrize("model", list(TINY))
def test_a_checkpoint_goes_there_and_back(model: str, tmp_path: Path) -> None:
    source, path = tiny_folder(model), tmp_path / "model.gguf"
    entries = write(source, path)
    checkpoint = open_checkpoint(source)
    found, reader = values(path)
    assert set(found) == {gguf_name(name) for name in checkpoint.names} | {"rope_freqs.weight"}
    for name in checkpoint.names:
        assert torch.equal(found[gguf_name(name)], checkpoint.read(name).float())
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["token_embd.weight"] == types["blk.0.attn_q.weight"] == "BF16"
    assert types["blk.0.attn_norm.weight"] == types["rope_freqs.weight"] == "F32"
    assert types.get("blk.0.ffn_gate_inp.weight", "F32") == "F32"
    assert file_type(entries) == gguf.LlamaFileType.MOSTLY_BF16
    factors = found["rope_freqs.weight"]
    assert factors.tolist() == [1.0] * 8 + [float(np.float32(1e30))] * 24

    back = open_checkpoint(path)
    assert back.config == checkpoint.config
    expected = logits(load_text_model(checkpoint, torch.float32))
    assert torch.equal(logits(load_text_model(back, torch.float32)), expected)


@pytest.mark.parametrize("model", list(TINY))
def test_a_bundle_goes_there_and_back(model: str, tmp_path: Path) -> None:
    bundle, path = tmp_path / "bundle", tmp_path / "model.gguf"
    meant = make_bundle(tiny_folder(model), bundle)
    entries = write(bundle, path)
    assert set(type_counts(entries)) == {"F32", "Q4_1", "Q8_0"}
    found, _ = values(path)
    checkpoint = open_checkpoint(tiny_folder(model))
    for name, entry in entries.items():
        error = (found[entry.name] - meant[name]).abs().max()
        if entry.kind == "Q4_1":
            steps = float(checkpoint.read(name).float().abs().max()) / 4
            assert 0 < entry.error < 0.01
            assert float(error) <= entry.error * steps
        else:
            assert float(error) == entry.error == 0.0
    expected = logits(load_bundle(bundle, torch.float32))
    moved = (logits(load_text_model(open_checkpoint(path), torch.float32)) - expected).abs().max()
    # fp16 of a block's minimum moves these logits, of up to 30, by hundredths.
    assert 0 < float(moved) < 0.05


def test_symmetric_int4_is_q4_0_and_exact(tmp_path: Path) -> None:
    bundle, path = tmp_path / "bundle", tmp_path / "model.gguf"
    make_bundle(tiny_folder("tiny-26b-a4b"), bundle)
    overwrite(bundle, "zero_point", 8.0)
    entries = write(bundle, path)
    assert set(type_counts(entries)) == {"F32", "Q4_0", "Q8_0"}
    assert max(entry.error for entry in entries.values()) == 0.0
    expected = logits(load_bundle(bundle, torch.float32))
    assert torch.equal(logits(load_text_model(open_checkpoint(path), torch.float32)), expected)


def overwrite(bundle: Path, part: str, value: float) -> None:
    """Make every value of a part of the int4 weights in a bundle's files `value`."""
    for path in sorted(bundle.glob("*.safetensors")):
        with SafetensorsFile(path) as file, path.open("r+b") as raw:
            for name, info in file.tensors.items():
                if name.endswith(part) and info.dtype == torch.bfloat16:
                    raw.seek(info.offset)
                    full = torch.full(info.shape, value, dtype=info.dtype)
                    raw.write(full.view(torch.uint8).numpy().tobytes())


def test_scales_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    bundle, path = tmp_path / "bundle", tmp_path / "model.gguf"
    make_bundle(tiny_folder("tiny-31b"), bundle)
    overwrite(bundle, "scale", 1e6)
    with pytest.raises(G4Error, match="half precision does not hold"):
        write(bundle, path)
    assert not list(tmp_path.glob("model*"))


def test_a_head_of_its_own_goes_along(tmp_path: Path) -> None:
    source, path = tmp_path / "untied", tmp_path / "model.gguf"
    source.mkdir()
    checkpoint = open_checkpoint(tiny_folder("tiny-31b"))
    tensors = {checkpoint.hf_name(name): checkpoint.read(name) for name in checkpoint.names}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, source / "model.safetensors")
    config = checkpoint.raw_config | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    assert write(source, path)["lm_head.weight"].name == "output.weight"
    back = open_checkpoint(path)
    assert not back.config.tie_word_embeddings
    assert torch.equal(back.read("lm_head.weight"), tensors["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_is_that_of_the_matrices(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    entries = write(tiny_folder("tiny-31b"), path, dtype)
    kinds = {"F32"} if dtype == torch.float32 else {"F16", "F32"}
    assert set(type_counts(entries)) == kinds
    checkpoint = open_checkpoint(path)
    source = open_checkpoint(tiny_folder("tiny-31b"))
    for name in source.names:
        assert torch.equal(checkpoint.read(name).float(), source.read(name).to(dtype).float())


def test_values_beyond_float16_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_weights(tiny_folder("tiny-31b"))
    entries = plan_entries(weights, torch.float16)
    read = weights.read
    monkeypatch.setattr(weights, "read", lambda *where: read(*where) * 1e6)
    with pytest.raises(
        G4Error, match=r"embed_tokens\.weight has values that float16 does not hold"
    ):
        write_gguf(tmp_path / "model.gguf", weights, entries, {})
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_weights(tiny_folder("tiny-31b"))
    entries = plan_entries(weights)
    read = weights.read

    def failing(name: str, part: str, start: int, stop: int) -> Tensor:
        if name.startswith("layers.3"):
            raise OSError(28, "No space left on device")
        return read(name, part, start, stop)

    monkeypatch.setattr(weights, "read", failing)
    with pytest.raises(G4Error, match=r"model\.gguf cannot be written: No space left on device"):
        write_gguf(tmp_path / "model.gguf", weights, entries, {})
    assert not list(tmp_path.iterdir())
