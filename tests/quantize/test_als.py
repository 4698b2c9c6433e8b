"""The default solver: against the hqq package, and on groups that break others."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from g4tool.quantize import als, reference, rtn
from g4tool.quantize.pack import Codes, dequantize


def draw(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "student":
        chi = torch.zeros_like(x)
        for _ in range(4):
            chi += torch.randn(x.shape, generator=generator).square()
        x = x / (chi / 4).sqrt()
    elif kind == "laplace":
        u = torch.rand(x.shape, generator=generator) - 0.5
        x = -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.499999))
    elif kind == "outliers":
        x = torch.where(torch.rand(x.shape, generator=generator) < 1e-3, x * 20, x)
    return (0.02 * x).bfloat16()


def error(values: Tensor, weight: Tensor) -> float:
    return float((values.double() - weight.double()).norm() / weight.double().norm())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["gauss", "student", "laplace", "outliers"])
def test_error_as_stored_is_three_percent_below_hqq_in_fp32(kind: str, group: int) -> None:
    from hqq.core.quantize import Quantizer

    ratios = []
    for seed in range(3):
        weight = draw(kind, 32, 1792, seed)
        codes, facts = Quantizer.quantize(
            weight.float(), nbits=4, group_size=group, axis=1, bitpack=False, device="cpu"
        )
        theirs = ((codes.float() - facts["zero"]) * facts["scale"]).reshape(weight.shape)
        ours = dequantize(als.solve(weight, group))
        ratios.append(error(ours, weight) / error(theirs, weight))
    assert sum(ratios) / len(ratios) < 0.97


def test_reference_is_the_package_rounded_to_bf16() -> None:
    from hqq.core.quantize import Quantizer

    weight = draw("gauss", 16, 256, 0)
    codes, facts = Quantizer.quantize(
        weight.float(), nbits=4, group_size=64, axis=1, bitpack=False, device="cpu"
    )
    result = reference.solve(weight, 64)
    assert torch.equal(result.codes, codes.reshape(16, 256).to(torch.uint8))
    scale = facts["scale"].reshape(16, 4).t().bfloat16()
    assert torch.equal(result.scale, scale)
    with pytest.raises(ValueError, match="do not divide"):
        reference.solve(weight[:, :96], 64)


@pytest.mark.parametrize("rows", [1, 7, 24])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_bytes_do_not_depend_on_the_block(rows: int, group: int) -> None:
    weight = draw("student", 32, 384, 1)
    whole = als.solve(weight, group)
    parts = [als.solve(block, group) for block in torch.split(weight, rows)]
    assert torch.equal(torch.cat([p.codes for p in parts]), whole.codes)
    assert torch.equal(torch.cat([p.scale for p in parts], 1), whole.scale)
    zeros = [p.zero for p in parts if p.zero is not None]
    assert whole.zero is not None
    assert torch.equal(torch.cat(zeros, 1), whole.zero)


def test_bytes_do_not_depend_on_torch_threads() -> None:
    weight = draw("outliers", 256, 1024, 2)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(als.solve(weight, 32))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert torch.equal(result.codes, results[0].codes)
        assert torch.equal(result.scale, results[0].scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_takes_all_float_dtypes_alike(dtype: torch.dtype) -> None:
    # Values that all three hold exactly.
    weight = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 8).round() / 64
    expected = als.solve(weight, 32)
    result = als.solve(weight.to(dtype), 32)
    assert torch.equal(result.codes, expected.codes)
    assert torch.equal(result.scale, expected.scale)


def decoded(values: list[float] | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    row = torch.as_tensor(values, dtype=dtype).reshape(1, -1)
    return checked(als.solve(row, row.shape[1]))[0]


def checked(result: Codes) -> Tensor:
    assert result.zero is not None
    assert result.scale.isfinite().all()
    assert result.zero.isfinite().all()
    assert (result.scale > 0).all()
    values = dequantize(result)
    assert values.isfinite().all()
    return values


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.3, -7e-5, 1e-38, -9.2e-41, 3e38, -3e38])
def test_constant_group_is_exact(value: float) -> None:
    expected = torch.full((32,), value).bfloat16().float()
    assert torch.equal(decoded(expected), expected)


def test_constant_beyond_bf16_is_its_largest() -> None:
    largest = torch.finfo(torch.float32).max
    assert decoded([largest] * 32)[0] == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-20, 1e-37, 1e20, 1e37])
def test_error_is_the_same_at_any_magnitude(size: float) -> None:
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(3))
    assert error(checked(als.solve(x * size, 32)), x * size) < 0.09


def test_small_range_does_not_collapse_as_in_hqq() -> None:
    x = 1e-5 * torch.randn(4, 128, generator=torch.Generator().manual_seed(4))
    assert error(dequantize(reference.solve(x, 128)), x) > 0.9
    assert error(checked(als.solve(x, 128)), x) < 0.11


def test_one_outlier_leaves_zeros_zero() -> None:
    values = torch.zeros(32)
    values[5] = 20.0
    result = decoded(values)
    assert result[5] == pytest.approx(20.0, rel=2**-8)
    assert result[torch.arange(32) != 5].abs().max() < 0.01


def test_subnormals_stay_finite_and_near() -> None:
    # The scale itself is a subnormal of bf16, a multiple of 9.2e-41.
    values = torch.linspace(-1e-38, 1e-38, 32)
    assert (decoded(values) - values).abs().max() < 1e-39


@pytest.mark.parametrize("offset", [1.0, -1.0, 100.0])
def test_far_zero_is_no_worse_than_bf16(offset: float) -> None:
    x = offset + 1e-3 * torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
    assert error(checked(als.solve(x, 32)), x) < 2**-8


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=80, deadline=None)
@given(st.lists(floats, min_size=16, max_size=16))
def test_any_finite_group_is_finite_and_bounded(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    lost = (decoded(x).double() - x.double()).abs().max().item()
    largest = max(abs(v) for v in values)
    # Half a step of the widest line, clipped extremes, and bf16's rounding.
    assert lost <= 0.35 * 2 * largest * (1 + 2**-8) + 2.0**-133


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_group_by_group_it_beats_round_to_nearest(group: int) -> None:
    """It ends in a local optimum, so a few groups in a hundred come out slightly above."""
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(20_000, group, generator=generator)
    x = x * torch.rand(20_000, 1, generator=generator).mul(20).sub(10).exp()
    ours, plain = dequantize(als.solve(x, group)), dequantize(rtn.solve(x, group))
    ratio = (ours - x).norm(dim=1) / (plain - x).norm(dim=1)
    assert ratio.mean() < 0.97
    assert (ratio > 1).float().mean() < 0.05
    assert ratio.max() < 1.15


def test_weights_on_a_grid_keep_it() -> None:
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 16, (8, 64), generator=generator)
    codes[:, 0], codes[:, 1], codes[:, 32], codes[:, 33] = 0, 15, 0, 15
    weight = (codes - 7.0) * 0.125
    result = als.solve(weight, 32)
    assert torch.equal(result.codes, codes.to(torch.uint8))
    assert torch.equal(checked(result), weight)
    assert math.isclose(float(result.scale[0, 0]), 0.125)
