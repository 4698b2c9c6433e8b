"""Our GGUF files in llama.cpp itself, beside our own numbers.

llama.cpp comes as a wheel into an environment of its own, and so do the files of its converter:

    python -m venv ~/llama && ~/llama/bin/pip install xllamacpp==2026.10.11549
    G4_LLAMA_CPP_PYTHON=~/llama/bin/python pytest -s tests/formats/test_llama_cpp.py

`G4_LLAMA_CPP_SOURCE`, a checkout of llama.cpp, also compares with what its converter writes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.formats.load import load_bundle
from g4tool.generate.tokenizer import Tokenizer
from g4tool.model.embedding import Embedding
from g4tool.model.moe import ExpertLinear, Router
from g4tool.model.text import TextModel
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.store import Store
from g4tool.stages.gguf import FILE, GgufStage
from tests.formats.bundles import make_bundle

PYTHON = os.environ.get("G4_LLAMA_CPP_PYTHON", "")
SOURCE = os.environ.get("G4_LLAMA_CPP_SOURCE", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs G4_LLAMA_CPP_PYTHON, see the docstring"),
    pytest.mark.parametrize("model", list(TINY)),
]
NEW = 24
TIE = 2e-3
"""Scores of a router, up to 3.3 in the tiny model, count as equal when closer than this."""
TEXT = "The old man walked to the river, for he wanted to see the water and the ships. " * 12

Files = Callable[[Path, str | None], Path]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The GGUF file of a checkpoint's or bundle's folder, in a dtype."""
    store = Store(tmp_path_factory.mktemp("home"))
    return lambda folder, dtype: store.ensure(GgufStage(Source(folder), dtype)).path / FILE


def llama(path: Path, prompts: list[Any], folder: Path) -> list[dict[str, Any]]:
    """What llama.cpp makes of each prompt."""
    job, result = folder / "job.json", folder / "result.json"
    job.write_text(json.dumps({"model": str(path), "prompts": prompts, "new": NEW, "vocab": 4096}))
    worker = Path(__file__).with_name("llama_cpp_worker.py")
    ran = subprocess.run([PYTHON, worker, job, result], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def prompts(model: str) -> list[list[int]]:
    """One short, and one well past the sliding window."""
    ids = Tokenizer(tiny_folder(model)).encode(TEXT, bos=True)
    return [ids[:11], ids[:162]]


def logits(model: TextModel, prompt: list[int], new: list[int]) -> Tensor:
    """Ours at the places where llama.cpp chose `new`: [new, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1]


def nearest(model: TextModel, prompt: list[int], new: list[int], theirs: Tensor) -> Tensor:
    """`logits`, but where one router's choice was nearly a tie, perhaps those of the other choice.

    There llama.cpp's rounding may choose the other expert, which moves a token's logits by any
    amount. Each such tie is turned alone; the turn taken serves for all the tokens, and is named.
    """

    def off(rows: Tensor) -> float:
        return float((rows.log_softmax(-1) - theirs).abs().max())

    routers = {name: part for name, part in model.named_modules() if isinstance(part, Router)}
    scores: dict[str, Tensor] = {}
    hooks = [
        router.proj.register_forward_hook(lambda _, __, out, name=name: scores.update({name: out}))
        for name, router in routers.items()
    ]
    best, taken = logits(model, prompt, new), ""
    for hook in hooks:
        hook.remove()
    for name, router in routers.items():
        last, left_out = scores[name][0].topk(router.top_k + 1).values[:, -2:].unbind(-1)
        for at in (last - left_out < TIE).nonzero().flatten().tolist():
            turn = partial(turned, at=at, top_k=router.top_k)
            hook = router.proj.register_forward_hook(lambda _, __, out, turn=turn: turn(out))
            rows = logits(model, prompt, new)
            hook.remove()
            if off(rows) < off(best):
                gap = float(last[at] - left_out[at])
                best, taken = (
                    rows,
                    f"{name} at {at}, apart by {gap:.1g} of {scores[name].max():.2g}",
                )
    if taken:
        print(f"\na tie turned: {taken}")
    return best


def turned(scores: Tensor, at: int, top_k: int) -> Tensor:
    """A router's scores [1, S, experts]; at one place the last expert chosen and the next swap."""
    scores = scores.clone()
    pair = scores[0, at].topk(top_k + 1).indices[-2:]
    scores[0, at, pair] = scores[0, at, pair.flip(0)]
    return scores


def compare(model: TextModel, path: Path, name: str, folder: Path) -> tuple[float, float, float]:
    """Greatest difference of a log-probability, the same in quadratic mean, KL in nats.

    Where the best token leads by more than that difference, llama.cpp must have chosen it.
    """
    worst, squares, kl, same, count = 0.0, 0.0, 0.0, 0, 0
    rows = []
    for prompt, found in zip(prompts(name), llama(path, prompts(name), folder), strict=True):
        theirs = torch.tensor(found["logprobs"])
        rows.append((nearest(model, prompt, found["ids"], theirs), theirs, found["ids"]))
    for ours, theirs, _ in rows:
        off = ours.log_softmax(-1) - theirs
        worst = max(worst, float(off.abs().max()))
        squares += float(off.square().mean()) / len(rows)
        kl += float((ours.softmax(-1) * off).sum(-1).mean()) / len(rows)
    for ours, _, ids in rows:
        best, second = ours.topk(2, -1).values.T
        agree = ours.argmax(-1) == torch.tensor(ids)
        assert bool((agree | (best - second <= 2 * worst)).all())
        same, count = same + int(agree.sum()), count + len(ids)
    print(
        f"\n{name} {path.parent.name[:8]}: log-probabilities within {worst:.2g}, rms "
        f"{squares**0.5:.2g}, KL {kl:.2g}, {same} of {count} tokens the same"
    )
    return worst, squares**0.5, kl


def test_the_weights_in_full_give_our_logits(model: str, files: Files, tmp_path: Path) -> None:
    ours = load_text_model(open_checkpoint(tiny_folder(model)), torch.float32)
    path = files(tiny_folder(model), "float32")
    worst, _, kl = compare(ours, path, model, tmp_path)
    # llama.cpp keeps keys, values and its table of gelu in half precision.
    assert worst < 2e-2
    assert abs(kl) < 2e-5


def test_bfloat16_gives_our_logits_but_for_its_own_rounding(
    model: str, files: Files, tmp_path: Path
) -> None:
    ours = load_text_model(open_checkpoint(tiny_folder(model)), torch.float32)
    path = files(tiny_folder(model), None)
    _, mean, kl = compare(ours, path, model, tmp_path)
    # On a CPU llama.cpp rounds both sides of a product to bfloat16. How far that alone moves the
    # logits, our own model says when its inputs are rounded so.
    prompt = prompts(model)[1]
    exact = logits(ours, prompt, [5]).log_softmax(-1)
    moved = (logits(round_inputs(ours), prompt, [5]).log_softmax(-1) - exact).square().mean()
    assert mean < 2 * float(moved) ** 0.5
    assert abs(kl) < 1e-4


def round_inputs(model: TextModel) -> TextModel:
    """Has every matrix product but the router's see its input in bfloat16."""

    def rounded(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *more: call(x.bfloat16().float(), *more)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "router" not in name:
            module.forward = rounded(module.forward)  # type: ignore[method-assign]
        elif isinstance(module, Embedding):
            module.project = rounded(module.project)  # type: ignore[method-assign]
        elif isinstance(module, ExpertLinear):
            for method in ("chosen", "grouped", "every"):
                setattr(module, method, rounded(getattr(module, method)))
    return model


def test_q4_1_gives_the_bundles_text(model: str, files: Files, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    make_bundle(tiny_folder(model), bundle)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (bundle / name).write_bytes((tiny_folder(model) / name).read_bytes())
    path = files(bundle, None)
    _, _, kl = compare(load_bundle(bundle, torch.float32), path, model, tmp_path)
    # It also rounds the inputs of a product with 4-bit weights to 8 bit.
    assert abs(kl) < 3e-3


def test_text_becomes_the_same_ids(model: str, files: Files, tmp_path: Path) -> None:
    text = "Hi there\n\nnaïve – 中文 🙂  two\n\n\n<|turn>user\nhi<turn|>\n<|channel>x"
    ids = Tokenizer(tiny_folder(model)).encode(text, bos=True)
    path = files(tiny_folder(model), "float32")
    as_text, as_ids = llama(path, [text, ids], tmp_path)
    assert as_text["ids"] == as_ids["ids"]
    assert as_text["logprobs"] == as_ids["logprobs"]


@pytest.mark.skipif(not SOURCE, reason="needs G4_LLAMA_CPP_SOURCE, see the docstring")
def test_llama_cpps_own_converter_writes_the_same(model: str, files: Files, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.gguf"
    script = Path(SOURCE) / "convert_hf_to_gguf.py"
    command = [sys.executable, script, tiny_folder(model), "--outtype", "bf16"]
    subprocess.run([*command, "--outfile", theirs], check=True, capture_output=True)
    left, right = (gguf.GGUFReader(path) for path in (theirs, files(tiny_folder(model), None)))
    fields = [
        {key: (field.types, field.contents()) for key, field in reader.fields.items()}
        for reader in (left, right)
    ]
    # A name and a size to show; and two of the three end tokens.
    shown = {"general.name", "general.size_label", "general.basename", "general.finetune"}
    differ = {key for key in fields[0] | fields[1] if fields[0].get(key) != fields[1].get(key)}
    more = {f"tokenizer.ggml.{end}_token_id" for end in ("eot", "eom")}
    assert differ - shown - {"GGUF.kv_count"} == more
    tensors = [
        {tensor.name: (tensor.tensor_type, np.array(tensor.data)) for tensor in reader.tensors}
        for reader in (left, right)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, (kind, values) in tensors[0].items():
        assert kind == tensors[1][name][0]
        assert np.array_equal(values.view(np.uint8), tensors[1][name][1].view(np.uint8))
    source = open_checkpoint(tiny_folder(model))
    checkpoint = open_checkpoint(theirs)
    for name in source.names:
        assert torch.equal(checkpoint.read(name).float(), source.read(name).float())
