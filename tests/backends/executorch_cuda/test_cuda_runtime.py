"""The runtime of CUDA programs on real .pte and .ptd files, their code compiled for the CPU."""

import shutil
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from g4tool.backends.executorch import cuda_runtime, pte
from g4tool.backends.executorch.cuda import check_outside
from g4tool.backends.executorch.cuda_runtime import CudaMethods, check_gpu, check_program
from g4tool.backends.executorch.folder import ExportFacts
from g4tool.backends.executorch.xnnpack import Lowered
from g4tool.errors import G4Error
from tests.backends.executorch_cuda.conftest import Program

# One process makes the program for all.
pytestmark = pytest.mark.xdist_group("cuda-program")

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def run(methods: Any, ids: list[int], start: int) -> Tensor:
    method = methods.decode if len(ids) == 1 else methods.prefill
    result: Tensor = method(torch.tensor([ids]), torch.tensor(start))
    return result


@pytest.mark.usefixtures("on_cpu")
def test_both_methods_compute_what_the_model_does_over_one_cache(program: Program) -> None:
    own = CudaMethods(program.path, [program.weights], graph=False)
    for at, size in ((0, 5), (5, 1), (6, 2)):
        chunk = IDS[at : at + size]
        with torch.no_grad():
            expected = program.model(torch.tensor([chunk]), torch.tensor(at))
        found = run(own, chunk, at)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    # A program of its own knows nothing of what came before.
    other = CudaMethods(program.path, [program.weights], graph=False)
    assert (run(other, IDS[6:], 6) - found).abs().max() > 0.01 * found.abs().max()


@pytest.mark.usefixtures("on_cpu")
def test_weights_are_held_once_and_compared_bit_for_bit(program: Program) -> None:
    own = CudaMethods(program.path, [program.weights], graph=False)
    buffers = program.model.model.state_dict()  # type: ignore[union-attr]
    assert own.differing(buffers) == []
    changed = buffers["qdata"].clone()
    changed[10, 7] += 1
    assert own.differing({"qdata": changed}) == ["qdata"]
    assert own.differing({"another": changed}) == ["another"]

    parsed, data = pte.read_program(program.path)
    methods = [pte.compiled_method(program.path, parsed, data, n) for n in ("prefill", "decode")]
    held = cuda_runtime._load(methods, [pte.read_weights(program.weights)])
    assert sum(each.numel() for each in held.values()) == sum(b.nbytes for b in buffers.values())


@pytest.mark.usefixtures("on_cpu")
def test_the_caches_of_both_methods_are_one_tensor(program: Program) -> None:
    own = CudaMethods(program.path, [program.weights], graph=False)
    run(own, IDS, 0)
    assert own._weights["model.seen"][: len(IDS)].abs().sum() > 0
    assert own._weights["model.seen"][len(IDS) :].abs().sum() == 0


@pytest.mark.usefixtures("on_cpu")
def test_code_that_cannot_be_recorded_runs_without_a_graph_after_one_warning(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    # Entered like streams and graphs, which a CPU has not.
    nothing = MagicMock()
    monkeypatch.setattr(torch.cuda, "Stream", nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", nothing)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", nothing)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    recorded = CudaMethods(program.path, [program.weights], graph=True)
    plain = CudaMethods(program.path, [program.weights], graph=False)
    with pytest.warns(RuntimeWarning, match="recorded as a CUDA graph .operation not permitted"):
        first = run(recorded, IDS[:1], 0)
    assert torch.equal(first, run(plain, IDS[:1], 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(recorded, IDS[1:2], 1), run(plain, IDS[1:2], 1))


def test_every_method_is_one_piece_of_code_and_copies(program: Program) -> None:
    parsed, _ = pte.read_program(program.path)
    lowered = Lowered(SimpleNamespace(executorch_program=parsed), {})
    check_outside(lowered.operators())
    calls = {"CudaBackend": 1, "et_copy::_h2d_copy.out": 2, "et_copy::_d2h_copy.out": 1}
    assert lowered.delegates() == {"prefill": calls, "decode": calls}
    with pytest.raises(G4Error, match=r"decode: the CUDA backend left aten::topk\.values outside"):
        check_outside({"decode": ["aten::topk.values", "et_copy::_h2d_copy.out"]})


def test_a_finished_program_is_checked_without_running_it(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_program(program.path)
    monkeypatch.setattr(cuda_runtime, "absent", lambda names: ["aoti_torch_cuda_sort_stable"])
    with pytest.raises(G4Error, match="prefill calls aoti_torch_cuda_sort_stable, which torch"):
        check_program(program.path)


@pytest.mark.usefixtures("on_cpu")
def test_a_missing_weights_file_is_said(program: Program) -> None:
    with pytest.raises(G4Error, match=r"no weights file of the export has .*; it is incomplete"):
        CudaMethods(program.path, [], graph=False)


@pytest.mark.usefixtures("on_cpu")
def test_too_few_bytes_of_a_weight_are_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pte.DataFile.read

    def shorter(self: pte.DataFile, key: str) -> memoryview:
        return whole(self, key)[:80] if key.endswith("qdata") else whole(self, key)

    monkeypatch.setattr(pte.DataFile, "read", shorter)
    with pytest.raises(G4Error, match=r"holds 80 bytes of model\.qdata where .* needs 88"):
        CudaMethods(program.path, [program.weights], graph=False)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_code_that_calls_executorchs_own_functions_is_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "int aoti_torch_cuda_int4_plain_mm(void); int f(void)"
    (tmp_path / "f.c").write_text(source + "{ return aoti_torch_cuda_int4_plain_mm(); }")
    library = tmp_path / "f.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "f.c"], check=True)
    whole = pte.DataFile.read

    def replaced(self: pte.DataFile, key: str) -> memoryview:
        return memoryview(library.read_bytes()) if key.endswith("_so_blob") else whole(self, key)

    monkeypatch.setattr(pte.DataFile, "read", replaced)
    with pytest.raises(G4Error, match="prefill calls aoti_torch_cuda_int4_plain_mm, which torch"):
        CudaMethods(program.path, [program.weights], graph=False)
    library.write_bytes(library.read_bytes()[:2000])
    with pytest.raises(G4Error, match="the code of prefill is a damaged ELF library"):
        CudaMethods(program.path, [program.weights], graph=False)


def test_without_a_gpu_it_says_so(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(G4Error, match="compiled for an NVIDIA GPU, and this machine has none"):
        CudaMethods(program.path, [program.weights])


def facts(gpu: dict[str, Any]) -> ExportFacts:
    return ExportFacts(
        backend="cuda",
        activations="bfloat16",
        max_seq_len=32,
        prefill_chunk=32,
        sliding_window=8,
        vocab_size=11,
        bos_id=2,
        eos_ids=[1],
        sampling=False,
        turn=None,
        delegates={},
        gpu=gpu,
        versions={},
        source={},
        files={},
    )


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = facts({"name": "NVIDIA H200", "capability": [9, 0]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(G4Error, match="compiled for NVIDIA H200, and this machine has no NVIDIA"):
        check_gpu(tmp_path, made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(G4Error, match=r"capability \[9, 0\], this one has \[8, 0\]"):
        check_gpu(tmp_path, made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_gpu(tmp_path, made)
