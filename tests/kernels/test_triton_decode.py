"""What lies between matrix products, against the plain arithmetic; sizes that fill no block."""

import pytest
import torch
from torch import Tensor, nn

from g4tool.model.arithmetic import PLAIN
from g4tool.model.cache import Span
from g4tool.model.config import MoeConfig
from g4tool.model.moe import Router
from g4tool.model.norm import RMSNorm, rms_norm
from g4tool.model.rope import rotate

from .interpreter import DEVICE, loops_over_tensors, needs_triton  # noqa: F401

pytestmark = needs_triton

EPS = 1e-6


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def norm_of(dim: int, dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(dim, EPS).to(DEVICE, dtype)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "splits", "dim"), [(1, 3, 40), (1, 1, 264), (5, 1, 72)])
@torch.no_grad()
def test_join(rows: int, splits: int, dim: int, dtype: torch.dtype) -> None:
    from g4tool.kernels.triton_decode import join

    x, after, before = values(rows, dim, dtype=dtype), norm_of(dim, dtype), norm_of(dim, dtype)
    parts = values(splits, dim) if rows == 1 else values(rows, dim)
    branch = (parts.sum(0, keepdim=True) if rows == 1 else parts).to(dtype)
    factor = torch.tensor([0.7], device=DEVICE, dtype=dtype)
    close = {"atol": 5e-3, "rtol": 5e-3} if dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-5}
    for scale, last in ((None, None), (factor, before), (None, before)):
        stream = PLAIN.join(x, branch, after)[0] * (1 if scale is None else scale)
        want = stream, stream if last is None else last(stream)
        weight = None if last is None else last.weight
        got = join(x, EPS, parts, after.weight, scale, weight)
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(mine, plain, **close)


@torch.no_grad()
def test_what_is_packed_is_what_pack_rows_makes() -> None:
    from g4tool.kernels.triton_decode import gated, join
    from g4tool.kernels.triton_int4 import empty_packed, pack_rows

    x, norm = values(1, 96), norm_of(96)
    packed = empty_packed(1, 96, x.device)
    _, given = join(x, EPS, before=norm.weight, packed=packed)
    torch.testing.assert_close(given, norm(x))
    same_packed(packed, pack_rows(given))
    parts = values(2, 3, 2 * 96)
    plain, packed = gated(parts, torch.float32)
    torch.testing.assert_close(plain, PLAIN.gated_halves(parts.sum(0)), atol=1e-5, rtol=1e-5)
    same_packed(packed, pack_rows(plain))


def same_packed(got: Tensor, want: Tensor) -> None:
    words = got.shape[1] // 9
    assert torch.equal(got[:, : 8 * words], want[:, : 8 * words])
    # Sums of eight, in an order that is the kernel's own.
    torch.testing.assert_close(got[:, 8 * words :], want[:, 8 * words :], atol=1e-5, rtol=1e-5)


def test_gates() -> None:
    from g4tool.kernels.triton_decode import gate_into, gated_by

    gate, up = values(1, 3, 700), values(1, 3, 700)
    want = PLAIN.gated([gate, up])
    assert gate_into(gate, up) is gate
    torch.testing.assert_close(gate, want, atol=1e-5, rtol=1e-5)
    parts, other = values(4, 64), values(64)
    want = PLAIN.gated_by(parts.sum(0), other)
    torch.testing.assert_close(gated_by(parts, other)[0], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("length", "heads", "size"), [(3, 2, 32), (37, 3, 64)])
@torch.no_grad()
def test_head_rows(length: int, heads: int, size: int) -> None:
    from g4tool.kernels.triton_rows import normed_rows, turned_rows

    x, norm = values(1, length, heads, size), norm_of(size)
    cos, sin = values(1, length, 1, size // 2), values(1, length, 1, size // 2)
    want = PLAIN.turned(x, norm, Span(cos, sin, None))
    assert want.equal(rotate(norm(x), cos, sin))
    got = turned_rows(x, EPS, norm.weight, cos, sin)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed_rows(x, EPS), rms_norm(x, EPS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("experts", "top", "dim"), [(8, 2, 40), (128, 8, 72)])
@torch.no_grad()
def test_router(experts: int, top: int, dim: int) -> None:
    from g4tool.kernels.triton_router import route

    router = Router(dim, MoeConfig(experts, top, 8), EPS).to(DEVICE)
    nn.init.uniform_(router.scale, 0.5, 1.5)
    nn.init.uniform_(router.per_expert_scale, 0.5, 1.5)
    for _ in range(3):
        x = values(dim)
        weights, index = route(
            x, router.proj.weight, router.scale, router.per_expert_scale, EPS, router.root, top
        )
        want_weights, want_index = router(x)
        assert torch.equal(index, want_index)
        torch.testing.assert_close(weights, want_weights, atol=1e-5, rtol=1e-5)
