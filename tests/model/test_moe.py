"""Three ways to run experts, one result."""

import pytest
import torch

from g4tool.errors import G4Error
from g4tool.model.config import MoeConfig
from g4tool.model.moe import ExpertLinear, Experts, Router, grouped_mm

MOE = MoeConfig(num_experts=8, top_k=3, intermediate_size=24)
DIM = 16


def token_by_token(experts: Experts, x, weights, index):
    """The definition, one token and one expert at a time, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], index[token], strict=True):
            gate_up = experts.gate_up_proj.weight[expert].double() @ x[token].double()
            gate, up = gate_up.chunk(2)
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            out[token] += weight * (experts.down_proj.weight[expert].double() @ inner)
    return out.float()


@pytest.fixture
def experts():
    torch.manual_seed(0)
    return Experts(DIM, MOE)


@torch.no_grad()
def test_gathered_grouped_and_every_are_equal(experts):
    torch.manual_seed(1)
    x = torch.randn(11, DIM)
    # Expert 5 is never chosen and expert 0 always, so that groups are empty, unequal and full.
    index = torch.stack([torch.tensor([0, 1 + t % 4, 6 + t % 2]) for t in range(11)])
    weights = torch.rand(11, 3)
    expected = token_by_token(experts, x, weights, index)
    assert expected.abs().max() > 0.3
    gathered = experts._gathered(x[:, None], weights, index)[:, 0]
    torch.testing.assert_close(gathered, expected, atol=2e-6, rtol=1e-5)
    for method in (experts._grouped, experts._every):
        torch.testing.assert_close(method(x, weights, index), expected, atol=2e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("batch", "length", "prefill", "used"),
    [
        (2, 1, "grouped", "chosen"),
        (3, 1, "grouped", "grouped"),  # 9 copies of 8 experts: not worth gathering
        (1, 2, "grouped", "grouped"),
        (1, 2, "every", "every"),
        (2, 1, "every", "chosen"),
    ],
)
def test_prefill_never_gathers(experts, monkeypatch, batch, length, prefill, used):
    called = set()
    for name in ("chosen", "grouped", "every"):
        original = getattr(ExpertLinear, name)

        def spy(self, *args, name=name, original=original):
            called.add(name)
            return original(self, *args)

        monkeypatch.setattr(ExpertLinear, name, spy)
    experts.prefill = prefill
    router = Router(DIM, MOE, 1e-6)
    x = torch.randn(batch, length, DIM)
    out = experts(x, *router(x))
    assert out.shape == x.shape
    assert called == {used}


@torch.no_grad()
def test_bfloat16_grouped_equals_a_loop():
    torch.manual_seed(2)
    weight = torch.randn(4, 24, 16, dtype=torch.bfloat16)
    x = torch.randn(10, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    expected = torch.cat([x[:3] @ weight[0].T, x[3:7] @ weight[2].T, x[7:] @ weight[3].T])
    torch.testing.assert_close(grouped_mm(x, weight, offsets), expected)


def test_grouped_operator_is_well_formed():
    x, weight = torch.randn(6, 16), torch.randn(3, 8, 16)
    offsets = torch.tensor([1, 4, 6], dtype=torch.int32)
    torch.library.opcheck(grouped_mm, (x, weight, offsets))


@torch.no_grad()
def test_router_weights_sum_to_the_scales_of_the_chosen():
    torch.manual_seed(3)
    router = Router(DIM, MOE, 1e-6)
    x = torch.randn(5, DIM)
    weights, index = router(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    router.per_expert_scale.copy_(torch.arange(8.0))
    scaled, _ = router(x)
    torch.testing.assert_close(scaled, weights * index)


def test_odd_sizes_are_refused():
    with pytest.raises(G4Error, match="multiples of 8"):
        ExpertLinear(4, 20, 16)
