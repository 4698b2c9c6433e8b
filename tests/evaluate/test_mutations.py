"""Mistakes other implementations have made, and what of `g4 eval` catches each.

Parity catches them all. KL or perplexity alone catches all but the window far above its own noise.
That one is why parity is needed: a window that is off by one costs less than 4 bit weights do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from g4tool.errors import G4Error
from g4tool.evaluate.corpus import Window, cut, shipped_texts, spread
from g4tool.evaluate.inmemory import quantized
from g4tool.evaluate.leaves import twin
from g4tool.evaluate.parity import Subject, parity, passed, quantized_check
from g4tool.evaluate.scores import Reference, compare, observe
from g4tool.evaluate.summary import Fidelity, fidelity, interval
from g4tool.evaluate.sweep import DEFAULT
from g4tool.model import rope
from g4tool.model.decoder import DecoderLayer
from g4tool.model.text import TextModel
from g4tool.quantize.account import check_account
from g4tool.quantize.options import Rule
from g4tool.quantize.policy import plan

from .conftest import GetTiny, Tiny

MODELS = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")
FAR = 3  # half-widths of the 95 % interval: six standard errors

Change = Callable[[TextModel], None]


def softcap_dropped(model: TextModel) -> None:
    model.config = replace(model.config, softcap=None)


def layer_scalar_skipped(model: TextModel) -> None:
    for layer in model.layers:
        layer.layer_scalar = torch.ones_like(layer.layer_scalar)


def window_one_shorter(model: TextModel) -> None:
    model.config = replace(model.config, sliding_window=model.config.sliding_window - 1)


def window_one_longer(model: TextModel) -> None:
    model.config = replace(model.config, sliding_window=model.config.sliding_window + 1)


def per_layer_scale_missing(model: TextModel) -> None:
    model.per_layer_scales = dict.fromkeys(model.per_layer_scales, 1.0)


MUTATIONS: dict[str, tuple[str, Change]] = {
    "softcap dropped": ("tiny-31b", softcap_dropped),
    "layer scalar skipped": ("tiny-31b", layer_scalar_skipped),
    "window one shorter": ("tiny-31b", window_one_shorter),
    "window one longer": ("tiny-31b", window_one_longer),
    "per-layer embedding scale missing": ("tiny-e2b", per_layer_scale_missing),
}
PATCHES = {"rope denominator": "tiny-31b", "router fed the normed input": "tiny-26b-a4b"}


def wrong_frequencies(config: rope.RopeConfig, head_dim: int, device: torch.device) -> torch.Tensor:
    pairs = int(config.rotated * head_dim // 2)
    exponents = torch.arange(0, 2 * pairs, 2, device=device) / (2 * pairs)
    rest = torch.zeros(head_dim // 2 - pairs)
    return torch.cat((1.0 / config.theta**exponents, rest))


def normalised_router(self: DecoderLayer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    dense = self.post_feedforward_layernorm_1(self.mlp(given))
    normed = self.pre_feedforward_layernorm_2(x)
    return dense + self.post_feedforward_layernorm_2(self.experts(normed, *self.router(normed)))


@contextmanager
def mutated(found: Tiny, name: str) -> Iterator[TextModel]:
    """The model with a mistake; what is patched is right again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        model = twin(found.model)
        if name in MUTATIONS:
            MUTATIONS[name][1](model)
        elif name == "rope denominator":
            patch.setattr(rope, "inverse_frequencies", wrong_frequencies)
        else:
            patch.setattr(DecoderLayer, "_feed_forward", normalised_router)
        yield model


@pytest.fixture(scope="module")
def wide(tiny: GetTiny) -> GetTiny:
    """The tiny models with enough windows for narrow intervals."""
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            found = tiny(name)
            length = found.windows[0].scored
            every = cut(shipped_texts(), found.tokenizer, length)
            windows = spread([w for w in every if w.scored == length], 32)
            made[name] = replace(found, windows=windows, reference=observe(found.model, windows))
        return made[name]

    return make


def measured(found: Tiny, name: str) -> Fidelity:
    with mutated(found, name) as model:
        return fidelity(found.reference, compare(found.reference, model))


EVERY = {name: model for name, (model, _) in MUTATIONS.items()} | PATCHES
WINDOW = ("window one shorter", "window one longer")


@pytest.mark.parametrize("name", EVERY)
def test_parity_catches(tiny: GetTiny, name: str) -> None:
    found = tiny(EVERY[name])
    ids = [window.ids for window in found.windows[:1]]
    with torch.inference_mode():
        right = [found.model(torch.tensor([list(row)])) for row in ids]
    with mutated(found, name) as model:
        checks = parity(Subject(lambda _: right[0], ids), Subject(model, ids))
    assert [check.passed for check in checks] == [True, False], checks


@pytest.mark.parametrize("name", MODELS)
def test_parity_passes_what_is_right(tiny: GetTiny, name: str) -> None:
    found = tiny(name)
    ids = [window.ids for window in found.windows[:1]]
    assert passed(parity(Subject(found.model, ids), Subject(twin(found.model), ids)))


def test_parity_catches_a_missing_bos(tiny: GetTiny) -> None:
    found = tiny("tiny-31b")
    ids = [window.ids for window in found.windows]
    without = [row[1:] for row in ids]
    (check,) = parity(Subject(found.model, ids), Subject(found.model, without))
    assert not check.passed
    assert check.detail == "Sequence 0 differs from token 0 on."


@pytest.mark.parametrize("name", [name for name in EVERY if name not in WINDOW])
def test_kl_or_perplexity_alone_catches(wide: GetTiny, name: str) -> None:
    assert above_noise(measured(wide(EVERY[name]), name)) > FAR


@pytest.mark.parametrize("name", WINDOW)
def test_a_wrong_window_hides_behind_4_bit_weights(wide: GetTiny, name: str) -> None:
    found = wide("tiny-31b")
    model, _ = quantized(found.model, found.checkpoint, plan(found.checkpoint, DEFAULT))
    rounded = fidelity(found.reference, compare(found.reference, model))
    assert measured(found, name).kl_mean < rounded.kl_mean


def test_kl_alone_catches_a_missing_bos(wide: GetTiny) -> None:
    found = wide("tiny-31b")
    # What was predicted with BOS in front, at the positions that there are without it.
    known = Reference(
        found.model,
        tuple(Window(w.source, w.ids[1:], w.nbytes) for w in found.windows),
        tuple(states[1:] for states in found.reference.states),
        tuple(losses[1:] for losses in found.reference.losses),
    )
    without = fidelity(known, compare(known, found.model))
    assert above_noise(without) > FAR
    assert without.log_ratio > 0


def test_the_account_catches_experts_left_in_16_bit(wide: GetTiny) -> None:
    found = wide("tiny-26b-a4b")
    full, accounts = quantized(found.model, found.checkpoint, plan(found.checkpoint, DEFAULT))
    exempting = replace(DEFAULT, rules=(Rule(r"\.experts\.", "keep"), *DEFAULT.rules))
    left, lazy = quantized(found.model, found.checkpoint, plan(found.checkpoint, exempting))
    assert quantized_check(full).passed
    assert not quantized_check(left).passed
    check_account(found.checkpoint, DEFAULT, accounts)
    with pytest.raises(G4Error, match=r"experts\.gate_up_proj\.weight is left in 16 bit"):
        check_account(found.checkpoint, DEFAULT, lazy)
    # Their share of the KL is missing too, window by window.
    whole, part = compare(found.reference, full).kl, compare(found.reference, left).kl
    low, _ = interval([a - b for a, b in zip(whole, part, strict=True)])  # type: ignore[misc]
    assert low > 0


def above_noise(found: Fidelity) -> float:
    """The larger of KL and log perplexity ratio, in half-widths of its interval."""
    assert found.kl_interval is not None
    assert found.log_ratio_interval is not None
    pairs = ((found.kl_mean, found.kl_interval), (abs(found.log_ratio), found.log_ratio_interval))
    return max(2 * value / (high - low) for value, (low, high) in pairs)
