"""Our packing of 4 and 8 bit rows, decoded by the gguf package."""

import gguf
import pytest
import torch
from torch import Tensor

from g4tool.formats.gguf_blocks import pack_int4, pack_int8, rounding

ROWS, COLUMNS = 40, 256


def decoded(packed: Tensor, kind: str) -> Tensor:
    values = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values)


def int4(group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random codes [N, K], and the parts of an int4 weight."""
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8, generator=generator)
    shape = (COLUMNS // group, ROWS)
    scale = (0.001 + 0.02 * torch.rand(shape, generator=generator)).bfloat16()
    zero = (15 * torch.rand(shape, generator=generator)).bfloat16()
    return codes, codes[:, 0::2] | codes[:, 1::2] << 4, scale, zero


def by_column(values: Tensor, group: int) -> Tensor:
    """[K/g, N] -> float32 [N, K]."""
    return values.float().T.repeat_interleave(group, dim=1)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_q4_1_is_the_weight_but_for_half_precision(group: int) -> None:
    codes, qdata, scale, zero = int4(group)
    exact = (codes - by_column(zero, group)) * by_column(scale, group)
    error = (decoded(pack_int4(qdata, scale, zero), "Q4_1") - exact).abs().max()
    bound = rounding("Q4_1", scale, zero)
    assert 0 < bound < 2**-7
    assert float(error) <= bound * float(scale.max()) + 1e-7
    # The bound is the error, not an estimate of it.
    assert float(error) > 0.5 * bound * float(scale.max())


def test_a_symmetric_weight_is_exact_in_q4_0() -> None:
    codes, qdata, scale, _ = int4(32)
    exact = (codes - 8.0) * by_column(scale, 32)
    assert torch.equal(decoded(pack_int4(qdata, scale, None), "Q4_0"), exact)
    assert rounding("Q4_0", scale, None) == 0.0


@pytest.mark.parametrize("group", [32, 128, COLUMNS])
def test_int8_is_exact_in_q8_0(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8, generator=generator)
    scale = (0.001 + torch.rand(ROWS, COLUMNS // group, generator=generator)).bfloat16()
    exact = codes * scale.float().repeat_interleave(group, dim=1)
    assert torch.equal(decoded(pack_int8(codes, scale), "Q8_0"), exact)
    assert rounding("Q8_0", scale, None) == 0.0


@pytest.mark.parametrize(("scale", "zero"), [(1e6, 8.0), (6e4, 15.0), (float("nan"), 0.0)])
def test_what_half_precision_cannot_hold_has_no_error_at_all(scale: float, zero: float) -> None:
    parts = torch.full((1, 1), scale), torch.full((1, 1), zero)
    assert rounding("Q4_1", *parts) == float("inf")


def test_scales_that_half_precision_barely_holds_show_it() -> None:
    tiny = torch.full((1, 1), 3e-8).bfloat16()
    assert rounding("Q4_1", tiny, torch.full((1, 1), 8.0)) > 1
