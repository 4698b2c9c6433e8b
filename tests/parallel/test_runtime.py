"""Ranks together against the whole model, in one process; tiny models, past their window of 32."""

from pathlib import Path

import pytest
import torch

from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.generate.loop import generate
from g4tool.kernels import cpu_int4
from g4tool.model.text import TextModel
from g4tool.stages.loading import load_folder, load_to_run
from g4tool.stages.ranks import load_rank
from tests.formats.bundles import make_bundle
from tests.parallel.ranks import ThreadGroup, on_ranks

torch.set_num_threads(1)
_PROMPT = torch.randint(5, 4000, (2, 48), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_the_whole_model(name: str, degree: int) -> None:
    whole, _ = load_folder(tiny_folder(name), torch.float32, "cpu")
    with torch.no_grad():
        expected = whole(_PROMPT)

    def run(group: ThreadGroup) -> torch.Tensor:
        model, _ = load_rank(tiny_folder(name), torch.float32, "cpu", group)
        return model(_PROMPT)

    for logits in on_ranks(degree, run):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens_over_the_cache_are_those_of_the_whole_model(name: str) -> None:
    prompts = [_PROMPT[0].tolist(), _PROMPT[1, :40].tolist()]
    whole, _ = load_folder(tiny_folder(name), torch.float32, "cpu")
    expected = list(generate(whole, prompts, max_new_tokens=64, prefill_chunk=20))

    def run(group: ThreadGroup) -> list[list[int | None]]:
        model, _ = load_rank(tiny_folder(name), torch.float32, "cpu", group)
        return list(generate(model, prompts, max_new_tokens=64, prefill_chunk=20))

    assert len(expected) == 64
    for steps in on_ranks(4, run):
        assert steps == expected


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("name", TINY)
def test_bundles(name: str, degree: int, tmp_path: Path) -> None:
    """Groups of 64 in down_proj and o_proj of 32 make some cuts uneven at 8 ranks."""
    make_bundle(tiny_folder(name), tmp_path / "bundle")
    whole, _ = load_folder(tmp_path / "bundle", torch.float32, "cpu")
    with torch.no_grad():
        expected = whole(_PROMPT)

    def run(group: ThreadGroup) -> torch.Tensor:
        model, _ = load_rank(tmp_path / "bundle", torch.float32, "cpu", group)
        return model(_PROMPT)

    for logits in on_ranks(degree, run):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_int4_in_bfloat16_takes_torchs_own_layout(tmp_path: Path) -> None:
    """As one process does to run; the joints are at the modules that took its place."""
    make_bundle(tiny_folder("tiny-31b"), tmp_path / "bundle", _packable)
    whole, _ = load_to_run(tmp_path / "bundle", torch.bfloat16, "cpu")
    assert isinstance(whole, TextModel)
    with torch.no_grad():
        expected = whole(_PROMPT[:, :40]).float()

    def run(group: ThreadGroup) -> tuple[torch.Tensor, int]:
        model, _ = load_rank(tmp_path / "bundle", torch.bfloat16, "cpu", group)
        packed = [x for x in model.modules() if isinstance(x, cpu_int4.CpuInt4Linear)]
        return model(_PROMPT[:, :40]).float(), len(packed)

    for logits, packed in on_ranks(2, run):
        assert packed == (7 * 6 - 1 if cpu_int4.block_rows() else 0)
        agree = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
        assert agree > 0.9
        assert (logits - expected).abs().mean() < 0.05 * expected.std()


def _packable(name: str, shape: tuple[int, ...]) -> tuple[str, int | None]:
    return ("plain", None) if len(shape) < 2 or "embed" in name else ("int4", 32)


def test_a_rank_holds_its_share_only() -> None:
    """All but the norms, the router and other small matrices is divided by the degree."""
    whole, _ = load_folder(tiny_folder("tiny-31b"), torch.float32, "cpu")
    model = on_ranks(
        4, lambda group: load_rank(tiny_folder("tiny-31b"), torch.float32, "cpu", group)[0]
    )[1]
    count = sum(p.numel() for p in model.parameters())
    # Two key-value heads of the full layer lie on four ranks, so a little more than a quarter.
    assert count < 0.27 * sum(p.numel() for p in whole.parameters())
