from pathlib import Path

import numpy as np
import pytest
import torch

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, write_tiny
from g4tool.errors import G4Error
from g4tool.model.text import TextModel
from tiny import arrays, batches, export, measure, model, state, train

NAMES = sorted(TINY)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A packed corpus of random tokens in which every second one is 300."""
    random = np.random.default_rng(0)
    packed = {}
    for source in [*batches.SHARES, "chat-large", "chat-small"]:
        for part in ("train", "dev", "held-out"):
            ids = random.integers(110, 130, 900).astype(np.uint16)
            ids[::2] = 300
            ids[::60] = batches.BOS
            packed[f"{part}/{source}"] = ids
    path = tmp_path / "corpus.npz"
    arrays.save(packed, path)
    return path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "LENGTH", 48)
    torch.set_num_threads(1)


def plan(steps: int, piece: int = 1, pieces: int = 1) -> train.Plan:
    return train.Plan(60.0, piece, pieces, steps, batch=6, compiled=False)


@pytest.mark.parametrize("name", NAMES)
def test_training_learns_and_goes_on(name: str, data: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    train.train(name, plan(3, 1, 2), data, first, None, print)
    train.train(name, plan(3, 2, 2), data, second, first, print)
    after, before = state.read_state(second, name), state.read_state(first, name)
    assert (before.step, after.step) == (3, 6)
    assert after.history[: len(before.history)] == before.history
    assert after.history[-1]["dev"] < before.history[-1]["dev"] < 8.7
    assert after.best == pytest.approx(after.history[-1]["dev"], abs=1e-4)
    assert after.best_step == 6


def test_export_holds_the_best_weights(data: Path, tmp_path: Path) -> None:
    train.train("tiny-26b-a4b", plan(2), data, tmp_path / "run", None, print)
    write_tiny("tiny-26b-a4b", tmp_path / "random")
    tokenizer = tmp_path / "random" / "tokenizer.json"
    folder = tmp_path / "models"
    files = export.export("tiny-26b-a4b", tmp_path / "run", tokenizer, folder)
    assert sum(file.stat().st_size for file in files) < 8_000_000
    assert sorted(folder.iterdir()) == sorted(files)
    checkpoint = open_checkpoint(folder)
    best = state.read_state(tmp_path / "run", "tiny-26b-a4b").best_weights
    for key in checkpoint.names:
        assert torch.equal(checkpoint.read(key), best[key])
    scalars = [float(best[f"layers.{n}.layer_scalar"]) for n in range(3)]
    assert scalars == [0.75, 1.25, 0.75]
    rows = torch.randint(110, 130, (1, 33))
    loaded = load_text_model(checkpoint, torch.float32)
    assert model.row_losses(loaded, rows).shape == (1, 32)


def test_a_missing_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(G4Error, match=r"tiny-31b\.state\.safetensors"):
        state.read_state(tmp_path, "tiny-31b")


@pytest.mark.parametrize("name", NAMES)
def test_the_exchanged_modules_compute_the_canonical_model(name: str) -> None:
    made = model.make(TINY[name], 0.5, 1).eval()
    plain = TextModel(TINY[name]).eval()
    plain.load_state_dict(made.state_dict())
    for module in plain.modules():
        if hasattr(module, "prefill"):
            module.prefill = "every"
    ids = torch.randint(0, 4096, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(made(ids), plain(ids))


def test_balance_is_one_when_even_and_more_when_not() -> None:
    router = model.make(TINY["tiny-26b-a4b"], 0.0, 1).layers[0].router
    with torch.no_grad():
        router(torch.randn(1, 4000, 128))
        even = float(router.balance)
        router.proj.weight[:2] += 50 * torch.ones(128)
        router(1 + 0.1 * torch.randn(1, 4000, 128))
    assert even == pytest.approx(1, abs=0.1)
    assert float(router.balance) == pytest.approx(4, abs=0.3)  # two of eight experts take all


def test_schedule_rises_then_falls_to_zero() -> None:
    values = [train.schedule(p, 0.1) for p in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert values == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_batches_start_lines_and_keep_the_shares(data: Path) -> None:
    feed = batches.Batches(arrays.load(data), "chat-small", 50, 20, torch.device("cpu"))
    rows = feed.next(torch.Generator().manual_seed(0))
    assert rows.shape == (50, 21)
    assert (rows[:, 0] == batches.BOS).all()
    assert sum(batches.quotas(50)) == 50
    assert batches.quotas(50)[-1] == 14
    again = feed.next(torch.Generator().manual_seed(0))
    assert torch.equal(rows, again)


def test_consecutive_rows_cover_the_text_once() -> None:
    ids = np.array([batches.BOS, *range(200, 210)], dtype=np.uint16)
    rows = batches.consecutive(ids, 4)
    assert rows[:, 1:].flatten().tolist() == list(range(200, 208))
    assert rows[:, 0].tolist() == [batches.BOS] * 2


def test_model_score_counts_each_token_once() -> None:
    config = TINY["tiny-e2b"]
    network = model.make(config, 0.0, 0).eval()
    ids = np.random.default_rng(0).integers(110, 4000, 700).astype(np.uint16)
    score = measure.model_score(network, [ids], 2000)
    whole = model.row_losses(network, batches.consecutive(ids, 256)[:1])
    first = measure.model_score(network, [ids[:256]], 700)
    assert score.tokens == 700
    assert first.nats == pytest.approx(float(whole.sum()), rel=1e-5)


def test_weight_numbers_see_an_outlier() -> None:
    weight = torch.ones(64, 64)
    weight[:, ::2] = -1
    flat = measure.weight_numbers(weight)
    weight[:8, 0] = 16
    loud = measure.weight_numbers(weight)
    assert flat == (1.0, 1.0)
    assert loud[0] > 8
    assert loud[1] == pytest.approx(8.5)
