"""The kernel against the plain solver, bit for bit.

Runs on a CUDA device, or in Triton's interpreter:
    TRITON_INTERPRET=1 python -m pytest tests/quantize/test_triton_als.py
"""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from g4tool.quantize import als
from g4tool.quantize.pack import dequantize, packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1",
)


def gauss(group: int, random: torch.Generator) -> Tensor:
    return (torch.randn(70, group * 6, generator=random) * 0.02).bfloat16()


def spread(group: int, random: torch.Generator) -> Tensor:
    size = torch.rand(33, 1, generator=random).mul(20).sub(10).exp()
    return torch.randn(33, group * 5, generator=random) * size


def halves(group: int, random: torch.Generator) -> Tensor:
    return torch.randn(17, group, generator=random).half()


def edges(group: int, random: torch.Generator) -> Tensor:
    """Constant, far from zero, tiny and huge groups among ordinary ones."""
    x = torch.randn(9, group * 3, generator=random)
    x[2], x[3], x[4, :group] = 0, 0.3, -7e-5
    x[5] += 100
    x[6] *= 1e-38
    x[7] *= 1e37
    x[8] = 3e38
    return x


def any_bits(group: int, random: torch.Generator) -> Tensor:
    bits = torch.randint(-(2**31), 2**31 - 1, (40, group * 2), generator=random)
    return bits.to(torch.int32).view(torch.float32).nan_to_num(0, 0, 0)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("draw", [gauss, spread, halves, edges, any_bits])
def test_bytes_are_those_of_the_plain_solver(
    draw: Callable[[int, torch.Generator], Tensor], group: int
) -> None:
    from g4tool.quantize import triton_als

    weight = draw(group, torch.Generator().manual_seed(group))
    expected = als.solve(weight, group)
    result = triton_als.solve(weight.to(DEVICE), group)
    assert torch.equal(result.qdata.cpu(), packed(expected))
    assert torch.equal(result.scale.cpu(), expected.scale)
    assert result.zero is not None
    assert expected.zero is not None
    assert torch.equal(result.zero.cpu(), expected.zero)
    wide = weight.double()
    lost = (dequantize(expected).double() - wide).square().sum(1)
    torch.testing.assert_close(result.error.cpu(), lost, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.energy.cpu(), wide.square().sum(1), rtol=1e-12, atol=0)


def test_no_rows() -> None:
    from g4tool.quantize import triton_als

    result = triton_als.solve(torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE), 32)
    assert result.qdata.shape == (0, 32)
    assert result.scale.shape == (2, 0)
