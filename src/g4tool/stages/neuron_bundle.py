"""The stage that divides an int4 bundle over Neuron's ranks, cutting between groups of columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.work import Work
from g4tool.recipe.model import CompileNeuron
from g4tool.stages.convert import missing_fact

if TYPE_CHECKING:
    from g4tool.backends.neuron.memory import RankMemory
    from g4tool.backends.neuron.settings import NeuronOptions
    from g4tool.formats.weights import Weights
    from g4tool.parallel.plan import Plan

NOT_COMPILED = (
    "NxD Inference has no weights quantized like these: the plan and each rank's packed weights "
    "were written and nothing was compiled; to compile, name the checkpoint that the bundle was "
    "made from. No NEFF was made."
)


@dataclass(frozen=True)
class NeuronBundleStage:
    """Plan and packed shards of a bundle. Nothing is compiled, and nothing here asks for it."""

    bundle: Source
    section: CompileNeuron
    name: str = "compile-neuron"
    version: int = 2

    @property
    def inputs(self) -> tuple[Source]:
        """The bundle."""
        return (self.bundle,)

    def parameters(self) -> dict[str, Json]:
        """As for a checkpoint; what is stored is the bundle's to say."""
        return {**self.section.model_dump(), "compile": False, "stored": "quantized"}

    def environment(self) -> dict[str, Json]:
        """Nothing: bytes are moved."""
        return {}

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest says that nothing was compiled."""
        return missing_fact(artifact, {"compiled": bool, "findings": list})

    def run(self, work: Work) -> None:
        """Check, then write the plan and the ranks' weights, file by file.

        Raises G4Error with the findings where the ranks' parts do not fit the chip.
        """
        from g4tool.backends.neuron.findings import as_json, refuse_errors
        from g4tool.backends.neuron.model_rules import check_bundle
        from g4tool.backends.neuron.plan_file import plan_content
        from g4tool.checkpoint.folder import CONFIG, read_json
        from g4tool.files import write_json
        from g4tool.formats.weights import open_weights
        from g4tool.stages.neuron import neuron_options, record
        from g4tool.stages.ranks import plan_of

        (given,) = work.inputs
        options = neuron_options(self.section)
        weights = open_weights(given.path)
        try:
            plan = plan_of(weights, options.tp)
            memory = bundle_memory(weights, plan, options)
            findings = check_bundle(plan, options, read_json(given.path / CONFIG), memory)
            refuse_errors(findings)
            work.expect(options.tp + 1)
            work.need(options.tp * memory.weights)
            content = plan_content(plan, options, findings, memory, programs=())
            work.file("plan.json", lambda path: write_json(path, content))
            for rank in range(options.tp):
                work.file(
                    f"weights/tp{rank}_sharded_checkpoint.safetensors",
                    partial(_write_rank, weights, plan, rank, work),
                )
        finally:
            weights.close()
        record(work, options, memory, as_json(findings))


def bundle_memory(weights: "Weights", plan: "Plan", options: "NeuronOptions") -> "RankMemory":
    """What the rank with the most weights needs of them, as they are stored, and of caches."""
    from g4tool.backends.neuron.memory import RankMemory, rank_caches
    from g4tool.parallel.shards import shard_specs

    held = [_size(shard_specs(weights, plan, rank)) for rank in range(plan.degree)]
    return RankMemory(max(held), rank_caches(plan, options.batch, options.seq_len, options.dtype))


def _size(specs: Mapping[str, tuple[Any, tuple[int, ...]]]) -> int:
    from math import prod

    return sum(prod(shape) * dtype.itemsize for dtype, shape in specs.values())


def _write_rank(weights: "Weights", plan: "Plan", rank: int, work: Work, path: Path) -> None:
    from g4tool.parallel.shards import write_shard

    write_shard(path, weights, plan, rank, report=work.report)
