"""torch.compile without a graph break, and strict torch.export of prefill and decode."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

from g4tool.model.text import TextModel

from .oracle import (
    FAMILIES,
    TOLERANCE,
    WINDOW,
    config_of,
    difference,
    hf_model,
    random_ids,
    text_model,
)

LENGTH = 64
# What the ExecuTorch runtime has no kernel for.
LACKING = ("sort", "one_hot", "searchsorted", "grouped_mm", "rshift", "rms_norm", "clamp.Tensor")


def program(model: TextModel, length: int, dynamic: bool) -> torch.export.ExportedProgram:
    shapes = {"input_ids": {1: Dim("length", min=2, max=LENGTH)}, "start": None}
    example = (random_ids(1, length), torch.tensor(0))
    exported = export(model, example, dynamic_shapes=shapes if dynamic else None, strict=True)
    return exported.run_decompositions({})  # makes the buffer mutations outputs of the graph


def caches(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in module.named_buffers() if ".cache." in name}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_programs_equal_eager(family):
    model = text_model(hf_model(family), config_of(family))
    ids = random_ids(1, 4 * WINDOW + 8)
    expected = model(ids)
    for layer in model.layers:
        if family == "moe":
            layer.experts.prefill = "every"
    model.allocate_cache(1, LENGTH)
    programs = [program(model, 9, dynamic=True), program(model, 1, dynamic=False)]
    for exported in programs:
        targets = " ".join(str(node.target) for node in exported.graph.nodes)
        assert not [name for name in LACKING if name in targets]
        mutated = set(exported.graph_signature.buffers_to_mutate.values())
        assert mutated == set(caches(model))
    prefill, decode = (exported.module() for exported in programs)

    def handed(source: torch.nn.Module, target: torch.nn.Module) -> None:
        for name, buffer in caches(target).items():
            buffer.copy_(caches(source)[name])

    for chunk in (2, WINDOW, WINDOW + 1, 2 * WINDOW + 1):
        split = 2 * (2 * WINDOW + 1)
        pieces = ids[:, :split].split(chunk, 1)
        pieces = [piece for piece in pieces if piece.shape[1] > 1]
        at, got = 0, []
        for piece in pieces:
            got.append(prefill(piece, torch.tensor(at)))
            at += piece.shape[1]
        handed(prefill, decode)
        for position in range(at, ids.shape[1]):
            got.append(decode(ids[:, position : position + 1], torch.tensor(position)))
        assert difference(torch.cat(got, 1), expected) <= TOLERANCE, chunk


@torch.no_grad()
def test_grouped_experts_export_too():
    model = text_model(hf_model("moe"), config_of("moe"))
    ids = random_ids(1, 20)
    expected = model(ids)
    model.allocate_cache(1, LENGTH)
    exported = program(model, 9, dynamic=True)
    assert "g4.grouped_mm" in " ".join(str(node.target) for node in exported.graph.nodes)
    assert difference(exported.module()(ids, torch.tensor(0)), expected) <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_without_a_graph_break(family):
    torch._dynamo.reset()
    model = text_model(hf_model(family), config_of(family))
    ids, pad = random_ids(2, 2 * WINDOW + 6), torch.tensor([0, 3])
    expected = model(ids, pad=pad)
    model.allocate_cache(2, LENGTH)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    got, at = [], 0
    for count in (WINDOW + 1, 5, WINDOW - 2, 1, 1):
        got.append(compiled(ids[:, at : at + count], torch.tensor(at), pad))
        at += count
    assert at == ids.shape[1]
    assert difference(torch.cat(got, 1)[0], expected[0]) <= TOLERANCE
    assert difference(torch.cat(got, 1)[1, 3:], expected[1, 3:]) <= TOLERANCE
