"""Options that cannot be meant."""

import pytest

from g4tool.errors import UsageError
from g4tool.quantize.options import QuantizeOptions, Rule, check_options, is_qat_source


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (QuantizeOptions(scheme="int3"), "scheme 'int3'"),  # type: ignore[arg-type]
        (QuantizeOptions(group_size=48), "groups of 48"),
        (QuantizeOptions(group_size=256), "4 bit in groups of 256"),
        (QuantizeOptions(solver="gptq"), "solver 'gptq'"),  # type: ignore[arg-type]
        (QuantizeOptions(scheme="int4-rtn", solver="hqq"), "which is the solver rtn"),
        (QuantizeOptions(scheme="int8", solver="hqq"), "takes no solver"),
        (QuantizeOptions(head="untied"), "head is 'untied'"),  # type: ignore[arg-type]
        (QuantizeOptions(rules=(Rule("(", "keep"),)), "rule 1 .* regular expression"),
        (QuantizeOptions(rules=(Rule("a", "keep", 32),)), "takes no group_size"),
    ],
)
def test_contradiction_is_a_usage_error(options: QuantizeOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(options)


def test_all_sensible_options_pass() -> None:
    check_options(QuantizeOptions())
    check_options(QuantizeOptions(scheme="int4-rtn", solver="rtn", group_size=128))
    check_options(QuantizeOptions(solver="reference", head="int8", rules=(Rule("a", "int8", 256),)))


def test_a_source_trained_for_q4_0_is_known_by_its_name() -> None:
    assert is_qat_source("google/gemma-4-31B-it-qat-q4_0-unquantized")
    assert is_qat_source("/models/gemma-4-E2B-it-qat-q4_0-unquantized/")
    assert not is_qat_source("google/gemma-4-31B-it")
    assert not is_qat_source("google/gemma-4-31B-it-qat-w4a16-ct")
