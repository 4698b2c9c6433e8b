"""The stage that turns a checked checkpoint into an int4 bundle, one file at a time."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from g4tool import __version__
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.recipe.model import Quantize
from g4tool.stages.convert import missing_fact
from g4tool.stages.environment import device_class, library_version

if TYPE_CHECKING:
    from g4tool.checkpoint.lazy import Checkpoint
    from g4tool.quantize.options import QuantizeOptions


def options_of(section: Quantize) -> "QuantizeOptions":
    """The recipe's section as the quantizer takes it."""
    from g4tool.quantize.options import QuantizeOptions, Rule

    return QuantizeOptions(
        scheme=section.scheme,
        group_size=section.group_size,
        solver=section.solver,
        layerwise=section.layerwise,
        head=section.head,
        rules=tuple(
            Rule(rule.match, rule.scheme, rule.group_size, rule.solver) for rule in section.rules
        ),
    )


@dataclass(frozen=True)
class QuantizeStage:
    """Solves, packs and writes every tensor. `qat`: the source was trained on a symmetric grid.

    `formats` are those of the recipe's section.
    """

    convert: Stage
    options: "QuantizeOptions"
    qat: bool
    device: str
    name: str = "quantize"
    version: int = 3
    formats: tuple[str, ...] = ("torchao",)

    @property
    def inputs(self) -> tuple[Stage]:
        """The checkpoint under canonical names."""
        return (self.convert,)

    def parameters(self) -> dict[str, Json]:
        """Schemes, groups, rules, the head, how the files are cut, their formats."""
        return {**self._recipe(), "formats": list(self.formats)}

    def _recipe(self) -> dict[str, Json]:
        # Without the formats: a bundle is the same whatever is written beside it.
        rules = [asdict(rule) for rule in self.options.rules]
        return {**asdict(self.options), "rules": rules, "qat": self.qat}

    def environment(self) -> dict[str, Json]:
        """Arithmetic differs between devices and versions in the last bits."""
        libraries = {name: library_version(name) for name in ("torch", "torchao")}
        return {**libraries, "device": device_class(self.device), "compile": "eager"}

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest holds the account."""
        return missing_fact(artifact, {"tensors": list, "notes": list, "formats": dict})

    def files_at_once(self) -> int:
        """How many files are made at a time."""
        from g4tool.quantize.driver import units_at_once

        return units_at_once(self.device)

    def run(self, work: Work) -> None:
        """Quantize the view that is given."""
        from g4tool.checkpoint.reader import open_checkpoint

        (view,) = work.inputs
        self.write(work, open_checkpoint(view.path), view.manifest["facts"]["source"])

    def write(self, work: Work, checkpoint: "Checkpoint", source: Json) -> None:
        """Write the bundle: its shards, journaled one by one, then the small files of each format.

        `source` is what g4.json says of the checkpoint's origin.
        """
        from g4tool.quantize import account, policy
        from g4tool.stages.bundles import Bundles

        plans = policy.plan(checkpoint, self.options, self.qat)
        bundles = Bundles(
            work=work,
            checkpoint=checkpoint,
            options=self.options,
            plans=plans,
            formats=self.formats,
            device=self.device,
            source=source,
            recipe=self._recipe(),
            versions={**self.environment(), "g4": __version__},
        )
        made = bundles.write(self.files_at_once())
        first = made[self.formats[0]]
        work.fact("bits_per_weight", account.rounded_bits(first))
        notes = policy.unmatched_rules(checkpoint, self.options) + account.grid_notes(first)
        work.fact("notes", notes + bundles.notes())
        work.fact("tensors", account.to_json(first))
        work.fact("formats", bundles.facts(made))
