"""CUDA programs of the tiny models in fp32, their code compiled for the CPU, beside eager int4."""

import os
from pathlib import Path

import pytest
import torch

from g4tool.backends.executorch.cuda import decomposed
from g4tool.backends.executorch.cuda_runtime import CudaMethods
from g4tool.backends.executorch.fused import make_fused
from g4tool.backends.executorch.program import ProgramOptions, export_methods
from g4tool.backends.executorch.verify import EXACT, Step, compare, eager, methods, trace, walks
from g4tool.generate.tokenizer import Tokenizer
from g4tool.model.text import TextModel
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.store import Store
from g4tool.stages.build import build
from g4tool.stages.loading import load_folder
from g4tool.stages.proof import proof_ids
from tests.backends.executorch.conftest import NAMES, WINDOW, recipe_of

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("G4_EXPORTS") != "all",
        reason="four minutes a model: G4_EXPORTS=all python -m pytest "
        "tests/backends/executorch_cuda/test_programs.py",
    ),
    pytest.mark.timeout(1500),
]
NEW, LONGEST = 128, 256


def greedy(step: Step, ids: list[int]) -> list[int]:
    logits, found = step(torch.tensor([ids]), 0), []
    for position in range(len(ids), len(ids) + NEW):
        found.append(int(logits.argmax()))
        logits = step(torch.tensor([found[-1:]]), position)
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_text_are_eager_int4s(
    tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    from tests.backends.executorch_cuda.stand_in import lower

    stage = build(recipe_of(name)).export_cpu
    assert stage is not None
    assert not isinstance(stage.weights, Source)
    folder = Store(tmp_path / "home").ensure(stage.weights).path
    model, _ = load_folder(folder, torch.float32, "cpu")
    assert isinstance(model, TextModel)
    ids = proof_ids(Tokenizer(folder), WINDOW)
    places = walks(ids, WINDOW, LONGEST, 96)
    own = eager(model, LONGEST)
    expected, text = [trace(own, walk) for walk in places], greedy(own, ids[: 2 * WINDOW])

    model.drop_cache()
    make_fused(model)
    programs = export_methods(model, ProgramOptions(LONGEST, 96))
    files = lower({key: decomposed(each) for key, each in programs.items()}, tmp_path)
    # Not before: the compiler believes what it says of a GPU.
    request.getfixturevalue("on_cpu")
    loaded = CudaMethods(files[0], [files[1]], graph=False)
    step = methods(loaded.prefill, loaded.decode)
    found = compare("own code", expected, [trace(step, walk) for walk in places], EXACT)
    assert found.passed, found.line()
    assert greedy(step, ids[: 2 * WINDOW]) == text
    assert loaded.differing(model.state_dict()) == []
