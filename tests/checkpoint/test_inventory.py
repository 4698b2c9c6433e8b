import math

import pytest
import torch

from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tiny import TINY
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS

# Text parameters of the published models, buffers included.
COUNTS = {
    "e2b": 4_628_569_379,
    "e4b": 7_463_013_418,
    "12b": 11_907_350_320,
    "26b-a4b": 25_233_141_790,
    "31b": 30_697_345_340,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_counts_of_the_published_models(name: str) -> None:
    assert sum(map(math.prod, text_tensors(VARIANTS[name]).values())) == COUNTS[name]


@pytest.mark.parametrize("name", [*TINY, *VARIANTS])
def test_the_model_has_exactly_these_tensors(name: str) -> None:
    config = TINY[name] if name in TINY else VARIANTS[name]
    with torch.device("meta"):
        model = TextModel(config)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == text_tensors(config)
