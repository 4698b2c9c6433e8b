"""Every scheme beside the reference."""

from importlib.util import find_spec

import pytest

from g4tool.evaluate.sweep import RULES, schemes, sweep
from g4tool.quantize.options import QuantizeOptions

from .conftest import GetTiny


def test_what_is_tried() -> None:
    tried = schemes()
    names = [(name, options.group_size) for name, options in tried if name != "int8"]
    wanted = ["int4-hqq", "int4-rtn", "int4-sym"]
    wanted += ["reference hqq"] if find_spec("hqq") else []
    assert names == [(name, group) for name in wanted for group in (32, 64, 128)]
    assert dict(tried)["int8"].scheme == "int8"


def test_rows_hold_the_reference_and_each_scheme(tiny: GetTiny) -> None:
    found = tiny("tiny-26b-a4b")
    tried = [
        ("int8", QuantizeOptions("int8", rules=RULES)),
        ("int4-hqq", QuantizeOptions("int4-hqq", 32, rules=RULES)),
        ("int4-hqq", QuantizeOptions("int4-hqq", 128, rules=RULES)),
        ("int4-rtn", QuantizeOptions("int4-rtn", 128, rules=RULES)),
    ]
    plain, int8, fine, coarse, rtn = sweep(found.reference, found.checkpoint, tried)
    assert (plain.label, plain.bits_per_weight, plain.fidelity.kl_mean) == ("bf16", 16.0, 0.0)
    assert plain.nbytes == sum(
        found.checkpoint.info(name).nbytes for name in found.checkpoint.names
    )
    assert fine.label == "int4-hqq g32"
    assert int8.label == "int8"
    assert coarse.nbytes < fine.nbytes < int8.nbytes < plain.nbytes
    assert rtn.nbytes == coarse.nbytes
    assert 0 < int8.fidelity.kl_mean < fine.fidelity.kl_mean < coarse.fidelity.kl_mean
    assert coarse.fidelity.kl_mean < rtn.fidelity.kl_mean
    assert fine.prediction.perplexity == pytest.approx(
        plain.prediction.perplexity * 2.718281828459045**fine.fidelity.log_ratio
    )
