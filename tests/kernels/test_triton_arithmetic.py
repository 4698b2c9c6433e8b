"""The model with the kernels' arithmetic against the same model with the plain one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear, pack_int4
from g4tool.model.arithmetic import use
from g4tool.model.config import LayerConfig, MoeConfig, TextConfig
from g4tool.model.moe import ExpertLinear
from g4tool.model.text import TextModel

from .interpreter import DEVICE, loops_over_tensors, needs_triton  # noqa: F401

pytestmark = needs_triton


def config(kind: str) -> TextConfig:
    """Five layers: plain, with per-layer embeddings and shared keys, or with experts."""
    per_layer = kind == "per-layer"
    layers = [
        LayerConfig(
            attention="full" if number % 2 else "sliding",
            head_dim=32 if number % 2 else 16,
            num_kv_heads=1 if number % 2 else 2,
            intermediate_size=96,
            value_from_key=bool(number % 2) and not per_layer,
            kv_source=number - 2 if per_layer and number >= 3 else None,
        )
        for number in range(5)
    ]
    return TextConfig(
        vocab_size=64,
        hidden_size=64,
        num_heads=4,
        layers=tuple(layers),
        sliding_window=8,
        max_position_embeddings=64,
        per_layer_dim=32 if per_layer else 0,
        per_layer_vocab_size=64 if per_layer else 0,
        moe=MoeConfig(8, 2, 32) if kind == "experts" else None,
    )


def int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.detach().unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, True), groups.amax(-1, True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).bfloat16().float()
    codes = (groups / scale + zero).round().clamp(0, 15).flatten(-2)
    turned = [t[..., 0].mT.contiguous().bfloat16() for t in (scale, zero)]
    return pack_int4(codes), turned[0], turned[1]


def model_of(kind: str) -> TextModel:
    torch.manual_seed(0)
    model = TextModel(config(kind)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("scale"):
            nn.init.uniform_(parameter, 0.75, 1.25)
    for path, module in list(model.named_modules()):
        if path.endswith(("layers.0.mlp.down_proj", "router.proj")):
            continue  # a leaf of another kind runs as it is
        owner, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear):
            setattr(model.get_submodule(owner), name, Int4Linear(*int4(module.weight)))
        elif isinstance(module, ExpertLinear):
            setattr(model.get_submodule(owner), name, Int4ExpertLinear(*int4(module.weight)))
    for block in model.layers:
        nn.init.constant_(block.layer_scalar, 0.7)
    return model.to(DEVICE)


@pytest.mark.parametrize("kind", ["plain", "per-layer", "experts"])
@torch.no_grad()
def test_prompt_and_tokens_are_the_plain_models(kind: str) -> None:
    from g4tool.kernels.triton_arithmetic import TokenArithmetic, TritonArithmetic

    model = model_of(kind)
    length = 12  # beyond the window of 8, so that the rings turn over
    model.allocate_cache(1, length)
    ids = torch.randint(0, 64, (1, length), device=DEVICE)
    plain = copy.deepcopy(model)
    use(model, TritonArithmetic())
    start = torch.tensor(0, device=DEVICE)
    want = plain.hidden(ids[:, :7], start)
    assert relative(model.hidden(ids[:, :7], start), want) < 1e-4
    use(model, TokenArithmetic(torch.float32))
    for number in range(7, length):
        token, position = ids[:, number : number + 1], torch.tensor(number, device=DEVICE)
        want = plain.hidden(token, position)
        got = model.hidden(token, position)
        assert relative(got, want) < 1e-4
        assert torch.equal(model.hidden(token, position), got)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_recorded_steps_give_the_ids_of_the_plain_loop() -> None:
    from g4tool.generate import cuda_graph
    from g4tool.generate.loop import Session
    from g4tool.generate.sampler import GREEDY, Sampling

    for sampling in (GREEDY, Sampling(temperature=1e-5, top_k=1, seed=3)):
        model, runs = model_of("plain"), []
        for graph in (False, True):
            if graph:
                assert cuda_graph.prepare(model)
            session = Session(model, 40)
            ids: list[int] = [3, 1, 4]
            for turn in range(2):  # the second turn continues what the first one left
                steps = session.generate([ids], sampling=sampling, max_new_tokens=8)
                ids = ids + [step[0] for step in steps if step[0] is not None] + [turn + 1]
            session.close()
            runs.append(ids)
        assert runs[0] == runs[1]
