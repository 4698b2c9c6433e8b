"""Bits found for a size: what was measured is what the recipe builds."""

from pathlib import Path

import pytest
import torch

from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import write_tiny
from g4tool.errors import UsageError
from g4tool.evaluate.corpus import shipped_texts
from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.sweep import RULES
from g4tool.files import write_json
from g4tool.formats.bundle import CONVENTION
from g4tool.quantize import driver, policy
from g4tool.quantize.account import bits_per_weight
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.recipe.load import dump, load_recipe
from g4tool.stages.assign import recipe_of
from g4tool.stages.evaluate import Loaded, account_note, find_assignment, load_subject, measure
from g4tool.stages.quantize import options_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("tiny-26b-a4b")
    write_tiny("tiny-26b-a4b", folder)
    return load_subject("tiny-26b-a4b", folder, torch.float32, "cpu")


def test_the_recipe_builds_what_was_measured(base: Loaded, tmp_path: Path) -> None:
    found = find_assignment(base, shipped_texts(), bits_per_weight=5.3, tokens=256)
    assert found.row.bits_per_weight <= 5.3
    path = tmp_path / "found.yaml"
    path.write_text(dump(recipe_of(found.options, "found", base.name)))
    section = load_recipe(path).quantize
    assert section is not None
    checkpoint = open_checkpoint(base.folder)
    accounts = [
        account
        for unit in driver.units(policy.plan(checkpoint, options_of(section)))
        for account in driver.quantize_unit(checkpoint, unit, tmp_path / unit.file)
    ]
    assert sum(account.nbytes for account in accounts) == found.row.nbytes
    assert bits_per_weight(accounts) == found.row.bits_per_weight
    # More room than int4 in groups of 64 takes (5.07), so some matrices have finer groups.
    assert len({(a.scheme, a.group_size) for a in accounts if a.scheme != "keep"}) > 2


def test_without_a_reference_there_is_only_perplexity(base: Loaded) -> None:
    found = measure(base, None, shipped_texts(), tokens=256)
    assert (found.beside, found.rows) == (None, ())
    assert found.model == "tiny-26b-a4b"


def test_a_bundle_with_experts_in_16_bit_is_told(base: Loaded, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(base.folder)
    keep = QuantizeOptions(rules=(Rule(r"\.experts\.", "keep"), *RULES))
    model, _ = quantized(base.model, checkpoint, policy.plan(checkpoint, keep))
    bundle = Loaded("some/bundle", tmp_path, model, base.tokenizer, True)
    recipe = {"scheme": "int4-hqq", "head": "tied", "rules": []}
    write_json(tmp_path / "g4.json", {**CONVENTION, "recipe": recipe})
    note = account_note(bundle)
    assert note is not None
    assert "some/bundle: layers.0.experts.gate_up_proj and 5 more left in 16 bit" in note
    recipe["rules"] = [vars(rule) for rule in keep.rules]
    write_json(tmp_path / "g4.json", {**CONVENTION, "recipe": recipe})
    assert account_note(bundle) is None


def test_a_bundle_is_no_base(base: Loaded) -> None:
    bundle = Loaded("some/bundle", base.folder, base.model, base.tokenizer, True)
    with pytest.raises(UsageError, match="some/bundle is a bundle: bits are chosen for"):
        find_assignment(bundle, shipped_texts(), bits_per_weight=5.0)
    with pytest.raises(UsageError, match="some/bundle is a bundle: give --against"):
        measure(bundle, None, shipped_texts(), sweep=True)
