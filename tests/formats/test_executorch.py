"""The Gemma 4 31B example inside the executorch wheel reads our bundle and gives our logits."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import write_tiny
from g4tool.formats.bundle import BUNDLE
from g4tool.formats.load import load_bundle
from g4tool.kernels.int4 import dequantize_int4
from g4tool.quantize.bundle import bundle_config, bundle_index, lineage
from g4tool.quantize.driver import quantize_unit, units
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.policy import plan

example = pytest.importorskip("executorch.examples.models.gemma4_31b.model")
loading = pytest.importorskip("executorch.extension.llm.export.load")

LENGTH = 48  # past the window of 32
HEAD = {"embed_tokens.weight": ("lm_head.weight", False)}


RULES = (
    Rule("embed_tokens", "int8"),
    Rule("v_proj", "int8", 32),
    Rule("norm|layer_scalar", "keep"),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `g4 quantize` writes, but for the tokenizer."""
    root = tmp_path_factory.mktemp("executorch")
    write_tiny("tiny-31b", root / "source")
    folder = root / "bundle"
    folder.mkdir()
    checkpoint = open_checkpoint(root / "source")
    options = QuantizeOptions(solver="rtn", rules=RULES)
    plans = plan(checkpoint, options)
    files = units(plans)
    accounts = [
        account for unit in files for account in quantize_unit(checkpoint, unit, folder / unit.file)
    ]
    texts = {
        "config.json": bundle_config(checkpoint, options, plans),
        "model.safetensors.index.json": bundle_index(files),
        BUNDLE: lineage(checkpoint, accounts, source={}, recipe={}, versions={}),
    }
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def their_logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits [S, vocab] of ids [S], one token at a time: their model keeps the last only."""
    config = example.Gemma4_31BConfig.from_hf_config(str(folder / "config.json"))
    config.max_seq_len = LENGTH
    with torch.device("meta"):
        model = example.Gemma4_31B(config)
    loading.load_checkpoint(
        str(folder),
        model,
        key_map=example._hf_to_model_key,
        tie_map=HEAD,
        dtype=torch.float32,
    )
    example.materialize_runtime_buffers(model, torch.float32)
    rows: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: rows.append(call[-1][0]))
    for position, token in enumerate(ids):
        model(token.view(1, 1), torch.tensor([position]), torch.tensor([1.0]))
    cap = config.final_logit_softcapping
    return torch.tanh(torch.stack(rows) / cap) * cap


def test_their_loader_and_model_give_our_logits(bundle: Path) -> None:
    ids = torch.randint(0, 4096, (LENGTH,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        ours = load_bundle(bundle, torch.float32)(ids[None])[0]
        theirs = their_logits(bundle, ids)
    assert ours.std() > 1
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-4)


def test_their_loader_reads_the_kinds_we_wrote(bundle: Path) -> None:
    found = dict(loading.iter_checkpoint(str(bundle), key_map=example._hf_to_model_key))
    kinds = {name: type(value).__name__ for name, value in found.items()}
    assert kinds["layers.0.self_attn.q_proj.weight"] == "ExportableInt4Tensor"
    assert kinds["layers.0.self_attn.v_proj.weight"] == "IntxUnpackedToInt8Tensor"
    assert kinds["embed_tokens.weight"] == "IntxUnpackedToInt8Tensor"
    assert kinds["norm.weight"] == "Tensor"
    ours = load_bundle(bundle, torch.float32).layers[3].mlp.down_proj
    theirs = found["layers.3.mlp.down_proj.weight"]
    assert torch.equal(
        theirs.dequantize(torch.float32),
        dequantize_int4(ours.qdata, ours.scale, ours.zero, torch.float32),
    )
