"""One lowering a tiny model, shared by every test of its group."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from g4tool.backends.executorch.folder import ExportFacts, read_facts
from g4tool.model.text import TextModel
from g4tool.pipeline.store import Store
from g4tool.recipe.model import Recipe
from g4tool.stages.build import build
from g4tool.stages.export import ExportStage
from g4tool.stages.loading import load_folder

WINDOW = 32
# Lowering takes minutes a model: the smallest one always, all three with G4_EXPORTS=all.
NAMES = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")
MODELS = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"export-{name}"), pytest.mark.timeout(1500)])
    for name in (NAMES if os.environ.get("G4_EXPORTS") == "all" else NAMES[-1:])
]


@dataclass(frozen=True)
class Exported:
    """An export's folder, and the int4 model that it was made from, in fp32."""

    folder: Path
    facts: ExportFacts
    eager: TextModel
    stage: ExportStage
    store: Store


_MADE: dict[str, Exported] = {}


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> "Exports":
    """Gives the export of a tiny model, made at most once for all of pytest's workers."""
    return Exports(tmp_path_factory)


class Exports:
    """See `exports`."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __call__(self, model: str) -> Exported:
        if model not in _MADE:
            base = self._factory.getbasetemp()
            # Workers' folders lie in one; the store sees to it that one of them makes it.
            shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
            store = Store(shared / f"home-{model}")
            stage = build(recipe_of(model)).export_cpu
            assert stage is not None
            folder = store.ensure(stage).path
            assert not isinstance(stage.weights, Path)
            eager, _ = load_folder(store.ensure(stage.weights).path, torch.float32, "cpu")
            assert isinstance(eager, TextModel)
            _MADE[model] = Exported(folder, read_facts(folder), eager, stage, store)
        return _MADE[model]


def recipe_of(model: str) -> Recipe:
    """int4-hqq and an export of 256 tokens in chunks of up to 96: four windows and more."""
    return Recipe.model_validate(
        {
            "name": "test",
            "model": model,
            "quantize": {
                "rules": [
                    {"match": "norm|router|layer_scalar", "scheme": "keep"},
                    {"match": "embed_tokens", "scheme": "int8"},
                ]
            },
            "export-cpu": {"max_seq_len": 256, "prefill_chunk": 96},
        }
    )
