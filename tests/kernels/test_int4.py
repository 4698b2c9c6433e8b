import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.kernels import blocks
from g4tool.kernels.int4 import (
    Int4ExpertLinear,
    Int4Linear,
    dequantize_int4,
    int4_chosen_mm,
    int4_every_mm,
    int4_grouped_mm,
    int4_mm,
    pack_int4,
    unpack_int4,
)

# Output rows, columns, group: rows that no block divides, one group a row, the smallest columns.
SHAPES = [(7, 32, 32), (33, 96, 32), (130, 192, 64), (65, 256, 128), (19, 96, 96), (1, 704, 64)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_CPU", 1000)


def quantized(*shape: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qdata, scale, zero at random, and the weight by the definition, in fp32."""
    random = torch.Generator().manual_seed(seed)
    *lead, count, columns = shape
    codes = torch.randint(0, 16, shape, generator=random, dtype=torch.uint8)
    per_group = (*lead, columns // group, count)
    scale = (torch.rand(per_group, generator=random) * 0.02 + 0.001).bfloat16()
    zero = (torch.randn(per_group, generator=random) * 6 + 7.5).bfloat16()
    qdata = codes.view(*shape[:-1], columns // 2, 2)
    qdata = (qdata[..., 1] * 16 + qdata[..., 0]).contiguous()
    s, z = (t.float().mT.repeat_interleave(group, -1) for t in (scale, zero))
    return qdata, scale, zero, (codes.float() - z) * s


@pytest.mark.parametrize(("count", "columns", "group"), SHAPES)
def test_dequantize_is_the_definition_bit_for_bit(count: int, columns: int, group: int) -> None:
    qdata, scale, zero, weight = quantized(count, columns, group=group)
    assert torch.equal(dequantize_int4(qdata, scale, zero, torch.float32), weight)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(dequantize_int4(qdata, scale, zero, dtype), weight.to(dtype))


def test_dequantize_keeps_zeros_outside_the_codes() -> None:
    qdata = pack_int4(torch.tensor([[0, 15] * 16]))
    for zero in (-200.0, -3.25, 40.0, 0.0):
        weight = dequantize_int4(
            qdata, torch.tensor([[0.5]]), torch.tensor([[zero]]), torch.float32
        )
        assert weight[0, :2].tolist() == [(0 - zero) * 0.5, (15 - zero) * 0.5]


def test_even_columns_are_in_the_low_nibble() -> None:
    codes = torch.arange(16).view(1, 16)
    assert pack_int4(codes).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    every_byte = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(pack_int4(unpack_int4(every_byte)), every_byte)
    assert unpack_int4(torch.tensor([[0xF3]], dtype=torch.uint8)).tolist() == [[3, 15]]


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize(("count", "columns", "group"), SHAPES)
def test_linear_equals_linear_on_the_weight(
    count: int, columns: int, group: int, rows: int
) -> None:
    qdata, scale, zero, weight = quantized(count, columns, group=group)
    layer = Int4Linear(qdata, scale, zero)
    x = torch.randn(rows, columns)
    want = F.linear(x.double(), weight.double())
    assert_near(layer(x), want, 1e-5)
    want = F.linear(x.bfloat16().double(), weight.bfloat16().double())
    got = layer(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert_near(got, want, 2**-8)


def test_linear_keeps_leading_dimensions() -> None:
    qdata, scale, zero, weight = quantized(33, 96, group=32)
    layer = Int4Linear(qdata, scale, zero)
    for lead in ((), (2, 3), (0,), (1, 0, 2)):
        x = torch.randn(*lead, 96)
        torch.testing.assert_close(layer(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


# Expert of each row: one expert takes all; some empty, first and last too; all used.
SPREADS = [[2] * 17, [1, 1, 3], [0, 0, 1, 2, 3, 4], [4], []]


@pytest.mark.parametrize("numbers", SPREADS)
def test_grouped_runs_each_row_through_its_expert(numbers: list[int]) -> None:
    qdata, scale, zero, weight = quantized(5, 24, 64, group=32)
    x = torch.randn(len(numbers), 64)
    ends = torch.bincount(torch.tensor(numbers, dtype=torch.int64), minlength=5).cumsum(0).int()
    got = Int4ExpertLinear(qdata, scale, zero).grouped(x, ends)
    assert got.shape == (len(numbers), 24)
    want = [F.linear(row, weight[number]) for row, number in zip(x, numbers, strict=True)]
    for row, expected in zip(got, want, strict=True):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_chosen_and_every_equal_the_weight_itself(rows: int) -> None:
    qdata, scale, zero, weight = quantized(5, 48, 64, group=64)
    layer = Int4ExpertLinear(qdata, scale, zero)
    index = torch.randint(0, 5, (rows, 2))
    x = torch.randn(rows, 2, 64)
    want = (weight[index] @ x.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(layer.chosen(x, index), want, atol=1e-5, rtol=1e-5)
    for lead in (1, 5):
        x = torch.randn(lead, rows, 64)
        torch.testing.assert_close(layer.every(x), x @ weight.mT, atol=1e-5, rtol=1e-5)


def test_experts_without_rows_are_not_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    from g4tool.kernels import int4

    qdata, scale, zero, _ = quantized(5, 24, 64, group=32)
    made = []
    real = int4.dequantize_int4
    monkeypatch.setattr(int4, "dequantize_int4", lambda *a: made.append(a[0].shape) or real(*a))
    offsets = torch.tensor([0, 3, 3, 3, 3], dtype=torch.int32)
    int4_grouped_mm(torch.randn(3, 64), offsets, qdata, scale, zero)
    # 24 rows of 64 columns in blocks of at most 1000 weights.
    assert made == [(15, 32), (9, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registrations(dtype: torch.dtype) -> None:
    flat = quantized(33, 96, group=32)[:3]
    experts = quantized(4, 24, 64, group=32)[:3]
    x = torch.randn(5, 96, dtype=dtype)
    sorted_rows = torch.randn(6, 64, dtype=dtype)
    offsets = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    index = torch.tensor([[0, 3], [1, 1], [2, 0]])
    torch.library.opcheck(int4_mm, (x, *flat))
    torch.library.opcheck(int4_grouped_mm, (sorted_rows, offsets, *experts))
    torch.library.opcheck(int4_chosen_mm, (sorted_rows.view(3, 2, 64), index, *experts))
    torch.library.opcheck(int4_every_mm, (sorted_rows[None], *experts))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Int4Linear(*quantized(64, 96, group=32)[:3])
        self.experts = Int4ExpertLinear(*quantized(4, 24, 64, group=32)[:3])

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.experts.grouped(F.silu(self.inner(x)), offsets)


def test_compiles_and_exports_with_a_dynamic_length() -> None:
    block = _Block()
    x = torch.randn(6, 96)
    offsets = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    want = block(x, offsets)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, offsets), want)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        block, (x, offsets), dynamic_shapes={"x": {0: length}, "offsets": None}, strict=True
    )
    assert torch.equal(program.module()(x, offsets), want)
    longer = torch.randn(9, 96)
    ends = torch.tensor([0, 9, 9, 9], dtype=torch.int32)
    assert torch.equal(program.module()(longer, ends), block(longer, ends))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"g4.int4_mm.default", "g4.int4_grouped_mm.default"} <= names


def assert_near(got: Tensor, want: Tensor, share: float) -> None:
    """Every value within `share` of the largest."""
    assert (got.double() - want).abs().max() <= share * want.abs().max()
