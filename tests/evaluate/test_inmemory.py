"""A model quantized in memory is the model that its bundle loads as."""

from pathlib import Path

import pytest
import torch

from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.sweep import RULES
from g4tool.files import write_json
from g4tool.formats.load import load_bundle
from g4tool.quantize import account, bundle, driver, policy
from g4tool.quantize.options import QuantizeOptions

from .conftest import GetTiny, Tiny


def written(found: Tiny, options: QuantizeOptions, folder: Path) -> list[account.TensorAccount]:
    """The bundle in `folder`, as the quantize stage writes it; its account."""
    plans = policy.plan(found.checkpoint, options)
    units = driver.units(plans)
    accounts = []
    for unit in units:
        accounts += driver.quantize_unit(found.checkpoint, unit, folder / unit.file)
    facts = bundle.lineage(found.checkpoint, accounts, source={}, recipe={}, versions={})
    write_json(folder / "g4.json", facts)
    write_json(folder / "config.json", bundle.bundle_config(found.checkpoint, options, plans))
    write_json(folder / "model.safetensors.index.json", bundle.bundle_index(units))
    return accounts


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny-31b", QuantizeOptions("int4-hqq", 64, rules=RULES)),
        ("tiny-e2b", QuantizeOptions("int4-hqq", 128, rules=RULES)),
        ("tiny-e2b", QuantizeOptions("int8", rules=RULES)),
        ("tiny-26b-a4b", QuantizeOptions("int4-sym", 32, rules=RULES)),
        ("tiny-26b-a4b", QuantizeOptions("int4-hqq", 128, solver="reference", rules=RULES)),
    ],
)
def test_logits_and_account_are_the_bundles(
    tiny: GetTiny, tmp_path: Path, name: str, options: QuantizeOptions
) -> None:
    found = tiny(name)
    accounts = written(found, options, tmp_path)
    stored = load_bundle(tmp_path, torch.float32)
    plans = policy.plan(found.checkpoint, options)
    model, made = quantized(found.model, found.checkpoint, plans)
    assert {a.name: a for a in made} == {a.name: a for a in accounts}
    ids = torch.tensor([found.windows[0].ids])
    with torch.inference_mode():
        assert torch.equal(model(ids), stored(ids))


def test_the_model_it_is_made_from_stays_as_it_is(tiny: GetTiny) -> None:
    found = tiny("tiny-31b")
    ids = torch.tensor([found.windows[0].ids])
    with torch.inference_mode():
        before = found.model(ids)
        plans = policy.plan(found.checkpoint, QuantizeOptions(rules=RULES))
        quantized(found.model, found.checkpoint, plans)
        assert torch.equal(found.model(ids), before)
