"""Losses against transformers' own, KL against torch's."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from g4tool.errors import G4Error
from g4tool.evaluate import scores
from g4tool.evaluate.leaves import twin
from g4tool.evaluate.scores import compare, observe

from .conftest import GetTiny


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_losses_are_those_of_transformers(tiny: GetTiny, name: str) -> None:
    found = tiny(name)
    oracle = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32).eval()
    for window, losses in list(zip(found.windows, found.reference.losses, strict=True))[:2]:
        ids = torch.tensor([window.ids])
        with torch.no_grad():
            wanted = oracle(ids, labels=ids).loss
        assert losses.numel() == window.scored
        torch.testing.assert_close(losses.mean(), wanted, rtol=1e-5, atol=1e-5)


def test_kl_and_agreement_by_position(tiny: GetTiny) -> None:
    found = tiny("tiny-31b")
    other = twin(found.model)
    other.norm.weight = torch.nn.Parameter(found.model.norm.weight * 1.05, requires_grad=False)
    difference = compare(found.reference, other)
    ids = torch.tensor([found.windows[0].ids[:-1]])
    with torch.no_grad():
        ours, theirs = found.model(ids)[0], other(ids)[0]
    wanted = F.kl_div(
        F.log_softmax(theirs, -1), F.log_softmax(ours, -1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(difference.kl[0], wanted, rtol=1e-3, atol=1e-6)
    assert torch.equal(difference.agree[0], ours.argmax(-1) == theirs.argmax(-1))
    apart = (F.log_softmax(theirs, -1) - F.log_softmax(ours, -1)).abs().amax(-1)
    torch.testing.assert_close(difference.gap[0], apart)
    following = torch.tensor(found.windows[0].ids[1:])
    torch.testing.assert_close(
        difference.losses[0], F.cross_entropy(theirs, following, reduction="none")
    )


def test_a_model_beside_itself_is_exactly_equal(tiny: GetTiny) -> None:
    found = tiny("tiny-e2b")
    difference = compare(found.reference, found.model)
    assert all(not kl.any() for kl in difference.kl)
    assert all(agree.all() for agree in difference.agree)
    for ours, theirs in zip(found.reference.losses, difference.losses, strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_of_positions_do_not_show(tiny: GetTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tiny("tiny-31b")
    monkeypatch.setattr(scores, "_BLOCK", 7 * found.model.config.vocab_size)
    again = observe(found.model, found.windows[:1])
    torch.testing.assert_close(again.losses[0], found.reference.losses[0], rtol=1e-5, atol=1e-5)


def test_scores_that_are_no_numbers_are_an_error(tiny: GetTiny) -> None:
    found = tiny("tiny-31b")
    broken = twin(found.model)
    broken.norm.weight = torch.nn.Parameter(
        torch.full_like(found.model.norm.weight, torch.nan), requires_grad=False
    )
    with pytest.raises(G4Error, match="scores are not finite"):
        observe(broken, found.windows[:1])
    assert found.model.norm.weight.isfinite().all()
