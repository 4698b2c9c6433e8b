import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from g4tool.kernels import blocks
from g4tool.kernels.int8 import (
    Int8Embedding,
    Int8ExpertLinear,
    Int8Linear,
    dequantize_int8,
    int8_chosen_mm,
    int8_every_mm,
    int8_grouped_mm,
    int8_mm,
)

# Output rows, columns, group; the last two have one scale a row.
SHAPES = [(7, 32, 32), (130, 192, 64), (65, 256, 128), (33, 80, 80), (1, 704, 704)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_CPU", 1000)


def quantized(*shape: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """qdata and scale at random, and the weight by the definition, in fp32."""
    random = torch.Generator().manual_seed(0)
    qdata = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
    per_group = (*shape[:-1], shape[-1] // group)
    scale = (torch.rand(per_group, generator=random) * 0.002 + 1e-4).bfloat16()
    return qdata, scale, qdata.float() * scale.float().repeat_interleave(group, -1)


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
@pytest.mark.parametrize(("count", "columns", "group"), SHAPES)
def test_linear_equals_linear_on_the_weight(
    count: int, columns: int, group: int, rows: int
) -> None:
    qdata, scale, weight = quantized(count, columns, group=group)
    assert torch.equal(dequantize_int8(qdata, scale, torch.bfloat16), weight.bfloat16())
    layer = Int8Linear(qdata, scale)
    for dtype, share in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        x = torch.randn(rows, columns, dtype=dtype)
        want = F.linear(x.double(), weight.to(dtype).double())
        got = layer(x)
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() <= share * want.abs().max()


@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_gives_rows_and_scores(group: int, dtype: torch.dtype) -> None:
    qdata, scale, weight = quantized(50, 96, group=group)
    table = Int8Embedding(qdata, scale.to(dtype))
    ids = torch.tensor([[0, 49, 7], [7, 7, 1]])
    assert torch.equal(table(ids), F.embedding(ids, weight.to(dtype)))
    hidden = torch.randn(2, 3, 96, dtype=dtype)
    want = F.linear(hidden.double(), weight.to(dtype).double())
    share = 1e-5 if dtype == torch.float32 else 2**-8
    assert (table.project(hidden).double() - want).abs().max() <= share * want.abs().max()


def test_a_scale_finer_than_the_activations_is_not_rounded() -> None:
    qdata, scale, _ = quantized(64, 96, group=96)
    scale = scale.float() * (1 + 2**-9)
    weight = dequantize_int8(qdata, scale, torch.float64)
    table = Int8Embedding(qdata, scale, torch.empty(0, dtype=torch.bfloat16))
    ids = torch.tensor([[0, 63, 7]])
    assert torch.equal(table(ids), F.embedding(ids, weight.bfloat16()))
    # One row that picks a column out shows the weights themselves.
    hidden = torch.eye(96, dtype=torch.bfloat16)[:3]
    assert torch.equal(table.project(hidden), weight.bfloat16().T[:3])


@pytest.mark.parametrize("group", [32, 64])
def test_experts_equal_the_weight_itself(group: int) -> None:
    qdata, scale, weight = quantized(5, 48, 64, group=group)
    layer = Int8ExpertLinear(qdata, scale)
    near = {"atol": 1e-5, "rtol": 1e-5}
    index = torch.randint(0, 5, (17, 2))
    x = torch.randn(17, 2, 64)
    want = (weight[index] @ x.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(layer.chosen(x, index), want, **near)
    numbers, order = index.flatten().sort()
    ends = torch.bincount(numbers, minlength=5).cumsum(0).int()
    got = layer.grouped(x.flatten(0, 1)[order], ends)
    torch.testing.assert_close(got, want.flatten(0, 1)[order], **near)
    one = torch.tensor([0, 0, 0, 34, 34], dtype=torch.int32)
    alone = layer.grouped(x.flatten(0, 1), one)
    torch.testing.assert_close(alone, x.flatten(0, 1) @ weight[3].T, **near)
    torch.testing.assert_close(layer.every(x[:1]), x[:1] @ weight.mT, **near)


def test_registrations() -> None:
    flat = quantized(33, 96, group=32)[:2]
    experts = quantized(4, 24, 64, group=64)[:2]
    rows = torch.randn(6, 64)
    index = torch.tensor([[0, 3], [1, 1], [2, 0]])
    offsets = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    torch.library.opcheck(int8_mm, (torch.randn(5, 96), *flat))
    torch.library.opcheck(int8_grouped_mm, (rows, offsets, *experts))
    torch.library.opcheck(int8_chosen_mm, (rows.view(3, 2, 64), index, *experts))
    torch.library.opcheck(int8_every_mm, (rows[None], *experts))


def test_embedding_exports() -> None:
    table = Int8Embedding(*quantized(50, 96, group=96)[:2])
    ids = torch.tensor([[0, 49, 7]])
    program = torch.export.export(table, (ids,), strict=True)
    assert torch.equal(program.module()(ids), table(ids))
    compiled = torch.compile(table.project, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(2, 96).bfloat16()
    assert torch.equal(compiled(hidden), table.project(hidden))
