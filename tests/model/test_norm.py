"""Normalisation against torch's own."""

import torch
import torch.nn.functional as F

from g4tool.model.norm import RMSNorm, rms_norm


def test_equals_torch_with_a_plain_scale():
    x = 3 * torch.randn(2, 5, 16)
    norm = RMSNorm(16, 1e-6)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-6))
    torch.testing.assert_close(rms_norm(x, 0.5), F.rms_norm(x, (16,), None, 0.5))


def test_bfloat16_is_computed_in_float32():
    x = torch.randn(4, 64).bfloat16()
    norm = RMSNorm(64, 1e-6).to(torch.bfloat16)
    expected = F.rms_norm(x.float(), (64,), norm.weight.float(), 1e-6).bfloat16()
    assert torch.equal(norm(x), expected)
