"""The stage that makes what NxD Inference takes, and where its SDK is there, what it compiles."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.errors import UsageError
from g4tool.pipeline.artifact import Artifact, Source
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.recipe.model import CompileNeuron
from g4tool.stages.checkpoints import copy_file
from g4tool.stages.convert import ConvertStage, missing_fact
from g4tool.stages.neuron_bundle import NOT_COMPILED, NeuronBundleStage

if TYPE_CHECKING:
    from g4tool.backends.neuron.memory import RankMemory
    from g4tool.backends.neuron.settings import NeuronOptions
    from g4tool.checkpoint.lazy import Checkpoint
    from g4tool.parallel.plan import Plan

BACKEND = "nxd-inference"
CONFIG = "neuron_config.json"
ASKED = "neuron_config.asked.json"
PLAN = "plan.json"
SCRIPT = "compile.sh"
PROGRAMS = "model.pt"
LOG = "compile.log"


@dataclass(frozen=True)
class NeuronStage:
    """Plan, shards and script; and compiled programs where `python` has the SDK in `versions`.

    Without `versions` nothing is compiled, and the manifest says so. With `graphs` each program is
    written as StableHLO text too.
    """

    convert: Stage
    section: CompileNeuron
    versions: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    graphs: bool = False
    name: str = "compile-neuron"
    version: int = 2

    @property
    def inputs(self) -> tuple[Stage]:
        """The checkpoint under canonical names."""
        return (self.convert,)

    @property
    def compiles(self) -> bool:
        """Whether there is an SDK to compile with."""
        return bool(self.versions)

    def parameters(self) -> dict[str, Json]:
        """Ranks, batch, length, chip, grouping of its cores; whether to compile, and texts."""
        texts = {"graphs": "stablehlo"} if self.graphs else {}
        return {**self.section.model_dump(), "compile": self.compiles, **texts}

    def environment(self) -> dict[str, Json]:
        """The SDK's versions shape the programs; nothing shapes the plan and the shards."""
        return dict(self.versions)

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest says if anything was compiled."""
        return missing_fact(artifact, {"compiled": bool, "findings": list})

    def run(self, work: Work) -> None:
        """Check, then write plan and shards file by file, then compile.

        Raises G4Error with the findings where compilation cannot work.
        """
        from g4tool.backends.neuron.findings import as_json, refuse_errors
        from g4tool.backends.neuron.memory import rank_memory
        from g4tool.backends.neuron.model_rules import check_model
        from g4tool.backends.neuron.plan_file import plan_content
        from g4tool.backends.neuron.programs import check_programs
        from g4tool.backends.neuron.script import compile_script
        from g4tool.backends.neuron.sdk import INSTALL
        from g4tool.backends.neuron.settings import buckets, config_content
        from g4tool.checkpoint.reader import open_checkpoint
        from g4tool.files import write_json, write_text
        from g4tool.parallel.plan import make_plan

        (view,) = work.inputs
        checkpoint = open_checkpoint(view.path)
        options = neuron_options(self.section)
        plan = make_plan(checkpoint.config, options.tp, expert_block=1)
        content = config_content(options, checkpoint.raw_config)
        findings = check_model(plan, options, content["neuron_config"], checkpoint.raw_config)
        refuse_errors(findings)
        memory = rank_memory(plan, options.batch, options.seq_len, options.dtype)
        texts = len(buckets(options.seq_len)) + 2 if self.graphs else 0
        work.expect(options.tp + 3 + 3 * self.compiles + texts)
        work.need(options.tp * memory.weights)

        def planned(path: Path) -> Json:
            found = [*findings, *check_programs(plan, options, work.report)]
            refuse_errors(found)
            write_json(path, plan_content(plan, options, found, memory))
            return as_json(found)

        work.file(ASKED if self.compiles else CONFIG, lambda path: write_json(path, content))
        found = work.file(PLAN, planned)
        work.file(SCRIPT, lambda path: write_text(path, compile_script(options, INSTALL)))
        for rank in range(options.tp):
            work.file(
                f"weights/tp{rank}_sharded_checkpoint.safetensors",
                partial(_write_rank, checkpoint, plan, options, rank, work),
            )
        if self.graphs:
            _write_graphs(work, checkpoint, content["neuron_config"])
        sdk = self._compile(work, checkpoint) if self.compiles else None
        record(work, options, memory, found, sdk)

    def _compile(self, work: Work, checkpoint: "Checkpoint") -> Json:
        """Run the SDK beside the artifact, where its cache survives a kill, then take in results.

        Returns versions and the hash of every NEFF.
        """
        from g4tool.backends.neuron.compile import compile_in, scratch_folder

        assert self.python is not None, "where there are versions, a Python told them"
        scratch = scratch_folder(work.path)
        run = partial(
            compile_in, self.python, checkpoint.folder, scratch, work.path / ASKED, work.report
        )

        def programs(path: Path) -> Json:
            made = run(work.path / "weights")
            (scratch / PROGRAMS).replace(path)
            return made

        made = work.file(PROGRAMS, programs)
        for name in (CONFIG, LOG):
            work.file(name, partial(copy_file, scratch / name))
        return made


def record(
    work: Work, options: "NeuronOptions", memory: "RankMemory", findings: Json, sdk: Json = None
) -> None:
    """The manifest's facts; `sdk` says what compiled, None that nothing was."""
    work.fact("findings", findings)
    work.fact("backend", BACKEND)
    work.fact(
        "memory",
        {
            "weights_per_rank": memory.weights,
            "caches_per_rank": memory.caches,
            "core": options.chip.core_memory(options.lnc),
        },
    )
    work.fact("compiled", sdk is not None)
    work.fact("sdk", sdk)


def check_early(source: Stage | Source, section: CompileNeuron) -> None:
    """Raises what the stage would of a wish, before a checkpoint in a folder is read whole.

    A folder that is no checkpoint's is left to whoever reads it.
    """
    from g4tool.backends.executorch.folder import is_export
    from g4tool.backends.neuron.findings import refuse_errors
    from g4tool.backends.neuron.model_rules import check_wish
    from g4tool.checkpoint.config import parse_text_config
    from g4tool.checkpoint.folder import CONFIG, read_json

    if not isinstance(source, Source):
        return
    folder = source.path
    if is_export(folder):
        raise UsageError(f"{folder} is an exported program: give the checkpoint it was made from.")
    path = folder / CONFIG
    if not path.is_file():
        return
    text = parse_text_config(read_json(path), str(path))
    refuse_errors(check_wish(text, neuron_options(section)))


def neuron_options(section: CompileNeuron) -> "NeuronOptions":
    """The recipe's section as the backend takes it. Raises UsageError for an unknown target."""
    from g4tool.backends.neuron.settings import NeuronOptions
    from g4tool.backends.neuron.targets import chip

    made = chip(section.target)
    lnc = made.lnc[0] if section.lnc is None else section.lnc
    return NeuronOptions(
        tp=section.tp,
        batch=section.batch,
        seq_len=section.seq_len,
        chip=made,
        lnc=lnc,
        dtype=section.dtype,
        serving=section.serving,
    )


def neuron_stage(
    convert: ConvertStage, section: CompileNeuron, python: Path | None
) -> tuple[NeuronStage | NeuronBundleStage, str | None]:
    """The stage for what `python` (None: none is asked) can do, and what is missing to compile."""
    from g4tool.formats.bundle import is_bundle

    source = convert.source
    if isinstance(source, Source) and is_bundle(source.path):
        return NeuronBundleStage(Source(source.path), section), NOT_COMPILED if python else None
    if python is None:
        return NeuronStage(convert, section), None
    from g4tool.backends.neuron.sdk import probe

    sdk = probe(python)
    if sdk.state != "ok":
        return NeuronStage(convert, section), sdk.message(python)
    return NeuronStage(convert, section, sdk.versions, python), None


def with_graphs(stage: NeuronStage | NeuronBundleStage) -> NeuronStage:
    """The same stage, to write StableHLO too. Raises UsageError for a bundle's."""
    if isinstance(stage, NeuronBundleStage):
        raise UsageError(
            "--stablehlo: there is no program for a bundle's packed weights; name the checkpoint "
            "that it was made from."
        )
    return replace(stage, graphs=True)


def _write_graphs(work: Work, checkpoint: "Checkpoint", settings: Mapping[str, Any]) -> None:
    """The programs' texts and what their arguments are, made beside the artifact and taken in."""
    from g4tool.backends.neuron.compile import scratch_folder
    from g4tool.backends.neuron.interface import CompileJob, compiler
    from g4tool.progress import Progress

    def report(event: Mapping[str, Any]) -> None:
        if event["event"] == "done":
            made.extend(event["files"])
            return
        note = f"{event['model']} {event['bucket']}"
        work.report(Progress("stablehlo", event["done"], event["total"], "programs", note))

    made: list[str] = []
    scratch = scratch_folder(work.path)
    compiler("stablehlo")(CompileJob(checkpoint.folder, settings, scratch), report)
    for name in made:
        work.file(name, partial(copy_file, scratch / name))


def _write_rank(
    checkpoint: "Checkpoint",
    plan: "Plan",
    options: "NeuronOptions",
    rank: int,
    work: Work,
    path: Path,
) -> None:
    import torch

    from g4tool.backends.neuron.nxdi_layout import neuron_name, neuron_tensor, rank_names
    from g4tool.formats.weights import PlainWeights
    from g4tool.parallel.shards import write_shard

    dtype: torch.dtype = getattr(torch, options.dtype)
    number = torch.tensor([rank], dtype=torch.int32)

    def change(name: str, rows: Any) -> Any:
        return neuron_tensor(name, rows.to(dtype))

    write_shard(
        path,
        PlainWeights(checkpoint),
        plan,
        rank,
        rename=neuron_name,
        change=change,
        more=dict.fromkeys(rank_names(plan.config), number),
        report=work.report,
    )
