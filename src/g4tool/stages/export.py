"""The stage that exports a model as an ExecuTorch program and proves it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from g4tool import __version__
from g4tool.errors import UsageError
from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.recipe.model import ExportCpu, Recipe
from g4tool.stages.checkpoints import copy_file, tiny_model_of
from g4tool.stages.convert import missing_fact
from g4tool.stages.environment import device_class, library_version

if TYPE_CHECKING:
    from g4tool.backends.executorch.program import ProgramOptions

Backend = Literal["xnnpack", "cuda"]
_LIBRARIES = ("torch", "executorch", "torchao")
NO_GPU = (
    "lowering to CUDA needs an NVIDIA GPU and its driver, which this machine lacks: run the same "
    "command there; everything before it is done."
)


@dataclass(frozen=True)
class ExportStage:
    """Lowers the model that `weights` holds. Lengths in tokens.

    `checkpoint`: what it was quantized from, the proof's first stage; None where it is not at hand.
    `verify`: prove the program before it is an artifact.
    """

    weights: Stage | Source
    checkpoint: Stage | Source | None
    backend: Backend
    max_seq_len: int
    prefill_chunk: int
    sampling: bool = False
    int8_activations: bool = False
    verify: bool = False
    version: int = 2

    @property
    def name(self) -> str:
        """export-cpu or export-cuda."""
        return "export-cuda" if self.backend == "cuda" else "export-cpu"

    @property
    def inputs(self) -> tuple[Stage | Source, ...]:
        """The weights, and for the proof what they were made from."""
        if self.verify and self.checkpoint is not None:
            return (self.weights, self.checkpoint)
        return (self.weights,)

    @property
    def options(self) -> "ProgramOptions":
        """What shapes the program."""
        from g4tool.backends.executorch.program import ProgramOptions

        return ProgramOptions(self.max_seq_len, self.prefill_chunk, self.sampling)

    def parameters(self) -> dict[str, Json]:
        """What shapes the program, and whether it carries a proof."""
        return {
            "backend": self.backend,
            "max_seq_len": self.max_seq_len,
            "prefill_chunk": self.prefill_chunk,
            "sampling": self.sampling,
            "int8_activations": self.int8_activations,
            "verify": self.verify,
        }

    def environment(self) -> dict[str, Json]:
        """Compilers differ between versions and machines."""
        device = "cuda" if self.backend == "cuda" else "cpu"
        libraries = {name: library_version(name) for name in _LIBRARIES}
        return {**libraries, "device": device_class(device)}

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest says what is delegated."""
        return missing_fact(artifact, {"delegates": dict})

    def run(self, work: Work) -> None:
        """The program, proved in the same step, then the small files and export.json."""
        from g4tool.backends.executorch import folder as exported
        from g4tool.files import write_json
        from g4tool.stages import export_cpu, export_cuda
        from g4tool.stages.proof import Given

        weights, source = work.inputs[0].path, work.inputs[1].path if len(work.inputs) > 1 else None
        given = Given(self, weights, source, work.report)
        names = [exported.PROGRAM]
        if self.backend == "cuda":
            names.append(export_cuda.WEIGHTS)
            made: Any = export_cuda.make(work, given)
        else:
            made = work.file(exported.PROGRAM, partial(export_cpu.make, given))
        small = [name for name in exported.SIDE_FILES if (given.files / name).is_file()]
        for name in small:
            work.file(name, partial(copy_file, given.files / name))
        facts = exported.ExportFacts(
            backend=self.backend,
            versions={**{name: library_version(name) for name in _LIBRARIES}, "g4": __version__},
            files=exported.record(work.path, [*names, *small]),
            **made,
        )
        work.file(exported.EXPORT, lambda path: write_json(path, exported.to_json(facts)))
        work.fact("delegates", facts.delegates)
        work.fact("verified", facts.verified)


def program_stage(
    recipe: Recipe,
    backend: Backend,
    weights: Stage | Source,
    checkpoint: Stage | Source | None,
    verify: bool,
) -> ExportStage:
    """The export of `weights` as the recipe's section for `backend` says.

    Raises UsageError where there is no such section, and for sampling that the runtime cannot do.
    """
    section = recipe.export_cuda if backend == "cuda" else recipe.export_cpu
    if section is None:
        raise UsageError(f"the recipe {recipe.name} has no section for {backend}.")
    if section.sampling and backend == "xnnpack":
        from g4tool.backends.executorch.xnnpack import check_sampling

        check_sampling()
    return ExportStage(
        weights=weights,
        checkpoint=checkpoint,
        backend=backend,
        max_seq_len=section.max_seq_len,
        prefill_chunk=section.prefill_chunk,
        sampling=section.sampling,
        int8_activations=section.int8_activations if isinstance(section, ExportCpu) else False,
        verify=verify,
    )


def bundle_stage(recipe: Recipe, backend: Backend, folder: Path) -> ExportStage:
    """The export of the bundle in `folder`, proved where it was made from a tiny model.

    Raises UsageError for a folder that holds none.
    """
    from g4tool.checkpoint.tiny import tiny_folder
    from g4tool.formats.bundle import is_bundle, lineage_of

    if not is_bundle(folder):
        raise UsageError(f"--prequantized {folder} is no bundle; export it with --model.")
    tiny = tiny_model_of(lineage_of(folder).get("source", {}).get("files", {}))
    checkpoint = Source(tiny_folder(tiny)) if tiny else None
    return program_stage(recipe, backend, Source(folder), checkpoint, tiny is not None)
