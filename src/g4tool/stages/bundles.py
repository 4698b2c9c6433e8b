"""Writes a quantized model in each format that is asked for, from one reading of the weights.

The first format is the artifact's own folder; each other one is a folder in it, named for the
format, with everything its loader needs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from g4tool.checkpoint.folder import CONFIG
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.writer import INDEX, SINGLE
from g4tool.files import write_json
from g4tool.formats import executorch_file
from g4tool.formats.bundle import BUNDLE, fingerprint
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.work import Work
from g4tool.progress import Report, silent
from g4tool.quantize import account, bundle, compressed, driver
from g4tool.quantize.account import TensorAccount
from g4tool.quantize.compressed_shard import CompressedShard, compressed_unit
from g4tool.quantize.options import QuantizeOptions
from g4tool.quantize.policy import EMBEDDING, HEAD, TensorPlan
from g4tool.stages.checkpoints import copy_file

TORCHAO, COMPRESSED, EXECUTORCH = "torchao", "compressed-tensors", "executorch"

Accounts = dict[str, list[TensorAccount]]


@dataclass
class Bundles:
    """One quantization on its way into the folders of its formats.

    `source`, `recipe` and `versions` are what g4.json says of the lineage. `below_0`: how many
    groups of the file for ExecuTorch have zero points below 0.
    """

    work: Work
    checkpoint: Checkpoint
    options: QuantizeOptions
    plans: list[TensorPlan]
    formats: tuple[str, ...]
    device: str
    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    versions: Mapping[str, str]
    below_0: int = 0
    _twins: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Plan the files. Raises UsageError for a format that cannot hold the model."""
        if EXECUTORCH in self.formats:
            executorch_file.check_model(self.checkpoint.config)
        self.mark = fingerprint(self.source, self.recipe)
        self.units = driver.units(self.plans, self.options.layerwise)
        self.packed_plans = compressed.compressed_plan(self.checkpoint, self.plans)
        if COMPRESSED in self.formats:
            compressed.check_plan(self.packed_plans)
        self.packed_units = compressed.compressed_units(self.units, self.packed_plans)
        self.side_files = bundle.bundle_side_files(self.checkpoint)
        self.text = [
            (item.name, driver.stored(item))
            for item in self.plans
            if item.name not in self.checkpoint.extras
        ]
        self.indexes = {
            TORCHAO: bundle.bundle_index(self.units),
            COMPRESSED: compressed.compressed_index(self.packed_units),
            EXECUTORCH: executorch_file.file_index(self.text),
        }

    def write(self, at_once: int = 1) -> Accounts:
        """Write every file, those of several layers `at_once`.

        Returns the account of each format, in the order of `formats`.
        """
        small = len(self.side_files) + 2
        several = len(self.units) > 1
        shards = {EXECUTORCH: 1}
        counts = [shards.get(name, len(self.units) + several) + small for name in self.formats]
        self.work.expect(sum(counts))
        self.work.need(sum(self.size(name) for name in self.formats))
        # Bytes of several files at a time would make the bar jump; it counts files then.
        report = self.work.report if at_once == 1 else silent
        pairs = zip(self.units, self.packed_units, strict=True)
        made = self.work.together([partial(self._unit, *pair, report) for pair in pairs], at_once)
        accounts = {
            name: account.from_json(tensor for each in made for tensor in each[name] or ())
            for name in (TORCHAO, COMPRESSED)
            if name in self.formats
        }
        if COMPRESSED in accounts:
            account.check_complete(self.checkpoint, accounts[COMPRESSED])
        if TORCHAO in accounts:
            account.check_account(self.checkpoint, self.options, accounts[TORCHAO])
        if EXECUTORCH in self.formats:
            accounts[EXECUTORCH] = self._write_executorch(accounts[TORCHAO])
        for name in self.formats:
            self._small_files(name, accounts[name])
        return {name: accounts[name] for name in self.formats}

    def folder(self, name: str) -> str:
        """What stands before the names of a format's files: nothing for the first one."""
        return "" if name == self.formats[0] else f"{name}/"

    def facts(self, accounts: Accounts) -> Json:
        """What the manifest says of each format."""
        facts: dict[str, dict[str, Json]] = {
            name: {
                "folder": self.folder(name),
                "nbytes": self.size(name),
                "bits_per_weight": account.rounded_bits(found),
            }
            for name, found in accounts.items()
        }
        if EXECUTORCH in facts:
            facts[EXECUTORCH]["zeros_below_0"] = self.below_0
        return facts

    def notes(self) -> list[str]:
        """What a person should know."""
        if not self.below_0:
            return []
        return [
            f"{self.below_0:,} groups have zero points below 0, which the packing for CUDA of"
            f" ExecuTorch's example takes for 0: with --prequantized their weights are others."
        ]

    def size(self, name: str) -> int:
        """Bytes of a format's tensors."""
        size: int = self.indexes[name]["metadata"]["total_size"]
        return size

    def _unit(self, unit: driver.Unit, twin: driver.Unit, report: Report) -> dict[str, Json]:
        """The files of one layer: what their accounts say, by format."""
        made: dict[str, Json] = {}
        if TORCHAO in self.formats:
            name = self.folder(TORCHAO) + unit.file
            made[TORCHAO] = self.work.file(name, partial(self._quantize, unit, twin, report))
        if COMPRESSED in self.formats:
            name = self.folder(COMPRESSED) + twin.file
            made[COMPRESSED] = self.work.file(name, partial(self._packed, twin, report))
            # It was made in vain where only the other file had to be made again.
            self._waiting(twin).unlink(missing_ok=True)
        return made

    def _quantize(self, unit: driver.Unit, twin: driver.Unit, report: Report, path: Path) -> Json:
        quantize = partial(
            driver.quantize_unit,
            self.checkpoint,
            unit,
            path,
            self.device,
            report,
            fingerprint=self.mark,
        )
        if COMPRESSED not in self.formats:
            return account.to_json(quantize())
        waiting = self._waiting(twin)
        waiting.parent.mkdir(exist_ok=True, parents=True)
        with CompressedShard(waiting, twin, self.mark) as shard:
            own = account.to_json(quantize(also=shard.take))
            packed = account.to_json(shard.accounts)
        self._twins[twin.file] = packed
        return own

    def _waiting(self, twin: driver.Unit) -> Path:
        """Where a twin waits until the journal takes it; what a kill leaves there is made anew."""
        path = self.work.path / (self.folder(COMPRESSED) + twin.file)
        return path.with_name(f"{path.name}.twin")

    def _packed(self, twin: driver.Unit, report: Report, path: Path) -> Json:
        if twin.file in self._twins:
            self._waiting(twin).replace(path)
            return self._twins[twin.file]
        found = compressed_unit(self.checkpoint, twin, path, self.device, report, self.mark)
        return account.to_json(found)

    def _write_executorch(self, accounts: Iterable[TensorAccount]) -> list[TensorAccount]:
        shards = [self.work.path / (self.folder(TORCHAO) + unit.file) for unit in self.units]

        def make(path: Path) -> Json:
            return executorch_file.write_file(path, self.text, shards, self.mark, self.work.report)

        self.below_0 = self.work.file(self.folder(EXECUTORCH) + SINGLE, make) or 0
        names = {name for name, _ in self.text}
        text = [replace(a, hf_name=a.name) for a in accounts if a.name in names]
        if HEAD not in names:
            tied = next(a for a in text if a.name == EMBEDDING)
            why = f"{tied.reason}; a copy of the embedding"
            text.append(replace(tied, name=HEAD, hf_name=HEAD, reason=why))
        return text

    def _config(self, name: str) -> dict[str, Any]:
        if name == COMPRESSED:
            return compressed.compressed_config(self.checkpoint, self.packed_plans)
        config = bundle.bundle_config(self.checkpoint, self.options, self.plans)
        return executorch_file.file_config(config) if name == EXECUTORCH else config

    def _small_files(self, name: str, accounts: Iterable[TensorAccount]) -> None:
        folder, config = self.folder(name), self._config(name)
        facts = bundle.lineage(
            self.checkpoint,
            accounts,
            source=self.source,
            recipe=self.recipe,
            versions=self.versions,
            fingerprint=self.mark,
        )
        self.work.file(folder + CONFIG, lambda path: write_json(path, config))
        self.work.file(folder + BUNDLE, lambda path: write_json(path, facts))
        if len(self.units) > 1 and name != EXECUTORCH:
            self.work.file(folder + INDEX, lambda path: write_json(path, self.indexes[name]))
        for file in self.side_files:
            self.work.file(folder + file, partial(copy_file, self.checkpoint.folder / file))
