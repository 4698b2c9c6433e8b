"""compile-neuron's section as the backend takes it, and what is refused before anything is read."""

from pathlib import Path

import pytest

from g4tool.checkpoint.tiny import tiny_folder
from g4tool.errors import G4Error, UsageError
from g4tool.pipeline.artifact import Source
from g4tool.recipe.model import CompileNeuron
from g4tool.stages.convert import ConvertStage
from g4tool.stages.neuron import (
    NeuronStage,
    check_early,
    neuron_options,
    neuron_stage,
    with_graphs,
)
from g4tool.stages.neuron_bundle import NeuronBundleStage
from tests.formats.bundles import make_bundle


def _stage(folder: Path, **section: object) -> NeuronStage | NeuronBundleStage:
    convert = ConvertStage(Source(folder))
    return neuron_stage(convert, CompileNeuron.model_validate(section), None)[0]


def test_options() -> None:
    section = CompileNeuron(tp=2, batch=3, seq_len=256, target="trn3", serving=True)
    options = neuron_options(section)
    assert (options.tp, options.batch, options.seq_len, options.chip.name) == (2, 3, 256, "trn3")
    assert (options.lnc, options.dtype, options.serving) == (2, "bfloat16", True)
    assert neuron_options(CompileNeuron(target="inf2")).lnc == 1
    assert neuron_options(CompileNeuron(lnc=1)).lnc == 1


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"tp": 3}, UsageError, "does not divide the model's 16 query heads; .* is 2"),
        ({"tp": 32}, UsageError, "more than the model's 16 query heads; .* is 16"),
        ({"seq_len": 4096}, G4Error, r"NXDI_LENGTH .* 1024 positions"),
        ({"target": "trn1", "lnc": 2}, G4Error, "NCC_EARG001"),
    ],
)
@pytest.mark.parametrize("bundle", [False, True])
def test_a_wish_is_refused_before_a_weight_is_read(
    section: dict[str, object], error: type[G4Error], words: str, bundle: bool, tmp_path: Path
) -> None:
    """A folder with nothing but a config.json is enough to tell."""
    source = tiny_folder("tiny-31b")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    if bundle:
        (tmp_path / "g4.json").write_text("{}")
    with pytest.raises(error, match=words):
        check_early(Source(tmp_path), CompileNeuron.model_validate(section))


def test_an_exported_program_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text("{}")
    with pytest.raises(UsageError, match="is an exported program: give the checkpoint"):
        check_early(Source(tmp_path), CompileNeuron())


def test_a_bundle_has_a_stage_of_its_own(tmp_path: Path) -> None:
    make_bundle(tiny_folder("tiny-31b"), tmp_path / "bundle")
    section = {"tp": 2, "seq_len": 128}
    bundle, stage = (_stage(x, **section) for x in (tmp_path / "bundle", tiny_folder("tiny-31b")))
    assert isinstance(bundle, NeuronBundleStage)
    assert isinstance(stage, NeuronStage)
    with pytest.raises(UsageError, match="no program for a bundle's packed weights"):
        with_graphs(bundle)
    # Texts make another artifact.
    assert with_graphs(stage).parameters() != stage.parameters()
