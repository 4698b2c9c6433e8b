"""The text model against transformers, in every way of feeding a sequence."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from g4tool.errors import G4Error
from g4tool.model.text import TextModel

from .oracle import (
    FAMILIES,
    HIDDEN,
    TOLERANCE,
    VOCAB,
    WINDOW,
    canonical_state,
    chunked,
    config_of,
    difference,
    hf_model,
    random_ids,
    text_model,
)

PROMPT = 4 * WINDOW + 5
CHUNKS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 4 * WINDOW, PROMPT)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_whole_and_in_any_chunks(family):
    reference = hf_model(family)
    model = text_model(reference, config_of(family))
    ids = random_ids(2, PROMPT)
    expected = reference(ids).logits
    assert expected.abs().max() > 10  # else the tolerance would say nothing
    assert difference(model(ids), expected) <= TOLERANCE
    for chunk in CHUNKS:
        length = PROMPT + chunk % 3  # exactly full, or with room to spare
        assert difference(chunked(model, ids, chunk, length), expected) <= TOLERANCE, chunk


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_after_prefill_equals_transformers_cached_decoding(family):
    from transformers import DynamicCache

    reference = hf_model(family, seed=3)
    model = text_model(reference, config_of(family))
    ids = random_ids(1, 3 * WINDOW)
    cache = DynamicCache(config=reference.config)
    expected = [reference(ids[:, :19], cache=cache).logits]
    expected += [reference(ids[:, t : t + 1], cache=cache).logits for t in range(19, ids.shape[1])]
    model.allocate_cache(1, 100)
    # Used twice: what a first run leaves behind must not show in a second one from position 0.
    for _ in range(2):
        got = [model(ids[:, :19], start=torch.tensor(0))]
        got += [model(ids[:, t : t + 1], torch.tensor(t)) for t in range(19, ids.shape[1])]
        assert difference(torch.cat(got, 1), torch.cat(expected, 1)) <= TOLERANCE


def test_cache_shorter_than_the_window():
    model = text_model(hf_model("dense"), config_of("dense"))
    ids = random_ids(1, WINDOW - 3)
    for chunk in (1, 2, 4):
        assert difference(chunked(model, ids, chunk), model(ids)) <= TOLERANCE


def test_untied_head_and_no_softcap():
    fields = {"tie_word_embeddings": False, "final_logit_softcapping": None}
    reference = hf_model("dense", **fields)
    config = replace(config_of("dense"), tie_word_embeddings=False, softcap=None)
    model = text_model(reference, config)
    assert "lm_head.weight" in model.state_dict()
    ids = random_ids(1, 12)
    expected = reference(ids).logits
    assert difference(model(ids), expected) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_rows_equal_each_prompt_alone(family):
    model = text_model(hf_model(family), config_of(family))
    ids = random_ids(3, PROMPT)
    pads = [0, 5, 2 * WINDOW + 3]
    pad = torch.tensor(pads)
    alone = [model(ids[row : row + 1, gap:]) for row, gap in enumerate(pads)]

    def worst(logits: torch.Tensor) -> float:
        assert torch.isfinite(logits).all()
        rows = zip(logits.split(1), pads, alone, strict=True)
        return max(difference(row[:, gap:], single) for row, gap, single in rows)

    assert worst(model(ids, pad=pad)) <= TOLERANCE
    for chunk in (1, WINDOW - 1, 2 * WINDOW + 1):
        model.allocate_cache(3, PROMPT + 3)
        pieces = [
            model(piece, torch.tensor(at * chunk), pad)
            for at, piece in enumerate(ids.split(chunk, 1))
        ]
        assert worst(torch.cat(pieces, 1)) <= TOLERANCE, chunk


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close_and_keeps_the_rotary_angles(family):
    reference = hf_model(family)
    model = text_model(reference, config_of(family)).to(torch.bfloat16)
    wide = text_model(reference, config_of(family))
    wide.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    ids = random_ids(1, 20)
    model.allocate_cache(1, 700)
    logits = model(ids, start=torch.tensor(0))
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()
    assert (logits.float() - wide(ids)).abs().mean() < (2.0 if family == "moe" else 0.6)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_is_the_canonical_names_with_or_without_a_cache(family):
    expected = set(canonical_state(hf_model(family)))
    model = TextModel(config_of(family))
    assert set(model.state_dict()) == expected
    model.allocate_cache(2, 16)
    assert set(model.state_dict()) == expected
    shared = [n for n, layer in enumerate(model.config.layers) if layer.kv_source is not None]
    assert not [x for n in shared for x in expected if f"layers.{n}.self_attn.k" in x]
    assert bool(shared) == (family == "per-layer")


def test_cache_sizes_and_lifetime():
    model = TextModel(config_of("per-layer"))
    model.allocate_cache(3, 40, torch.bfloat16)
    sizes = {name: tuple(x.shape) for name, x in model.named_buffers() if "cache" in name}
    ring, full = (3, 1, WINDOW, 16), (3, 1, 40, 32)
    assert sizes == {
        f"layers.{n}.self_attn.cache.{part}": full if n % 2 else ring
        for n in range(4)
        for part in ("keys", "values")
    }
    model(random_ids(3, 4), start=torch.tensor(0))
    assert model.layers[1].self_attn.cache.keys.abs().sum() > 0
    model.reset_cache()
    assert model.layers[1].self_attn.cache.keys.abs().sum() == 0
    model.drop_cache()
    assert not [name for name, _ in model.named_buffers() if "cache" in name]


def test_forward_is_logits_of_hidden():
    model = text_model(hf_model("dense"), config_of("dense"))
    ids = random_ids(1, 9)
    hidden = model.hidden(ids)
    assert hidden.shape == (1, 9, HIDDEN)
    assert torch.equal(model.logits(hidden), model(ids))
    assert model.logits(hidden[:, -1]).shape == (1, VOCAB)


def test_whole_sequence_leaves_the_cache_alone():
    model = text_model(hf_model("dense"), config_of("dense"))
    ids = random_ids(1, 20)
    model.allocate_cache(1, 40)
    first = model(ids[:, :10], start=torch.tensor(0))
    model(random_ids(1, 15, seed=9))
    second = model(ids[:, 10:], start=torch.tensor(10))
    assert difference(torch.cat((first, second), 1), model(ids)) <= TOLERANCE


@pytest.mark.parametrize(
    ("batch", "length", "dtype", "message"),
    [
        (0, 8, torch.float32, "at least 1"),
        (1, 0, torch.float32, "at least 1"),
        (1, 8, torch.int8, "floating-point"),
    ],
)
def test_cache_of_nonsense_is_refused(batch, length, dtype, message):
    with pytest.raises(G4Error, match=message):
        TextModel(config_of("dense")).allocate_cache(batch, length, dtype)


def test_misused_cache_is_refused():
    model = TextModel(config_of("dense"))
    with pytest.raises(G4Error, match="call allocate_cache first"):
        model(random_ids(1, 4), start=torch.tensor(0))
    model.allocate_cache(2, 8)
    with pytest.raises(G4Error, match="batch of 2, but 1 rows"):
        model(random_ids(1, 4), start=torch.tensor(0))
    with pytest.raises(G4Error, match="9 tokens does not fit a cache of 8"):
        model(random_ids(2, 9), start=torch.tensor(0))
