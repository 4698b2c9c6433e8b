import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from g4tool.backends.neuron.stablehlo_program import Graph, lower
from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import tiny_folder
from g4tool.errors import G4Error
from g4tool.model.text import TextModel

WINDOW = 32
LENGTH = 64
PROMPT = 40  # past the window


class Halves(nn.Module):
    """One of two ranks' halves of a feed-forward: a reduction and a gathering."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up = nn.Parameter(up)
        self.down = nn.Parameter(down)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = torch.tanh(x @ self.up.t())
        out = funcol.all_reduce(inner @ self.down.t(), "sum", dist.group.WORLD)
        return out, funcol.all_gather_tensor(inner, gather_dim=1, group=dist.group.WORLD)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def model_of(name: str) -> TextModel:
    model = load_text_model(open_checkpoint(tiny_folder(name)), dtype=torch.float32)
    for block in model.layers:
        if hasattr(block, "experts"):
            block.experts.prefill = "every"
    model.allocate_cache(1, LENGTH)
    return model


def graph_of(model: TextModel, count: int) -> Graph:
    ids = torch.zeros(1, count, dtype=torch.int64)
    with torch.no_grad():
        return lower(torch.export.export(model, (ids, torch.tensor(0)), strict=False))


def test_a_program_names_its_arguments_and_what_it_changes() -> None:
    model = model_of("tiny-26b-a4b")
    graph = graph_of(model, 1)
    kinds = {argument["name"]: argument["kind"] for argument in graph.arguments}
    caches = {name for name, _ in model.named_buffers() if ".cache." in name}
    assert {name for name, kind in kinds.items() if kind == "weight"} == set(model.state_dict())
    assert {name for name, kind in kinds.items() if kind == "cache"} == caches
    assert list(kinds.values())[-2:] == ["input", "input"]
    changed = {x["name"]: x["replaces"] for x in graph.results if "replaces" in x}
    assert set(changed) == caches
    assert all(graph.arguments[place]["name"] == name for name, place in changed.items())
    assert graph.results[-1]["shape"] == [1, 1, 4096]
    # No 64-bit numbers, and the text says what it is.
    text = graph.text
    assert not re.findall(r"tensor<(?:\d+x)*[iu]?i?[if]64>", text)
    assert text.startswith("// For inspection: no Neuron compiler has taken this text.\n")


def test_an_operation_without_entry_is_named() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    with pytest.raises(G4Error, match=r"aten\.cumsum\.default"):
        lower(torch.export.export(Sums(), (torch.ones(3),)))


@pytest.mark.parametrize(
    ("dtype", "spelled"),
    [
        (torch.float32, "dense<0xFF800000> : tensor<2xf32>"),
        (torch.bfloat16, "dense<0xFF80> : tensor<2xbf16>"),
        (torch.float16, "dense<0xFC00> : tensor<2xf16>"),
    ],
)
def test_infinity_is_spelled_as_bits(dtype: torch.dtype, spelled: str) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((2,), float("-inf"), dtype=x.dtype) + x

    text = lower(torch.export.export(Masked(), (torch.ones(2, dtype=dtype),))).text
    assert spelled in text


@pytest.mark.usefixtures("two_ranks")
def test_collectives_join_all_ranks() -> None:
    graph = lower(
        torch.export.export(Halves(torch.ones(4, 4), torch.ones(4, 4)), (torch.ones(3, 4),)), 2
    )
    assert "mhlo.num_replicas = 2" in graph.text
    for operation in ("all_reduce", "all_gather"):
        (line,) = [x for x in graph.text.splitlines() if f"stablehlo.{operation}" in x]
        assert "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>" in line


class TestWithJaxlib:
    """Parsed, verified, compiled and run by jaxlib; skipped where there is no jax."""

    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        pytest.importorskip("jax", reason="needs jax (pip install jax) to run StableHLO text")

    @pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
    def test_prefill_and_decode_are_the_models(self, name: str) -> None:
        import numpy as np

        from tests.backends.neuron_nxdi.jaxlib_run import Program

        model = model_of(name)
        ids = torch.randint(3, 4000, (1, PROMPT), generator=torch.Generator().manual_seed(5))
        state = {key: x.detach().numpy().copy() for key, x in model.named_parameters()}
        state |= {key: x.numpy().copy() for key, x in model.named_buffers()}

        def run(graph: Graph, tokens: Tensor, start: int) -> "np.ndarray":
            inputs = iter((tokens.numpy().astype(np.int32), np.array(start, np.int32)))
            arguments = [
                next(inputs) if x["kind"] == "input" else state[x["name"]] for x in graph.arguments
            ]
            (results,) = Program(graph.text)([arguments])
            for value, described in zip(results, graph.results, strict=True):
                if "replaces" in described:
                    state[described["name"]] = value
            return results[-1]

        with torch.inference_mode():
            prompt = model(ids, torch.tensor(0))
            chosen = prompt[:, -1:].argmax(-1)
            step = model(chosen, torch.tensor(PROMPT))
        model.reset_cache()
        made = run(graph_of(model, PROMPT), ids, 0)
        assert np.abs(made - prompt.numpy()).max() <= 1e-4
        made = run(graph_of(model, 1), chosen, PROMPT)
        assert np.abs(made - step.numpy()).max() <= 1e-4

    @pytest.mark.usefixtures("two_ranks")
    def test_two_ranks_add_up(self) -> None:
        import numpy as np

        from tests.backends.neuron_nxdi.jaxlib_run import Program

        generator = torch.Generator().manual_seed(6)
        up, down = torch.randn(8, 4, generator=generator), torch.randn(4, 8, generator=generator)
        x = torch.randn(3, 4, generator=generator)
        cuts = [(up[:4].clone(), down[:, :4].clone()), (up[4:].clone(), down[:, 4:].clone())]
        graph = lower(torch.export.export(Halves(*cuts[0]), (x,)), 2)
        results = Program(graph.text, 2)([[a.numpy(), b.numpy(), x.numpy()] for a, b in cuts])
        inner = torch.tanh(x @ up.t())
        for out, gathered in results:
            assert np.abs(out - (inner @ down.t()).numpy()).max() <= 1e-5
            assert np.abs(gathered - inner.numpy()).max() <= 1e-6
