"""The other solvers, packing, and the blocks a weight is solved in."""

import sys

import pytest
import torch
from torch import Tensor

from g4tool.errors import G4Error
from g4tool.kernels.int4 import dequantize_int4, unpack_int4
from g4tool.kernels.int8 import dequantize_int8
from g4tool.quantize import als, int8, reference, rtn, solvers, symmetric
from g4tool.quantize.pack import dequantize, packed


def gauss(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(rows, columns, generator=generator)).bfloat16()


def error(values: Tensor, weight: Tensor) -> float:
    return float((values.double() - weight.double()).norm() / weight.double().norm())


def test_stored_bytes_mean_what_the_kernels_read() -> None:
    result = als.solve(gauss(6, 128), 32)
    qdata = packed(result)
    assert qdata.shape == (6, 64)
    assert result.scale.shape == (4, 6)
    assert result.scale.is_contiguous()
    assert qdata[2, 3] == result.codes[2, 6] + 16 * result.codes[2, 7]
    assert torch.equal(unpack_int4(qdata), result.codes)
    assert result.zero is not None
    read = dequantize_int4(qdata, result.scale, result.zero, torch.float32)
    assert torch.equal(read, dequantize(result))
    row = (result.codes[1].float().view(4, 32) - result.zero[:, 1:2].float()) * result.scale[
        :, 1:2
    ].float()
    assert torch.equal(read[1], row.flatten())


def test_rtn_matches_its_formula() -> None:
    weight = gauss(4, 64)
    x = weight.float().view(4, 2, 32)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).bfloat16().float()
    expected = ((x / scale + zero).round().clamp(0, 15) - zero) * scale
    result = dequantize(rtn.solve(weight, 32)).view_as(x)
    # x * (1 / s) and x / s may round a tie apart.
    assert (result - expected).abs().max() <= scale.max() * 1.001
    assert ((result - expected).abs() > 1e-6).sum() <= 1


@pytest.mark.parametrize("group", [32, 128])
def test_symmetric_is_as_good_as_a_search_over_clips(group: int) -> None:
    weight = gauss(64, 1792)
    x = weight.float().view(-1, group)
    largest = x.abs().amax(1, keepdim=True)
    best = torch.full((len(x),), torch.inf)
    for part in torch.linspace(0.5, 1.0, 51):
        scale = largest * part / 7
        best = torch.minimum(best, ((x / scale).round().clamp(-8, 7) * scale - x).norm(dim=1))
    result = symmetric.solve(weight, group)
    assert result.zero is not None
    assert (result.zero == 8).all()
    assert (result.scale > 0).all()
    assert error(dequantize(result), weight) <= 1.003 * float(best.norm() / x.norm())


@pytest.mark.parametrize("group", [32, 256])
def test_int8_rounds_with_the_stored_scale(group: int) -> None:
    weight = gauss(5, 256)
    result = int8.solve(weight, group)
    assert result.scale.shape == (5, 256 // group)
    x = weight.float().view(5, -1, group)
    scale = (x.abs().amax(-1) / 127).bfloat16()
    assert torch.equal(result.scale, scale)
    wanted = (x / scale.float().unsqueeze(-1)).round().clamp(-127, 127).view(5, 256)
    assert torch.equal(result.codes, wanted.to(torch.int8))
    read = dequantize_int8(result.codes, result.scale, torch.float32)
    assert torch.equal(read, dequantize(result))
    assert error(read, weight) < 0.01


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38])
def test_int8_of_a_constant_is_finite(value: float) -> None:
    result = int8.solve(torch.full((1, 32), value), 32)
    assert dequantize(result).isfinite().all()
    assert dequantize(result)[0, 0] == pytest.approx(value, rel=2**-7, abs=1e-39)


@pytest.mark.parametrize("solver", ["hqq", "rtn", "symmetric", "grid", "int8"])
def test_workers_give_the_bytes_of_one_block(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = gauss(50, 256)
    results = []
    for block in (2**20, 256 * 7, 256):
        monkeypatch.setattr(solvers, "_BLOCK_CPU", block)
        with solvers.workers("cpu") as crew:
            results.append(crew.solve(weight, solver, 32))
    first = results[0]
    for other in results[1:]:
        assert torch.equal(other.qdata, first.qdata)
        assert torch.equal(other.scale, first.scale)
        if first.zero is not None:
            assert other.zero is not None
            assert torch.equal(other.zero, first.zero)
        assert solvers.relative_error(
            other.error.tolist(), other.energy.tolist()
        ) == solvers.relative_error(first.error.tolist(), first.energy.tolist())


def test_reported_error_is_that_of_the_stored_weight() -> None:
    weight = gauss(40, 512)
    with solvers.workers("cpu") as crew:
        result = crew.solve(weight, "hqq", 64)
    assert result.zero is not None
    stored = dequantize_int4(result.qdata, result.scale, result.zero, torch.float32)
    reported = solvers.relative_error(result.error.tolist(), result.energy.tolist())
    assert reported == pytest.approx(error(stored, weight), rel=1e-5)


def test_workers_give_torch_its_threads_back() -> None:
    before = torch.get_num_threads()
    with solvers.workers("cpu"):
        pass
    assert torch.get_num_threads() == before


def test_reference_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)
    with pytest.raises(G4Error, match=r"g4tool\[hqq\]"):
        reference.solve(gauss(2, 64), 32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("solver", ["hqq", "rtn", "symmetric", "grid", "int8"])
def test_cuda_gives_the_bytes_of_the_cpu(solver: str) -> None:
    weight = gauss(256, 1024)
    with solvers.workers("cpu") as crew:
        expected = crew.solve(weight, solver, 32)
    with solvers.workers("cuda") as crew:
        result = crew.solve(weight, solver, 32)
    assert torch.equal(result.qdata, expected.qdata)
    assert torch.equal(result.scale, expected.scale)
