"""The one-row, grouped and dequantizing kernels against the weight itself in fp32.

TRITON_INTERPRET=1 python -m pytest tests/kernels
"""

import pytest
import torch
from torch import Tensor

from g4tool.kernels.int4 import dequantize_int4
from g4tool.kernels.int8 import dequantize_int8

from .interpreter import DEVICE, loops_over_tensors, needs_triton  # noqa: F401
from .test_tuning import COLUMNS

pytestmark = needs_triton

Int4 = tuple[Tensor, Tensor, Tensor]


def int4(*shape: int, group: int, zeros: str = "spread") -> tuple[Int4, Tensor]:
    """qdata, scale, zero at random on the device, and the weight in fp32."""
    *lead, count, columns = shape
    qdata = torch.randint(0, 256, (*lead, count, columns // 2), dtype=torch.uint8)
    per_group = (*lead, columns // group, count)
    scale = (torch.rand(per_group) * 0.02 + 0.001).bfloat16()
    zero = {
        "spread": torch.randn(per_group) * 6 + 7.5,
        # Groups of weights of one sign: the zero lies outside the codes.
        "positive": -100 * torch.rand(per_group),
        "negative": 15 + 100 * torch.rand(per_group),
    }[zeros].bfloat16()
    weight = (qdata.to(DEVICE), scale.to(DEVICE), zero.to(DEVICE))
    return weight, dequantize_int4(*weight, torch.float32)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("columns", COLUMNS)
def test_one_row_at_the_columns_of_all_variants(columns: int) -> None:
    from g4tool.kernels.triton_int4 import int4_vector

    group = 128 if columns % 128 == 0 else 32
    weight, plain = int4(37, columns, group=group)
    x = torch.randn(1, 1, columns, device=DEVICE)
    assert relative(int4_vector(x, *weight), x @ plain.T) < 1e-5


@pytest.mark.parametrize("zeros", ["spread", "positive", "negative"])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 384])
@pytest.mark.parametrize("count", [1, 33, 130])
def test_one_row_of_any_group_and_zero(count: int, group: int, zeros: str) -> None:
    from g4tool.kernels.triton_int4 import int4_vector

    weight, plain = int4(count, 384, group=group, zeros=zeros)
    x = torch.randn(384, device=DEVICE)
    got = int4_vector(x, *weight)
    # Far zeros cancel: the error is one of the sum of absolute values.
    wide, most = plain.double(), x.abs() @ plain.abs().T
    assert ((got - x.double() @ wide.T).abs() <= 2e-6 * most).all()
    assert torch.equal(int4_vector(x, *weight), got)


@pytest.mark.parametrize("columns", [32, 64, 96, 160])
def test_one_row_of_few_columns_reads_nothing_beyond_them(columns: int) -> None:
    from g4tool.kernels.triton_int4 import int4_vector

    weight, plain = int4(5, columns, group=32)
    for size in (1e-6, 1.0, 1e4):
        x = torch.randn(columns, device=DEVICE) * size
        assert relative(int4_vector(x, *weight), x @ plain.T) < 1e-5


def test_several_weights_in_one_launch() -> None:
    from g4tool.kernels.triton_int4 import pack_rows, vector_parts

    made = [int4(count, 256, group=64) for count in (70, 33, 1)]
    x = torch.randn(1, 256, device=DEVICE)
    for number in (1, 2, 3):
        parts = vector_parts(pack_rows(x), [weight for weight, _ in made[:number]])
        want = torch.cat([x @ plain.T for _, plain in made[:number]], 1)[0]
        assert relative(parts.sum(0), want) < 1e-5


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_of_any_number_of_rows(rows: int) -> None:
    from g4tool.kernels.triton_tiles import int4_mm

    weight, plain = int4(33, 192, group=32)
    x = torch.randn(rows, 192, device=DEVICE)
    assert relative(int4_mm(x, *weight), x @ plain.T) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dequantize_is_the_definition_bit_for_bit(dtype: torch.dtype) -> None:
    from g4tool.kernels.triton_tiles import int4_dequantize

    for shape, group in (((33, 352), 32), ((19, 96), 96), ((5, 512), 128)):
        weight, plain = int4(*shape, group=group)
        assert torch.equal(int4_dequantize(*weight, dtype), plain.to(dtype))


def test_chosen_experts() -> None:
    from g4tool.kernels.triton_int4 import chosen_parts, int4_chosen, pack_rows

    weight, plain = int4(5, 40, 96, group=32)
    index = torch.tensor([[0, 3], [1, 1], [4, 0]], device=DEVICE)
    x = torch.randn(3, 2, 96, device=DEVICE)
    want = (plain[index] @ x[..., None])[..., 0]
    assert relative(int4_chosen(x, index, *weight), want) < 1e-5
    # One row for all the slots of a token.
    parts = chosen_parts(pack_rows(x[:, 0]), index.view(-1), weight, 2)
    want = (plain[index] @ x[:, :1, :, None])[..., 0]
    assert relative(parts.sum(0), want.view(6, 40)) < 1e-5


@pytest.mark.parametrize("ends", [[0, 3, 3, 70, 70], [70] * 5, [1, 2, 3, 4, 66], [0, 0, 0, 0, 9]])
def test_grouped_experts_and_rows_of_none(ends: list[int]) -> None:
    from g4tool.kernels.triton_tiles import int4_grouped

    weight, plain = int4(5, 40, 96, group=32)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    x = torch.randn(71, 96, device=DEVICE)
    expert = torch.bucketize(torch.arange(71, device=DEVICE), offsets, right=True)
    want = (plain[expert.clamp(max=4)] @ x[..., None])[..., 0]
    want[ends[-1] :] = 0
    assert relative(int4_grouped(x, offsets, *weight), want) < 1e-5


@pytest.mark.parametrize(
    ("count", "columns", "group"),
    [(70, 256, 256), (33, 96, 32), (7, 1536, 128), (5, 80, 80), (300, 64, 64)],
)
def test_int8_row(count: int, columns: int, group: int) -> None:
    from g4tool.kernels.triton_int8 import int8_vector

    qdata = torch.randint(-128, 128, (count, columns), dtype=torch.int8, device=DEVICE)
    scale = (torch.rand(count, columns // group, device=DEVICE) * 0.02).bfloat16()
    x = torch.randn(1, 1, columns, device=DEVICE)
    want = x @ dequantize_int8(qdata, scale, torch.float32).T
    got = int8_vector(x, qdata, scale)
    assert got.shape == (1, 1, count)
    assert relative(got, want) < 1e-5
