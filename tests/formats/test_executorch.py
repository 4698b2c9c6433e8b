"""The Gemma 4 31B example inside the executorch wheel reads our bundle and gives our logits."""

from pathlib import Path

import pytest
import torch
from executorch.examples.models.gemma4_31b import model as example
from executorch.extension.llm.export import load as loading
from torch import Tensor

from g4tool.formats.load import load_bundle
from g4tool.kernels.int4 import dequantize_int4
from g4tool.pipeline.store import Store
from g4tool.recipe.load import load_recipe
from g4tool.recipe.model import Rule
from g4tool.stages.build import build

LENGTH = 48  # past the window of 32
HEAD = {"embed_tokens.weight": ("lm_head.weight", False)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `g4 build tiny-31b` writes, with one kind of matrix at 8 bit in groups."""
    recipe = load_recipe("tiny-31b")
    assert recipe.quantize is not None
    rules = [Rule(match="v_proj", scheme="int8", group_size=32), *recipe.quantize.rules]
    quantize = recipe.quantize.model_copy(update={"rules": rules})
    stages = build(recipe.model_copy(update={"quantize": quantize}), "cpu").stages
    return Store(tmp_path_factory.mktemp("home")).ensure(stages[-1]).path


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
