"""Reading of finished programs, on files that the wheel itself has written."""

import struct
from pathlib import Path

import pytest
import torch

from g4tool.backends.executorch import pte
from g4tool.errors import G4Error
from tests.backends.executorch_cuda.conftest import Program

# One process makes the program for all.
pytestmark = pytest.mark.xdist_group("cuda-program")


def test_weights_lie_in_the_file_as_they_were(program: Program) -> None:
    parsed, data = pte.read_program(program.path)
    weights = pte.read_weights(program.weights)
    for method in ("prefill", "decode"):
        found = pte.compiled_method(program.path, parsed, data, method)
        buffers = dict(program.model.named_buffers())
        assert {each.name for each in found.weights} == buffers.keys()
        for each in found.weights:
            buffer = buffers[each.name]
            assert (each.shape, each.strides) == (tuple(buffer.shape), buffer.stride())
            stored = torch.frombuffer(bytearray(weights.read(each.key)), dtype=buffer.dtype)
            if each.name != "model.seen":
                assert torch.equal(stored.view(buffer.shape), buffer)
        assert bytes(data.read(found.code)[:4]) == b"\x7fELF"


def test_inputs_come_in_the_codes_own_order(program: Program) -> None:
    parsed, data = pte.read_program(program.path)
    orders = {
        name: pte.compiled_method(program.path, parsed, data, name).inputs
        for name in ("prefill", "decode")
    }
    # The length of `tokens` is read first in one method only.
    assert orders == {"prefill": (0, 1), "decode": (1, 0)}


def test_damage_is_one_sentence(program: Program, tmp_path: Path) -> None:
    whole = program.path.read_bytes()
    path = tmp_path / "model.pte"
    for content, says in (
        (b"", "is no whole ExecuTorch program"),
        (whole[:40], "is no whole ExecuTorch program"),
        (whole[:200], "is no whole ExecuTorch program"),
        (whole[:-100_000], "is cut short"),
        (b"\0" * 4096, "is no whole ExecuTorch program"),
    ):
        path.write_bytes(content)
        with pytest.raises(G4Error, match=says):
            pte.read_program(path)
    stored = program.weights.read_bytes()
    path = tmp_path / "model.ptd"
    for content, says in (
        (b"", "is no ExecuTorch weights file"),
        (whole, "is no ExecuTorch weights file"),
        (stored[:100], "is a damaged ExecuTorch weights file"),
        (stored[:-64], "is cut short"),
    ):
        path.write_bytes(content)
        with pytest.raises(G4Error, match=says):
            pte.read_weights(path)


def test_what_is_not_there_is_named(program: Program) -> None:
    parsed, data = pte.read_program(program.path)
    with pytest.raises(G4Error, match="has no method encode: g4 did not export it"):
        pte.compiled_method(program.path, parsed, data, "encode")
    with pytest.raises(G4Error, match="lacks nothing_so_blob: it belongs to another program"):
        data.read("nothing_so_blob")
    assert "nothing_so_blob" not in data


def test_a_program_of_another_backend_is_refused(tmp_path: Path) -> None:
    from executorch.exir import to_edge
    from torch.export import export

    program = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    manager = to_edge({"prefill": program}).to_executorch()
    path = tmp_path / "model.pte"
    path.write_bytes(manager.buffer)
    parsed, data = pte.read_program(path)
    with pytest.raises(G4Error, match=r"prefill is not one piece of CUDA code .*none"):
        pte.compiled_method(path, parsed, data, "prefill")


def test_another_versions_note_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    with pytest.raises(G4Error, match="compiled by another version of executorch"):
        pte._decode(path, b"0123_so_blob\n4567_weights_blob")
    with pytest.raises(G4Error, match="list of a method's weights is cut short"):
        pte._decode(path, b"ETCUDAFQN3" + struct.pack("<I", 99) + b"short")
