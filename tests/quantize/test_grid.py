"""The solver for weights that were trained on the Q4_0 grid."""

import pytest
import torch
from torch import Tensor

from g4tool.quantize import grid
from g4tool.quantize.pack import dequantize


def trained(rows: int, columns: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes -8..7, signed scales [rows, groups], and the bf16 weights of a Q4_0 training run."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns // 32, 32, generator=generator)
    at = x.abs().argmax(-1, keepdim=True)
    d = (x.gather(-1, at) / -8 * 0.01).to(scale_dtype).float()
    codes = (x * 0.01 / d).round().clamp(-8, 7)
    return codes.reshape(rows, columns), d.squeeze(-1), (codes * d).reshape(rows, -1).bfloat16()


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_trained_codes_come_back_bit_for_bit(scale_dtype: torch.dtype) -> None:
    codes, d, weight = trained(64, 256, scale_dtype)
    result = grid.solve(weight, 32)
    assert result.off_grid == 0
    assert result.zero is not None
    sign = d.sign().repeat_interleave(32, 1)
    zero = result.zero.t().repeat_interleave(32, 1).float()
    assert torch.equal((result.codes.float() - zero) * sign, codes)
    assert torch.allclose(result.scale.t().float(), d.abs(), rtol=2**-7, atol=0)
    assert set(result.zero.unique().tolist()) == {7.0, 8.0}
    if scale_dtype == torch.bfloat16:
        assert torch.equal(result.scale.t().float(), d.abs())
        assert torch.equal(dequantize(result).bfloat16(), weight)


def test_zero_at_8_keeps_the_signed_scale() -> None:
    codes, d, weight = trained(16, 128, torch.bfloat16)
    result = grid.solve(weight, 32, zero_at_8=True)
    assert result.zero is not None
    assert (result.zero == 8).all()
    assert torch.equal(result.codes.float() - 8, codes)
    assert torch.equal(result.scale.t().float(), d)


@pytest.mark.parametrize("top", [7, 5, 3, 1])
def test_group_whose_largest_weight_is_another_multiple(top: int) -> None:
    levels = torch.arange(32) % (2 * top + 1) - top
    weight = (levels * 0.0123).bfloat16().reshape(1, 32)
    result = grid.solve(weight, 32)
    assert result.off_grid == 0
    assert torch.allclose(dequantize(result), weight.float(), rtol=2**-7)


def test_groups_off_the_grid_are_counted_and_fitted() -> None:
    _, _, weight = trained(8, 128, torch.bfloat16)
    weight[3, :64] = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = grid.solve(weight, 32)
    assert result.off_grid == 2
    lost = (dequantize(result)[3, :64] - weight[3, :64].float()).norm() / weight[3, :64].norm()
    assert lost < 0.12
    assert torch.equal(dequantize(result)[4].bfloat16(), weight[4])


def test_all_zeros_are_on_the_grid() -> None:
    result = grid.solve(torch.zeros(2, 32), 32)
    assert result.off_grid == 0
    assert not dequantize(result).any()
