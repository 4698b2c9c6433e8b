"""Where error arises: measured again here by hand."""

import math

import pytest
import torch

from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.layers import alone, layer_noise, weight_errors
from g4tool.evaluate.leaves import leaves, swapped, twin, value_blocks
from g4tool.evaluate.scores import compare
from g4tool.evaluate.summary import fidelity
from g4tool.evaluate.sweep import DEFAULT
from g4tool.model.text import TextModel
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.policy import plan

from .conftest import GetTiny, Tiny

NAMES = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")


def candidate(found: Tiny, options: QuantizeOptions = DEFAULT) -> TextModel:
    return quantized(found.model, found.checkpoint, plan(found.checkpoint, options))[0]


@pytest.mark.parametrize("name", NAMES)
def test_weight_errors_are_those_of_the_account(tiny: GetTiny, name: str) -> None:
    found = tiny(name)
    model, accounts = quantized(found.model, found.checkpoint, plan(found.checkpoint, DEFAULT))
    errors = {f"{w.name}.weight": w for w in weight_errors(found.model, model)}
    matrices = [a for a in accounts if len(a.shape) > 1]
    assert set(errors) == {a.name for a in matrices}
    for account in matrices:
        error = errors[account.name]
        assert error.error == pytest.approx(account.rel_error, rel=1e-4)
        assert error.scheme == {"keep": "float32"}.get(account.scheme, account.scheme[:4])
    assert errors["embed_tokens.weight"].layer is None
    assert errors["layers.1.mlp.up_proj.weight"].layer == 1
    assert errors["layers.1.mlp.up_proj.weight"].kind == "mlp.up_proj"


def test_noise_of_each_layer_fed_the_references_input(tiny: GetTiny) -> None:
    found = tiny("tiny-31b")
    damaged = twin(found.model)
    # Adds exactly one percent to the output of layer 2, and leaves the others alone.
    damaged.layers[2].layer_scalar = found.model.layers[2].layer_scalar * 1.01
    noise = layer_noise(found.reference, damaged)
    assert [n.sqnr for n in noise if n.layer != 2] == [None] * 5
    assert noise[2].sqnr == pytest.approx(-20 * math.log10(0.01), abs=1e-3)
    assert not any(layer._forward_hooks for layer in found.model.layers)


@pytest.mark.parametrize("name", NAMES)
def test_one_part_alone_is_a_bundle_with_only_that_part(tiny: GetTiny, name: str) -> None:
    found = tiny(name)
    parts = {item.part: item.kl for item in alone(found.reference, candidate(found))}
    last = found.model.config.num_layers - 1
    assert list(parts) == ["outside the layers", *(f"layer {n}" for n in range(last + 1))]
    rules = (Rule(rf"^layers\.{last}\.", "int4-hqq", 32), Rule(".", "keep"))
    only = candidate(found, QuantizeOptions(rules=rules))
    wanted = fidelity(found.reference, compare(found.reference, only)).kl_mean
    assert parts[f"layer {last}"] == pytest.approx(wanted, rel=1e-5)
    assert parts["outside the layers"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_values_are_what_the_modules_multiply_with(tiny: GetTiny, name: str) -> None:
    found = tiny(name)
    model = candidate(found)
    modules = leaves(model)
    x = torch.randn(3, 128)
    linear = modules["layers.0.self_attn.q_proj"]
    whole = torch.cat(list(value_blocks(linear)))
    torch.testing.assert_close(linear(x), x @ whole.T)
    table = torch.cat(list(value_blocks(modules["embed_tokens"])))
    ids = torch.tensor([0, 7, 4095])
    torch.testing.assert_close(modules["embed_tokens"](ids), table[ids])
    if name == "tiny-26b-a4b":
        experts = modules["layers.0.experts.down_proj"]
        whole = torch.cat(list(value_blocks(experts)))
        x = torch.randn(1, 3, whole.shape[-1])
        torch.testing.assert_close(experts.every(x), x @ whole.transpose(1, 2))


def test_swapped_gives_everything_back(tiny: GetTiny) -> None:
    model = tiny("tiny-31b").model
    other = torch.nn.Linear(1, 1)
    own = model.get_submodule("layers.0.mlp.up_proj")
    with swapped(model, {"layers.0.mlp.up_proj": other}):
        assert model.get_submodule("layers.0.mlp.up_proj") is other
    assert model.get_submodule("layers.0.mlp.up_proj") is own


def test_a_twin_shares_tensors_but_not_modules(tiny: GetTiny) -> None:
    model = tiny("tiny-31b").model
    other = twin(model)
    assert other is not model
    assert other.layers[0] is not model.layers[0]
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours is theirs
