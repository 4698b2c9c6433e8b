"""The stage that turns a checked checkpoint into an int4 bundle, one file at a time."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from g4tool import __version__
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.stage import Stage
from g4tool.pipeline.work import Work
from g4tool.progress import silent
from g4tool.recipe.model import Quantize
from g4tool.stages.checkpoints import copy_file
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
    """Solves, packs and writes every tensor. `qat`: the source was trained on a symmetric grid."""

    convert: Stage
    options: "QuantizeOptions"
    qat: bool
    device: str
    name: str = "quantize"
    version: int = 2

    @property
    def inputs(self) -> tuple[Stage]:
        """The checkpoint under canonical names."""
        return (self.convert,)

    def parameters(self) -> dict[str, Json]:
        """Schemes, groups, rules, the head, how the files are cut."""
        rules = [asdict(rule) for rule in self.options.rules]
        return {**asdict(self.options), "rules": rules, "qat": self.qat}

    def environment(self) -> dict[str, Json]:
        """Arithmetic differs between devices and versions in the last bits."""
        libraries = {name: library_version(name) for name in ("torch", "torchao")}
        return {**libraries, "device": device_class(self.device), "compile": "eager"}

    def intact(self, artifact: Artifact) -> str | None:
        """Whether the manifest holds the account."""
        return missing_fact(artifact, {"tensors": list, "notes": list})

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
        """Write the bundle: its shards, journaled one by one, then the small files.

        `source` is what g4.json says of the checkpoint's origin.
        """
        from g4tool.checkpoint.folder import CONFIG
        from g4tool.checkpoint.writer import INDEX
        from g4tool.files import write_json
        from g4tool.formats.bundle import BUNDLE, fingerprint
        from g4tool.quantize import account, bundle, driver, policy

        plans = policy.plan(checkpoint, self.options, self.qat)
        units = driver.units(plans, self.options.layerwise)
        index = bundle.bundle_index(units)
        side_files = bundle.bundle_side_files(checkpoint)
        # The shards, the small files, and config.json, g4.json, the index where there are several.
        work.expect(len(units) + len(side_files) + 2 + (len(units) > 1))
        work.need(index["metadata"]["total_size"])

        recipe = self.parameters()
        mark = fingerprint(source, recipe)

        at_once = self.files_at_once()
        # Bytes of several files at a time would make the bar jump; it counts files then.
        report = work.report if at_once == 1 else silent

        def shard(unit: driver.Unit, path: Path) -> Json:
            found = driver.quantize_unit(
                checkpoint, unit, path, self.device, report, fingerprint=mark
            )
            return account.to_json(found)

        made = work.each({unit.file: partial(shard, unit) for unit in units}, at_once)
        accounts = account.from_json(tensor for tensors in made for tensor in tensors or ())
        account.check_account(checkpoint, self.options, accounts)
        lineage = bundle.lineage(
            checkpoint,
            accounts,
            source=source,
            recipe=recipe,
            versions={**self.environment(), "g4": __version__},
            fingerprint=mark,
        )
        config = bundle.bundle_config(checkpoint, self.options, plans)
        work.file(CONFIG, lambda path: write_json(path, config))
        work.file(BUNDLE, lambda path: write_json(path, lineage))
        if len(units) > 1:
            work.file(INDEX, lambda path: write_json(path, index))
        for name in side_files:
            work.file(name, partial(copy_file, checkpoint.folder / name))
        work.fact("bits_per_weight", lineage["bits_per_weight"])
        notes = policy.unmatched_rules(checkpoint, self.options) + account.grid_notes(accounts)
        work.fact("notes", notes)
        work.fact("tensors", lineage["tensors"])
