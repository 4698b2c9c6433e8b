"""Rotary embedding: frequencies, pairs, and independence of the model's dtype."""

import torch

from g4tool.model.config import RopeConfig
from g4tool.model.rope import inverse_frequencies, rope_tables, rotate

CPU = torch.device("cpu")


def test_full_frequencies_divide_by_the_whole_head_size():
    got = inverse_frequencies(RopeConfig(1e6, 0.25), 512, CPU)
    assert got.shape == (256,)
    expected = torch.tensor([1e6 ** (-2 * i / 512) for i in range(64)])
    torch.testing.assert_close(got[:64], expected, rtol=1e-6, atol=0)
    assert (got[64:] == 0).all()


def test_frequencies_equal_transformers():
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = Gemma4TextConfig(num_hidden_layers=6, hidden_size_per_layer_input=0)
    theirs = Gemma4TextRotaryEmbedding(config)
    full = inverse_frequencies(RopeConfig(1e6, 0.25), 512, CPU)
    sliding = inverse_frequencies(RopeConfig(1e4), 256, CPU)
    assert torch.equal(theirs.full_attention_inv_freq, full)
    assert torch.equal(theirs.sliding_attention_inv_freq, sliding)


def test_rotates_pairs_half_a_head_apart():
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0
    cos, sin = rope_tables(torch.tensor([[3]]), RopeConfig(100.0, 0.5), 8, torch.float32)
    out = rotate(x, cos, sin)[0, 0, 0]
    angle = torch.tensor(3 * 100.0 ** (-2 / 8))
    expected = torch.zeros(8)
    expected[1], expected[5] = angle.cos(), angle.sin()
    torch.testing.assert_close(out, expected)


def test_unrotated_pairs_pass_through():
    x = torch.randn(1, 4, 2, 8)
    positions = torch.arange(4)[None]
    out = rotate(x, *rope_tables(positions, RopeConfig(100.0, 0.5), 8, torch.float32))
    assert torch.equal(out[..., [2, 3, 6, 7]], x[..., [2, 3, 6, 7]])
    assert not torch.equal(out[..., [0, 1, 4, 5]], x[..., [0, 1, 4, 5]])


def test_bfloat16_tables_are_rounded_float32_angles():
    positions = torch.tensor([[4001]])
    wide = rope_tables(positions, RopeConfig(1e4), 256, torch.float32)
    narrow = rope_tables(positions, RopeConfig(1e4), 256, torch.bfloat16)
    for a, b in zip(wide, narrow, strict=True):
        assert torch.equal(a.bfloat16(), b)
