"""The port on NxD Inference's own classes in CPU mode, against transformers.

Needs source trees that are not part of this project, and a Python that has what they import:

    git clone https://github.com/aws-neuron/neuronx-distributed-inference
    git clone https://github.com/aws-neuron/neuronx-distributed
    python3 -m venv nxdi && nxdi/bin/pip install torch transformers==4.57.6 boto3 tenacity
    export G4_NXDI=neuronx-distributed-inference G4_NXD=neuronx-distributed
    G4_NXDI_PYTHON=nxdi/bin/python python -m pytest -m nxdi tests/backends/neuron_nxdi
"""

import os
import sys
from pathlib import Path

import pytest

from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.model.variants import VARIANTS
from tests.backends.neuron_nxdi.launch import launch
from tests.backends.neuron_nxdi.reference import RANDOM

NEEDED = ("G4_NXDI", "G4_NXD", "G4_NXDI_PYTHON")

pytestmark = [pytest.mark.nxdi, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trees() -> list[str]:
    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(
            f"needs NxD Inference's source trees and a Python for them: set {', '.join(missing)} "
            f"(see {Path(__file__).name})"
        )
    return [str(Path(os.environ[name]).absolute()) for name in NEEDED]


@pytest.fixture(scope="module", params=[*sorted(TINY), *RANDOM])
def reference(
    request: pytest.FixtureRequest, trees: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """A checkpoint's folder and transformers' logits and tokens for it."""
    name, made = request.param, tmp_path_factory.mktemp("reference")
    folder = str(made / name if name in RANDOM else tiny_folder(name))
    path = str(made / f"{name}.safetensors")
    launch(sys.executable, "reference", folder, path)
    return folder, path


def run(trees: list[str], reference: tuple[str, str], degree: int, *more: str) -> dict[str, float]:
    nxdi, nxd, python = trees
    arguments = (nxdi, nxd, *reference, str(degree), *more)
    figures: dict[str, float] = launch(python, "worker", *arguments, ranks=degree)
    return figures


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_agrees_with_transformers(
    trees: list[str], reference: tuple[str, str], degree: int
) -> None:
    # Two prompts of different lengths in one batch, past the window, and 48 greedy steps.
    figures = run(trees, reference, degree)
    assert figures["prefill"] <= 1e-4
    assert figures["decode"] <= 1e-4
    assert figures["same_tokens"] == figures["tokens"] == 96


@pytest.mark.parametrize("degree", [1, 2])
def test_sequences_that_join_one_at_a_time(
    trees: list[str], reference: tuple[str, str], degree: int
) -> None:
    # Continuous batching, as vLLM does it: prompts one by one into their rows, then steps together.
    figures = run(trees, reference, degree, "continuous")
    assert figures["prefill"] <= 1e-4
    assert figures["decode"] <= 1e-4
    assert figures["same_tokens"] == figures["tokens"] == 96


@pytest.mark.parametrize("degree", [1, 2])
def test_tokens_of_the_sampler(trees: list[str], reference: tuple[str, str], degree: int) -> None:
    # NxD's sampler in the program, with the settings that the command writes for serving.
    figures = run(trees, reference, degree, "serving")
    assert figures["same_tokens"] == figures["tokens"] == 96


def test_programs_for_ever_more_positions(trees: list[str], reference: tuple[str, str]) -> None:
    # Each compiled bucket reads a part of the caches; the first ones are shorter than the sequence.
    figures = run(trees, reference, 1, "buckets")
    assert figures["prefill"] <= 1e-4
    assert figures["decode"] <= 1e-4
    assert figures["same_tokens"] == figures["tokens"] == 48


@pytest.mark.parametrize("degree", [2, 4])
def test_the_plan_cuts_as_nxd_does(
    trees: list[str], reference: tuple[str, str], degree: int
) -> None:
    nxdi, nxd, python = trees
    found = launch(python, "shards", nxdi, nxd, reference[0], str(degree))
    assert found["different"] == []
    assert found["compared"] > 50 * degree


def test_every_variant_splits_as_it_should(trees: list[str]) -> None:
    nxdi, nxd, python = trees
    found = launch(python, "shapes", nxdi, nxd)
    assert set(found) == set(VARIANTS)
    for variant, degrees in found.items():
        for degree, changed in degrees.items():
            if isinstance(changed, str):
                assert (variant, degree) in {("e2b", "16"), ("e4b", "16")}
                assert "8 query heads" in changed
                continue
            check_split(variant, int(degree), changed)


def check_split(variant: str, degree: int, changed: dict[str, list[list[int] | None]]) -> None:
    """One dimension of a weight is divided by the degree; key-value heads, at most to one head."""
    sizes = {layer.head_dim for layer in VARIANTS[variant].layers}
    for name, (canonical, shape) in changed.items():
        assert shape is not None
        if name.startswith("kv_mgr.") or name.endswith("rank_util.rank"):
            assert canonical is None
            continue
        assert canonical is not None, name
        if ".experts." in name:
            canonical[1:] = canonical[:0:-1]
        places = [i for i, size in enumerate(shape) if size != canonical[i]]
        if degree == 1:
            assert places == [], name
            continue
        (place,) = places
        if shape[place] * degree != canonical[place]:
            assert name.endswith(("k_proj.weight", "v_proj.weight"))
            assert shape[place] in sizes
