import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
)

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.materialize import materialize
from g4tool.checkpoint.reader import Checkpoint, open_checkpoint
from g4tool.checkpoint.tiny import TINY

VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
    "use_clipped_linears": True,
}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 32,
    "subsampling_conv_channels": [8, 4],
}
UNIFIED_VISION = {"mm_embed_dim": 128, "output_proj_dims": 128, "mm_posemb_size": 16}


def text_part(folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text())
    return {k: v for k, v in config.items() if k not in ("architectures", "dtype", "model_type")}


@pytest.fixture(params=["gemma4", "gemma4_unified"])
def multimodal(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_folders: dict[str, Path]
) -> tuple[Path, torch.nn.Module]:
    """A model with towers, saved by transformers in its own spelling, with random norms."""
    torch.manual_seed(5)
    if request.param == "gemma4":
        text = text_part(tiny_folders["tiny-e2b"])
        model = Gemma4ForConditionalGeneration(
            Gemma4Config(text_config=text, vision_config=VISION, audio_config=AUDIO)
        )
    else:
        text = text_part(tiny_folders["tiny-31b"])
        config = Gemma4UnifiedConfig(
            text_config=text, vision_config=UNIFIED_VISION, audio_config={"audio_embed_dim": 64}
        )
        model = Gemma4UnifiedForConditionalGeneration(config)
    language = model.model.language_model
    with torch.no_grad():
        for tensor in [*language.parameters(), *language.buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1 and not tensor.isinf().any():
                tensor.mul_(torch.rand_like(tensor) + 0.5)
    # The rotary tables were scaled as well: what counts is the model as it is reloaded.
    model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    return tmp_path / "saved", theirs.eval()


def assert_same_logits(checkpoint: Checkpoint, theirs: torch.nn.Module) -> None:
    ours = load_text_model(checkpoint, torch.float32)
    ids = torch.randint(8, 4000, (2, 70), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)


def test_multimodal_checkpoint_as_transformers_saves_it(
    multimodal: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    folder, theirs = multimodal
    checkpoint = open_checkpoint(folder)
    assert checkpoint.prefix == "model.language_model."
    assert checkpoint.extras
    checkpoint.check_finite()
    assert_same_logits(checkpoint, theirs)
    written = materialize(checkpoint, tmp_path / "new", shard_bytes=1_000_000)
    assert len([path for path in written if path.suffix == ".safetensors"]) > 2
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "new", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = theirs.state_dict()
    assert all(value.equal(expected[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("name", TINY)
def test_dtype_and_report(name: str, tiny_folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_folders[name])
    seen: list[int] = []
    model = load_text_model(checkpoint, report=lambda step: seen.append(step.done))
    state = model.state_dict()
    assert set(state) == set(checkpoint.names)
    for tensor, value in state.items():
        assert value.equal(checkpoint.read(tensor))
        assert not value.requires_grad
    assert not model.training
    assert seen[-1] == sum(value.nbytes for value in state.values())


PEAK = """
import dataclasses, re, sys, torch
from pathlib import Path
from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY
from g4tool.checkpoint.writer import write_checkpoint
from g4tool.files import write_json
torch.set_num_threads(1)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
folder, tiny = Path(sys.argv[1]), TINY["tiny-31b"]
layers = tuple(dataclasses.replace(x, intermediate_size=12288) for x in tiny.layers)
config = dataclasses.replace(tiny, hidden_size=512, layers=layers)
specs = {f"model.{k}": (torch.bfloat16, v) for k, v in text_tensors(config).items()}
write_checkpoint(folder, specs, lambda k, i, j: torch.ones(j - i, *specs[k][1][1:]))
write_json(folder / "config.json", to_hf_config(config))
before = peak()
model = load_text_model(open_checkpoint(folder))
size = sum(value.nbytes for value in model.state_dict().values()) >> 20
print(size, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's VmHWM")
def test_peak_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    out = subprocess.check_output([sys.executable, "-c", PEAK, tmp_path], text=True)
    size, grown = map(int, out.split())
    assert size > 200
    assert grown < size + 64
