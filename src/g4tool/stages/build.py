"""From a recipe to its stages, in order."""

from dataclasses import dataclass

from g4tool.errors import UsageError
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.stage import Stage
from g4tool.quantize.options import check_options, is_qat_source
from g4tool.recipe.model import Recipe
from g4tool.stages.checkpoints import checkpoint_stage
from g4tool.stages.convert import ConvertStage
from g4tool.stages.environment import choose_device
from g4tool.stages.quantize import QuantizeStage, options_of

BUILT = ("download", "convert", "quantize")
"""The stages `g4 build` knows, by the names that --until takes."""


@dataclass(frozen=True)
class Build:
    """A recipe's stages: the checkpoint's origin first; `quantize` is None when not asked for.

    `unbuilt` names sections of the recipe that this version of g4 cannot make.
    """

    source: Stage | Source
    convert: ConvertStage
    quantize: QuantizeStage | None
    unbuilt: tuple[str, ...] = ()

    @property
    def stages(self) -> list[Stage]:
        """What there is to make, in order."""
        given: list[Stage | Source | None] = [self.source, self.convert, self.quantize]
        return [stage for stage in given if stage is not None and not isinstance(stage, Source)]

    def until(self, name: str) -> list[Stage]:
        """The stages up to and with `name`. Raises UsageError when the recipe has no such stage."""
        ends = {"download": self.source, "convert": self.convert, "quantize": self.quantize}
        if name not in ends:
            raise UsageError(f"--until {name}: the stages are {', '.join(BUILT)}.")
        end = ends[name]
        if end is None or isinstance(end, Source):
            raise UsageError(f"--until {name}: this recipe has no such stage.")
        return self.stages[: self.stages.index(end) + 1]


def build(recipe: Recipe, device: str | None = None) -> Build:
    """The stages of `recipe`. `device` overrides the recipe's own. A Hub model's revision is looked
    up, so this may need the network. Raises UsageError for options that contradict each other."""
    source = checkpoint_stage(recipe.model, recipe.revision)
    convert = ConvertStage(source, recipe.convert.materialize, recipe.convert.dtype)
    later = {
        "export-cuda": recipe.export_cuda,
        "export-cpu": recipe.export_cpu,
        "compile-neuron": recipe.compile_neuron,
    }
    unbuilt = tuple(name for name, section in later.items() if section is not None)
    if recipe.quantize is None:
        return Build(source, convert, None, unbuilt)
    wanted = device or (None if recipe.quantize.device == "auto" else recipe.quantize.device)
    qat = is_qat_source(recipe.model)
    options = options_of(recipe.quantize)
    check_options(options)
    quantize = QuantizeStage(convert, options, qat, choose_device(wanted))
    return Build(source, convert, quantize, unbuilt)
