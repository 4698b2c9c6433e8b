"""The leaves that the CUDA program is compiled from, beside the eager leaves and torch's own."""

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.backends.executorch.fused import attention, groups_experts, make_fused
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear, dequantize_int4
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear, dequantize_int8

N, K, GROUP, EXPERTS = 24, 192, 64, 5


def int4(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    groups = (*lead, K // GROUP, N)
    return (
        torch.randint(0, 256, (*lead, N, K // 2), generator=random, dtype=torch.uint8),
        (torch.rand(groups, generator=random) * 0.02 + 0.001).bfloat16(),
        (torch.randn(groups, generator=random) * 6 + 7.5).bfloat16(),
    )


def int8(*lead: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(-127, 128, (*lead, N, K), generator=random, dtype=torch.int8)
    return codes, (torch.rand(*lead, N, K // group, generator=random) * 1e-2).bfloat16()


def fused(leaf: nn.Module) -> nn.Module:
    holder = nn.Sequential(leaf)
    make_fused(holder)
    assert type(holder[0]) is not type(leaf)
    # Buffers would be copied by the compiler.
    assert dict(holder[0].named_parameters()).keys() == dict(leaf.named_buffers()).keys()
    assert not list(holder[0].named_buffers())
    return holder[0]


def near(found: Tensor, expected: Tensor) -> bool:
    """Whether they differ by one rounding of the dtype and another order of summation."""
    steps = 2 * torch.finfo(found.dtype).eps if found.dtype == torch.bfloat16 else 1e-5
    scale = expected.double().abs().max()
    return bool((found.double() - expected.double()).abs().max() <= steps * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize(
    ("leaf", "weight"),
    [
        (lambda: Int4Linear(*int4()), lambda dtype: dequantize_int4(*int4(), dtype)),
        (lambda: Int8Linear(*int8()), lambda dtype: dequantize_int8(*int8(), dtype)),
        (
            lambda: Int8Linear(*int8(group=K)),
            lambda dtype: dequantize_int8(*int8(group=K), dtype),
        ),
    ],
    ids=["int4", "int8", "int8 a row"],
)
def test_linear(
    leaf: Callable[[], nn.Module],
    weight: Callable[[torch.dtype], Tensor],
    tokens: int,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(1, tokens, K, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = fused(leaf())(x)
    assert (found.shape, found.dtype) == ((1, tokens, N), dtype)
    assert near(found, x.double() @ weight(dtype).double().mT)


@pytest.mark.parametrize("tokens", [1, 3])
def test_head_on_the_embedding(tokens: int) -> None:
    leaf = Int8Embedding(*int8(group=K))
    hidden = torch.randn(1, tokens, K, generator=torch.Generator().manual_seed(4))
    twin = fused(leaf)
    assert near(twin.project(hidden), leaf.project(hidden))
    ids = torch.tensor([[0, 5, N - 1]])
    assert torch.equal(twin(ids), leaf(ids))


@pytest.mark.parametrize(
    ("leaf", "weight"),
    [
        (Int4ExpertLinear(*int4(EXPERTS)), dequantize_int4(*int4(EXPERTS), torch.float32)),
        (Int8ExpertLinear(*int8(EXPERTS)), dequantize_int8(*int8(EXPERTS), torch.float32)),
    ],
    ids=["int4", "int8"],
)
def test_experts(leaf: nn.Module, weight: Tensor) -> None:
    twin = fused(leaf)
    random = torch.Generator().manual_seed(5)
    x = torch.randn(3, 2, K, generator=random)
    index = torch.tensor([[4, 0], [1, 1], [2, 3]])
    found = twin.chosen(x, index)
    assert near(found, torch.einsum("rkc,rknc->rkn", x, weight[index]))
    for experts in (1, EXPERTS):
        x = torch.randn(experts, 6, K, generator=random)
        assert near(twin.every(x), torch.einsum("erc,enc->ern", x.expand(EXPERTS, -1, -1), weight))


def test_other_leaves_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = list(model)
    make_fused(model)
    assert list(model) == before


@pytest.mark.parametrize("scale", [None, 1.0, 0.25])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("rows", [5, 17])
def test_attention_is_torchs(rows: int, heads: int, scale: float | None) -> None:
    random = torch.Generator().manual_seed(6)
    query = torch.randn(1, 4, rows, 16, generator=random)
    key, value = (torch.randn(1, heads, 9, 16, generator=random) for _ in range(2))
    hidden = torch.rand(rows, 9, generator=random) < 0.4
    mask = torch.zeros(1, 1, rows, 9).masked_fill(hidden, -torch.inf)
    mask[..., 0] = 0
    given = {"attn_mask": mask, "scale": scale, "enable_gqa": heads != 4}
    expected = F.scaled_dot_product_attention(query, key, value, **given)  # type: ignore[arg-type]
    found = attention(query, key, value, **given)  # type: ignore[arg-type]
    assert (found - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("rows", [1, 17])
def test_scores_of_16_bit_inputs_are_not_rounded(rows: int) -> None:
    random = torch.Generator().manual_seed(7)
    query, key = (torch.randn(1, 2, n, 64, generator=random).bfloat16() * 4 for n in (rows, 40))
    value = torch.eye(40).bfloat16().expand(1, 2, 40, 40)
    found = attention(query, key, value, scale=1.0)
    scores = query.double() @ key.double().mT
    expected = torch.softmax(scores, -1)
    # Scores of some 100 rounded to bf16 would be off by 0.25, and the weights by a quarter.
    assert (found.double() - expected).abs().max() <= 2**-8


def test_kernels_for_one_row() -> None:
    """In Triton's interpreter: TRITON_INTERPRET=1, before anything imports triton."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 python -m pytest for this file")
    random = torch.Generator().manual_seed(8)
    x = torch.randn(1, 1, K, generator=random).bfloat16()
    leaf = Int4Linear(*int4())
    holder = nn.Sequential(leaf)
    make_fused(holder, triton=True)
    expected = x.double() @ dequantize_int4(*int4(), torch.float32).double().mT
    assert near(holder(x), expected)

    experts = Grouped(Int4ExpertLinear)
    make_fused(experts, triton=True)
    weight = dequantize_int4(*int4(EXPERTS), torch.float32).double()
    rows = torch.randn(1, 3, K, generator=random).bfloat16()
    index = torch.tensor([[4, 0, 1]])
    found = experts.gate_up_proj.chosen(rows, index)  # type: ignore[operator]
    assert near(found, torch.einsum("rkc,rknc->rkn", rows.double(), weight[index]))


class Grouped(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        parts = int4(EXPERTS) if kind is Int4ExpertLinear else int8(EXPERTS)
        self.gate_up_proj = kind(*parts)
        self.down_proj = kind(*parts)


def test_only_leaves_that_the_kernels_take_use_them() -> None:
    pytest.importorskip("triton")
    model = nn.Sequential(Int4Linear(*int4()), Int8Linear(*int8(group=K)), Int8Linear(*int8()))
    make_fused(model, triton=True)
    assert [getattr(leaf, "triton", False) for leaf in model] == [True, False, False]
    for kind, groups in ((Int4ExpertLinear, True), (Int8ExpertLinear, False)):
        experts = Grouped(kind)
        make_fused(experts, triton=True)
        assert groups_experts(experts) == groups  # type: ignore[arg-type]
        assert not groups_experts(Grouped(kind))  # type: ignore[arg-type]


def test_attention_refuses_what_it_does_not_compute() -> None:
    x = torch.ones(1, 2, 3, 4)
    for given in (
        {"is_causal": True},
        {"dropout_p": 0.1},
        {"attn_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)},
    ):
        with pytest.raises(ValueError, match="takes an additive mask"):
            attention(x, x, x, **given)  # type: ignore[arg-type]
