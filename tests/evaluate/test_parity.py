"""Parity passes for transformers' implementation and says what differs otherwise."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.parity import Subject, parity, passed, quantized_check
from g4tool.evaluate.sweep import DEFAULT
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.policy import plan

from .conftest import GetTiny


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_transformers_is_the_same_model(tiny: GetTiny, name: str) -> None:
    found = tiny(name)
    oracle = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32).eval()
    ids = [window.ids for window in found.windows[:2]]
    checks = parity(Subject(lambda tokens: oracle(tokens).logits, ids), Subject(found.model, ids))
    assert [check.name for check in checks] == ["token ids", "logits"]
    assert passed(checks), checks


def test_the_first_different_token_is_named(tiny: GetTiny) -> None:
    model = tiny("tiny-31b").model
    (check,) = parity(Subject(model, [[2, 5, 6]]), Subject(model, [[2, 5, 7]]))
    assert not check.passed
    assert check.detail == "Sequence 0 differs from token 2 on."
    (check,) = parity(Subject(model, [[2, 5, 6]]), Subject(model, [[2, 5]]))
    assert check.detail == "Sequence 0 differs from token 2 on."


def test_a_logit_beyond_the_tolerance_is_named(tiny: GetTiny) -> None:
    model = tiny("tiny-31b").model

    def off(ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids).clone()
        logits[0, 1, 77] += 0.01
        return logits

    ids = [[2, 5, 6], [2, 9, 10]]
    check = parity(Subject(model, ids), Subject(off, ids))[1]
    assert not check.passed
    assert "1.00e-02 (sequence 0, token 1; tolerance 1e-03)" in check.detail
    assert parity(Subject(model, ids), Subject(off, ids), tolerance=0.02)[1].passed


def test_nan_is_never_within_tolerance(tiny: GetTiny) -> None:
    model = tiny("tiny-31b").model
    broken = Subject(lambda ids: model(ids) * torch.nan, [[2, 5]])
    assert not passed(parity(Subject(model, [[2, 5]]), broken))


def test_what_is_left_in_16_bit_is_named_unless_exempt(tiny: GetTiny) -> None:
    found = tiny("tiny-26b-a4b")
    full, _ = quantized(found.model, found.checkpoint, plan(found.checkpoint, DEFAULT))
    assert quantized_check(full).passed
    kept = QuantizeOptions(rules=(Rule(r"\.experts\.", "keep"), *DEFAULT.rules))
    without, _ = quantized(found.model, found.checkpoint, plan(found.checkpoint, kept))
    check = quantized_check(without)
    assert not check.passed
    assert "layers.0.experts.gate_up_proj and 5 more left in 16 bit" in check.detail
    assert quantized_check(without, exempt=[r"\.experts\."]).passed
