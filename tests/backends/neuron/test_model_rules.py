"""One bad model or wish a rule, and the published models as they are meant to be compiled."""

from dataclasses import replace
from typing import Any

import pytest

from g4tool.backends.neuron.findings import Finding, refuse_errors
from g4tool.backends.neuron.memory import RankMemory, rank_memory
from g4tool.backends.neuron.model_rules import check_bundle, check_model
from g4tool.backends.neuron.settings import NeuronOptions, neuron_settings
from g4tool.backends.neuron.targets import GIB, chip
from g4tool.errors import G4Error
from g4tool.model.config import TextConfig
from g4tool.model.variants import VARIANTS
from g4tool.parallel.plan import Layout, make_plan

_E2B, _31B = VARIANTS["e2b"], VARIANTS["31b"]


def _check(
    config: TextConfig,
    options: NeuronOptions,
    settings: dict[str, Any] | None = None,
    raw: dict[str, Any] | None = None,
) -> list[Finding]:
    plan = make_plan(config, options.tp, expert_block=1)
    return check_model(plan, options, {**neuron_settings(options), **(settings or {})}, raw or {})


def _options(tp: int = 1, length: int = 256, target: str = "trn2", lnc: int = 2) -> NeuronOptions:
    return NeuronOptions(tp, 1, length, chip(target), lnc)


_UNEVEN = replace(_E2B, vocab_size=262145, per_layer_vocab_size=262145)
_CASES: dict[str, tuple[str, list[Finding]]] = {
    "NCC_EARG001": ("error", _check(_E2B, _options(target="trn1", lnc=2))),
    "NXDI_CORES": ("error", _check(_31B, _options(32, target="inf2", lnc=1))),
    "NXDI_UNEVEN": ("error", _check(_UNEVEN, _options(2))),
    "NXDI_KV_HEADS": ("warning", _check(_E2B, _options(2))),
    "NXDI_HEAD_DIM": ("error", _check(_E2B, _options(), {"attn_kernel_enabled": True})),
    "NXDI_LENGTH": ("error", _check(_E2B, _options(length=262144))),
    "NXDI_WINDOW": ("warning", _check(_E2B, _options(length=1024))),
    "NXDI_TEXT_ONLY": ("warning", _check(_E2B, _options(), raw={"vision_config": {"x": 1}})),
    "NXDI_NAME": ("error", _check(_E2B, _options(), {"sequence_length": 1})),
    "NCC_EOOM001": ("error", _check(_31B, _options(1))),
    "NCC_EVRF009": ("warning", _check(VARIANTS["12b"], _options(1, 8192))),
}


@pytest.mark.parametrize("code", _CASES)
def test_each_rule(code: str) -> None:
    level, findings = _CASES[code]
    assert (code, level) in [(each.code, each.level) for each in findings]
    others = {f.code for f in findings} - {code}
    if code == "NXDI_UNEVEN":
        assert any("embed_tokens.weight: 131073 rows" in each.message for each in findings)
    # A length beyond the trained one is beyond the window too; many ranks repeat heads.
    assert others <= {"NXDI_WINDOW", "NXDI_KV_HEADS"}


@pytest.mark.parametrize(
    ("variant", "tp", "length"),
    [("e2b", 1, 512), ("e4b", 2, 512), ("12b", 2, 1024), ("26b-a4b", 4, 1024), ("31b", 4, 1024)],
)
def test_the_published_models_have_no_errors(variant: str, tp: int, length: int) -> None:
    findings = _check(VARIANTS[variant], _options(tp, length))
    refuse_errors(findings)
    assert {f.code for f in findings} <= {"NXDI_KV_HEADS"}


def test_full_layers_alone_have_no_window() -> None:
    config = replace(VARIANTS["12b"], layers=VARIANTS["12b"].layers[5::6])
    assert [f.code for f in _check(config, _options(1, 2048))] == []


def test_bundles() -> None:
    """26B-A4B in groups of 32 over 4 ranks: 66 groups of the feed-forward, 22 of an expert."""
    config, options = VARIANTS["26b-a4b"], _options(4, 1024)
    layouts = {
        f"layers.0.{name}.down_proj.weight": Layout("int4", 32) for name in ("mlp", "experts")
    }
    uneven = check_bundle(make_plan(config, 4, layouts), options, {}, RankMemory(1, 1))
    found = {each.code: each for each in uneven}
    assert set(found) == {"NXDI_KV_HEADS", "NXDI_QUANTIZED", "NXDI_UNEVEN"}
    assert found["NXDI_QUANTIZED"].where == "int4"
    assert "544 columns on the first ranks, 512 on the last" in found["NXDI_UNEVEN"].message
    assert all(each.level == "warning" for each in uneven)
    even = check_bundle(make_plan(config, 2, layouts), options, {}, RankMemory(1 << 40, 1))
    assert [each.code for each in even if each.level == "error"] == ["NCC_EOOM001"]
    assert "NXDI_UNEVEN" not in {each.code for each in even}


def test_errors_are_told_together() -> None:
    bad = [
        Finding("NXDI_A", "error", "here", "one."),
        Finding("NXDI_B", "warning", "there", "two."),
        Finding("NXDI_C", "error", "everywhere", "three."),
    ]
    with pytest.raises(G4Error, match=r"NXDI_A \(here\): one\. NXDI_C \(everywhere\): three\."):
        refuse_errors(bad)


def test_memory_of_a_rank() -> None:
    """31B at 4 ranks: a quarter of 57.2 GiB, and caches of 50 rings of 1024 and 10 of 2048."""
    plan = make_plan(_31B, 4, expert_block=1)
    need = rank_memory(plan, 1, 2048, "bfloat16")
    assert need.weights / GIB == pytest.approx(61.4e9 / 4 / GIB, rel=0.005)
    assert need.caches == 2 * 2 * (50 * 4 * 1024 * 256 + 10 * 1 * 2048 * 512)
