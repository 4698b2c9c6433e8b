"""From a recipe to its stages, in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from g4tool.errors import UsageError
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.stage import SelfFed, Stage
from g4tool.quantize.options import check_options, is_qat_source
from g4tool.recipe.model import Recipe
from g4tool.stages.checkpoints import TINY_MODELS, checkpoint_stage
from g4tool.stages.convert import ConvertStage
from g4tool.stages.environment import choose_device
from g4tool.stages.export import NO_GPU, ExportStage, program_stage
from g4tool.stages.neuron import NeuronStage, neuron_stage
from g4tool.stages.neuron_bundle import NeuronBundleStage
from g4tool.stages.quantize import QuantizeStage, options_of

BUILT = ("download", "convert", "quantize", "export-cpu", "export-cuda", "compile-neuron")
"""The stages `g4 build` knows, by the names that --until takes."""


@dataclass(frozen=True)
class Build:
    """A recipe's stages: the checkpoint's origin first; None for one that is not asked for.

    `missing` has a sentence for every section of the recipe that this machine cannot finish.
    """

    source: Stage | Source
    convert: ConvertStage
    quantize: QuantizeStage | None
    export_cpu: ExportStage | None = None
    export_cuda: ExportStage | None = None
    neuron: NeuronStage | NeuronBundleStage | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def stages(self) -> list[Stage]:
        """What there is to make, in order."""
        streams = isinstance(self.quantize, SelfFed)
        given: list[Stage | Source | None] = [
            *(() if streams else (self.source, self.convert)),
            self.quantize,
            self.export_cpu,
            self.export_cuda,
            self.neuron,
        ]
        return [stage for stage in given if stage is not None and not isinstance(stage, Source)]

    @property
    def ends(self) -> list[Stage]:
        """The stages that no other one reads."""
        return [each for each in self.stages if not any(each in s.inputs for s in self.stages)]

    def until(self, name: str) -> list[Stage]:
        """The stages up to and with `name`. Raises UsageError when the recipe has no such stage."""
        ends = {
            "download": self.source,
            "convert": self.convert,
            "quantize": self.quantize,
            "export-cpu": self.export_cpu,
            "export-cuda": self.export_cuda,
            "compile-neuron": self.neuron,
        }
        if name not in ends:
            raise UsageError(f"--until {name}: the stages are {', '.join(BUILT)}.")
        end = ends[name]
        if end is None or end not in self.stages:
            raise UsageError(f"--until {name}: this recipe has no such stage.")
        return self.stages[: self.stages.index(end) + 1]


def build(
    recipe: Recipe,
    device: str | None = None,
    neuron_python: Path | None = None,
    stream: bool = False,
) -> Build:
    """The stages of `recipe`. `device` overrides the recipe's own; `neuron_python` is asked for the
    Neuron SDK, and without one nothing is compiled. `stream`: quantize a Hub model shard by shard
    as it arrives. A Hub model's revision is looked up, so this may need the network. Raises
    UsageError for options that contradict each other."""
    source = checkpoint_stage(recipe.model, recipe.revision)
    convert = ConvertStage(source, recipe.convert.materialize, recipe.convert.dtype)
    quantize = None
    if recipe.quantize is not None:
        wanted = device or (None if recipe.quantize.device == "auto" else recipe.quantize.device)
        options = options_of(recipe.quantize)
        check_options(options)
        qat = is_qat_source(recipe.model)
        formats = tuple(recipe.quantize.formats)
        quantize = QuantizeStage(convert, options, qat, choose_device(wanted), formats=formats)
    if stream:
        quantize = _streamed(recipe, quantize)
    built = Build(source, convert, quantize)
    return _with_neuron(_with_programs(built, recipe), recipe, neuron_python)


def _streamed(recipe: Recipe, quantize: QuantizeStage | None) -> QuantizeStage:
    from g4tool.stages.stream import streamed

    if quantize is None:
        raise UsageError("--stream-source needs a quantize section: nothing else reads by shard.")
    if recipe.compile_neuron is not None:
        raise UsageError("--stream-source keeps no checkpoint, and compile-neuron needs one.")
    return streamed(quantize)


def _with_programs(built: Build, recipe: Recipe) -> Build:
    weights = built.quantize or built.convert
    checkpoint = built.convert if built.quantize else None
    tiny = recipe.model in TINY_MODELS
    cpu = cuda = None
    missing = dict(built.missing)
    if recipe.export_cpu is not None:
        cpu = program_stage(recipe, "xnnpack", weights, checkpoint, tiny)
    if recipe.export_cuda is not None:
        if choose_device(None) == "cpu":
            missing["export-cuda"] = NO_GPU
        else:
            cuda = program_stage(recipe, "cuda", weights, checkpoint, tiny)
    return replace(built, export_cpu=cpu, export_cuda=cuda, missing=missing)


def _with_neuron(built: Build, recipe: Recipe, python: Path | None) -> Build:
    if recipe.compile_neuron is None:
        return built
    stage, lacking = neuron_stage(built.convert, recipe.compile_neuron, python)
    missing = {**built.missing, **({"compile-neuron": lacking} if lacking else {})}
    return replace(built, neuron=stage, missing=missing)
