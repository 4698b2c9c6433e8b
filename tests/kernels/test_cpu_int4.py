"""torch's CPU layout of int4: the same weights, in place, and never nearer to bf16 than it says."""

import pytest
import torch
from torch import Tensor, nn

from g4tool.kernels import blocks, cpu_int4
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear, dequantize_int4

needs_kernel = pytest.mark.skipif(
    cpu_int4.block_rows() is None, reason="torch has no such kernel on this machine"
)


def parts(*shape: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    *lead, count, columns = shape
    qdata = torch.randint(0, 256, (*lead, count, columns // 2), generator=random).to(torch.uint8)
    per_group = (*lead, columns // group, count)
    scale = (torch.rand(per_group, generator=random) * 0.02 + 0.001).bfloat16()
    zero = (torch.randn(per_group, generator=random) * 2 + 7.5).bfloat16()
    return qdata, scale, zero


def prepared(module: nn.Module, replaced: int = 1) -> nn.Module:
    model = nn.Sequential(module)
    assert cpu_int4.prepare(model, torch.bfloat16) == replaced
    return model[0]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65, 130])
@pytest.mark.parametrize(
    ("count", "columns", "group"), [(64, 32, 32), (448, 256, 64), (192, 384, 128)]
)
def test_no_farther_from_the_weight_than_bf16(
    count: int, columns: int, group: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_CPU", 40_000)
    stored = parts(count, columns, group=group)
    weight = dequantize_int4(*stored, torch.float64)
    twin = prepared(Int4Linear(*(part.clone() for part in stored)))
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(1))
    for dtype, most in ((torch.bfloat16, 2**-8), (torch.float32, 2**-9)):
        got = twin(x.to(dtype))
        assert got.dtype == dtype
        assert error(got, x.to(dtype).double() @ weight.T) < most
    assert twin(x[0, 0].bfloat16()).shape == (count,)
    assert twin(x[:, :0].bfloat16()).shape == (2, 0, count)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_that_bf16_would_round_stay_as_they_are(dtype: torch.dtype) -> None:
    qdata, scale, zero = parts(64, 64, group=32)
    prepared(Int4Linear(qdata.clone(), scale.to(dtype), zero))
    finer = scale.to(dtype)
    finer[1, 5] *= 1 + 2**-9
    kept = prepared(Int4Linear(qdata, finer, zero), replaced=0)
    assert type(kept) is Int4Linear
    assert torch.equal(kept.scale, finer)


@needs_kernel
def test_takes_the_bytes_that_were_there() -> None:
    module = Int4Linear(*parts(192, 256, group=32))
    where, before = module.qdata.data_ptr(), sum(b.nbytes for b in module.buffers())
    twin = prepared(module)
    assert twin.packed.data_ptr() == where
    assert sum(b.nbytes for b in twin.buffers()) == before


@needs_kernel
def test_experts_choose_group_and_take_every() -> None:
    stored = parts(5, 64, 128, group=32)
    weight = dequantize_int4(*stored, torch.float64)
    twin = prepared(Int4ExpertLinear(*(part.clone() for part in stored)))
    random = torch.Generator().manual_seed(2)
    index = torch.randint(0, 5, (3, 2), generator=random)
    x = torch.randn(3, 2, 128, generator=random).bfloat16()
    want = (weight[index] @ x.double().unsqueeze(-1)).squeeze(-1)
    assert error(twin.chosen(x, index), want) < 2**-8
    ends = torch.tensor([2, 2, 2, 5, 6], dtype=torch.int32)
    numbers = torch.tensor([0, 0, 3, 3, 3, 4])
    rows = x.view(6, 128)
    want = (weight[numbers] @ rows.double().unsqueeze(-1)).squeeze(-1)
    assert error(twin.grouped(rows, ends), want) < 2**-8
    assert error(twin.every(rows[None]), rows.double() @ weight.mT) < 2**-8


def test_leaves_alone_what_the_kernel_does_not_take() -> None:
    ragged = Int4Linear(*parts(72, 64, group=32))
    odd_group = Int4Linear(*parts(64, 96, group=96))
    for module in (ragged, odd_group):
        assert prepared(module, replaced=0) is module
    model = nn.Sequential(Int4Linear(*parts(64, 64, group=32)))
    assert cpu_int4.prepare(model, torch.float32) == 0
    assert isinstance(model[0], Int4Linear)


def test_another_layout_of_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "_convert_weight_to_int4pack_for_cpu", lambda codes, _: codes[:, ::2].byte()
    )
    cpu_int4.block_rows.cache_clear()
    try:
        assert cpu_int4.block_rows() is None
        model = nn.Sequential(Int4Linear(*parts(64, 64, group=32)))
        assert cpu_int4.prepare(model, torch.bfloat16) == 0
    finally:
        cpu_int4.block_rows.cache_clear()
