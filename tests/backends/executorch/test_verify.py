"""The proof's arithmetic, and what a failed one leaves behind."""

from pathlib import Path

import pytest
import torch

from g4tool.backends.executorch import verify
from g4tool.backends.executorch.verify import DECODED, EXACT, Tolerance, compare, require, walks
from g4tool.checkpoint.tiny import TINY
from g4tool.errors import G4Error
from g4tool.pipeline.store import Store
from g4tool.stages.build import build
from tests.backends.executorch.conftest import WINDOW, recipe_of


def test_walks_cover_the_windows_edges_and_cross_it() -> None:
    found = walks(range(4 * WINDOW + 1 + DECODED), WINDOW, 256, 96)
    sizes = [walk.chunks[0] for walk in found]
    assert sizes == [2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1]
    for walk in found:
        assert sum(walk.chunks) > WINDOW
        assert len(walk.ids) == sum(walk.chunks) + DECODED


def test_walks_stay_within_a_small_program() -> None:
    for walk in walks(range(200), WINDOW, 40, 16):
        assert len(walk.ids) <= 40
        assert max(walk.chunks) <= 16


def test_a_difference_is_measured_and_judged() -> None:
    before = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]])
    now = before.clone()
    now[0, 0] += 0.5
    found = compare("lowered", [before], [now], Tolerance(difference=0.4))
    assert (found.passed, found.difference, found.agree) == (False, 0.5, 1.0)
    assert found.mean_difference == pytest.approx(0.5 / 6)
    p, q = before.softmax(-1), now.softmax(-1)
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    with pytest.raises(G4Error, match=r"'lowered'.*nothing was exported"):
        require([found])
    assert compare("lowered", [before], [now], Tolerance(difference=0.6)).passed


def test_another_choice_is_judged_by_how_far_the_first_was_ahead() -> None:
    before = torch.tensor([[0.0, 1.0, 1.25], [2.0, 0.0, 0.0], [5.0, 0.0, 4.5]])
    now = torch.tensor([[0.0, 1.25, 1.0], [2.0, 0.0, 0.0], [4.0, 0.0, 4.5]])
    found = compare("read back", [before], [now], Tolerance(margin=0.5))
    assert (found.passed, found.margin) == (True, 0.5)
    assert found.agree == pytest.approx(1 / 3)
    assert "greedy agreement 33.3% (else ahead by 0.5)" in found.line()
    assert not compare("read back", [before], [now], Tolerance(margin=0.4)).passed
    assert compare("read back", [before], [before], EXACT).margin is None


def test_another_expert_may_move_one_token_but_not_the_mean() -> None:
    before = torch.zeros(200, 50)
    before[:, 3] = 2.0
    now = before.clone()
    now[7, 9] = 3.0
    dense, experts = (verify.bf16(TINY[name]) for name in ("tiny-31b", "tiny-26b-a4b"))
    assert not compare("program", [before], [now], dense).passed
    assert compare("program", [before], [now], experts).passed
    assert not compare("program", [before], [now + torch.linspace(0, 1, 50)], experts).passed


def test_what_is_not_a_number_fails() -> None:
    logits = torch.zeros(2, 3)
    broken = torch.full((2, 3), torch.nan)
    assert not compare("lowered", [logits], [broken], EXACT).passed
    assert not compare("lowered", [logits], [broken], Tolerance()).passed


def test_a_failed_proof_leaves_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "QUANTIZED", Tolerance(kl=0.0))
    store = Store(tmp_path / "home")
    stage = build(recipe_of("tiny-31b")).export_cpu
    assert stage is not None
    with pytest.raises(G4Error, match="the proof failed at the stage 'eager'"):
        store.ensure(stage)
    assert not list((tmp_path / "home").rglob("model.pte"))
    assert not list((tmp_path / "home").rglob("export.json"))
    assert store.plan(stage).action != "reuse"
