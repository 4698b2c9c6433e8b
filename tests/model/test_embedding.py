"""Embedding rows, the tied head, and the rounded scale."""

import pytest
import torch

from g4tool.model.embedding import Embedding, root_scales


@pytest.mark.parametrize(
    ("dim", "rounded"), [(1536, 39.25), (2560, 50.5), (2816, 53.0), (3840, 62.0), (5376, 73.5)]
)
def test_scale_is_rounded_to_bfloat16(dim, rounded):
    scales = root_scales(dim)
    assert scales[torch.bfloat16] == rounded
    assert abs(scales[torch.float32] - dim**0.5) < 1e-5


def test_rows_are_unscaled_and_project_is_their_product():
    table = Embedding(10, 4)
    ids = torch.tensor([[3, 7]])
    assert torch.equal(table(ids), table.weight[ids])
    hidden = torch.randn(2, 3, 4)
    torch.testing.assert_close(table.project(hidden), hidden @ table.weight.T)
