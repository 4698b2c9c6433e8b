"""What an export works from, and its proof, stage by stage as the program comes about."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.errors import G4Error
from g4tool.progress import Progress, Report, silent

if TYPE_CHECKING:
    import torch

    from g4tool.backends.executorch.cuda_runtime import CudaMethods
    from g4tool.backends.executorch.program import ProgramOptions
    from g4tool.backends.executorch.verify import Finding, Step, Tolerance, Walk
    from g4tool.generate.tokenizer import Tokenizer
    from g4tool.model.config import TextConfig
    from g4tool.model.text import TextModel
    from g4tool.stages.export import ExportStage

STEPS = ("load", "export", "lower", "prove")


@dataclass
class Given:
    """What one export works from: `weights` a bundle, a view or a checkpoint; `source`, if it is at
    hand, what the weights were quantized from."""

    stage: "ExportStage"
    weights: Path
    source: Path | None
    report: Report = silent

    @cached_property
    def files(self) -> Path:
        """Where the tokenizer and the configs lie; a view's are its source's."""
        from g4tool.checkpoint.view import VIEW, source_folder

        return source_folder(self.weights) if (self.weights / VIEW).is_file() else self.weights

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The model's own."""
        from g4tool.generate.tokenizer import Tokenizer

        return Tokenizer(self.files)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Say which step is under way, and every second for how long: some take minutes."""
        done, began, ended = STEPS.index(name), time.monotonic(), threading.Event()

        def tell() -> None:
            note = f"{name}, {time.monotonic() - began:.0f} s"
            self.report(Progress(self.stage.name, done, len(STEPS), "steps", note))

        def go_on() -> None:
            while not ended.wait(1):
                tell()

        tell()
        clock = threading.Thread(target=go_on, daemon=True)
        clock.start()
        try:
            yield
        finally:
            ended.set()
            clock.join()

    def load(self, folder: Path, dtype: "torch.dtype", device: str = "cpu") -> "TextModel":
        """The canonical model in `folder`."""
        from g4tool.model.text import TextModel
        from g4tool.stages.loading import load_folder

        model, _ = load_folder(folder, dtype, device, self.report)
        if not isinstance(model, TextModel):
            raise G4Error(f"{folder} is an exported program already: give the bundle it came from.")
        return model


class Proof:
    """The proof's stages as they become possible, each compared with the one before."""

    def __init__(self, given: Given) -> None:
        self.findings: list[Finding] = []
        self._given = given
        self._walks: list[Walk] = []
        self._before: list[torch.Tensor] = []

    def add(self, name: str, step: "Step", config: "TextConfig", tolerance: "Tolerance") -> None:
        """Walk `step` and compare. Raises G4Error when it is out of tolerance."""
        from g4tool.backends.executorch.verify import compare, trace

        self._walks = self._walks or self._plan(config)
        now = [trace(step, walk) for walk in self._walks]
        if self._before:
            self.record(compare(name, self._before, now, tolerance))
        self._before = now

    def record(self, found: "Finding") -> None:
        """Keep one stage's result. Raises G4Error when it is out of tolerance."""
        from g4tool.backends.executorch.verify import require

        self.findings.append(found)
        require(self.findings)

    def _plan(self, config: "TextConfig") -> "list[Walk]":
        from g4tool.backends.executorch.verify import walks

        stage = self._given.stage
        longest = min(stage.max_seq_len, config.max_position_embeddings)
        ids = proof_ids(self._given.tokenizer, config.sliding_window)
        return walks(ids, config.sliding_window, longest, min(stage.prefill_chunk, longest))


def proof_ids(tokenizer: "Tokenizer", window: int) -> list[int]:
    """Held-out text of a few windows, BOS first."""
    from g4tool.backends.executorch.verify import DECODED
    from g4tool.evaluate.corpus import shipped_texts

    ids = [tokenizer.bos_id]
    wanted = 4 * window + 1 + DECODED
    for text in shipped_texts():
        if len(ids) >= wanted:
            break
        ids += tokenizer.encode(text.content[: 64 * window], bos=False)
    return ids[:wanted]


def begin(
    given: Given, dtype: "torch.dtype", device: str = "cpu"
) -> "tuple[TextModel, ProgramOptions, Proof | None]":
    """The model to export, what its program will be, and the proof up to the eager model."""
    import torch

    from g4tool.backends.executorch import verify

    stage = given.stage
    proof = Proof(given) if stage.verify else None
    with given.step("load"):
        if proof and given.source:
            model = given.load(given.source, torch.bfloat16, device)
            longest = stage.options.within(model.config.max_position_embeddings).max_seq_len
            proof.add("eager bf16", verify.eager(model, longest), model.config, verify.QUANTIZED)
            del model
        model = given.load(given.weights, dtype, device)
        options = stage.options.within(model.config.max_position_embeddings)
        if proof:
            step = verify.eager(model, options.max_seq_len)
            proof.add("eager", step, model.config, verify.QUANTIZED)
    return model, options, proof


def constants_of(given: Given, model: "TextModel") -> dict[str, int | list[int]]:
    """The program's constant methods."""
    from g4tool.backends.executorch.program import constant_methods

    options = given.stage.options.within(model.config.max_position_embeddings)
    eos_ids = sorted(given.tokenizer.end_ids)
    return constant_methods(model, options, given.tokenizer.bos_id, eos_ids)


def facts_of(given: Given, model: "TextModel") -> dict[str, Any]:
    """What export.json says whatever the backend: its constants, the turn, the weights' origin."""
    constants = constants_of(given, model)
    return {
        **constants,
        "sampling": bool(constants["sampling"]),
        "turn": _turn(given),
        "source": _weights_origin(given),
    }


def weights_finding(path: Path, model: "TextModel") -> "Finding":
    """Whether the file at `path` has the packed weights of a model that is plain."""
    from g4tool.backends.executorch.verify import Finding
    from g4tool.backends.executorch.weights import missing_weights, packed_weights

    weights = packed_weights(model)
    missing = missing_weights(path, weights)
    note = f"{len(weights)} packed tensors equal the bundle's"
    if missing:
        note = f"{len(missing)} of {len(weights)} packed tensors differ, such as {missing[0]}"
    return Finding("weights in the file", not missing, note=note)


def stored_finding(loaded: "CudaMethods", model: "TextModel") -> "Finding":
    """Whether a CUDA program's weights, as they lie in its file, are the model's packed ones."""
    from g4tool.backends.executorch.verify import Finding

    names = loaded.differing(model.state_dict())
    note = "the packed tensors equal the bundle's"
    if names:
        note = f"{len(names)} tensors differ, such as {names[0]}"
    return Finding("model.ptd", not names, note=note)


def _turn(given: Given) -> dict[str, str] | None:
    """What the chat template puts around a lone user message, for runners without templates."""
    from g4tool.generate.chat import load_chat_template

    mark = "MESSAGE"
    try:
        template = load_chat_template(given.files)
        text = template.render([{"role": "user", "content": mark}], names=given.tokenizer.names)
    except G4Error:
        return None
    before, found, after = text.partition(mark)
    return {"before": before, "after": after} if found and mark not in after else None


def _weights_origin(given: Given) -> dict[str, Any]:
    """What export.json says of where the weights came from."""
    from g4tool.formats.bundle import BUNDLE, FINGERPRINT, is_bundle, lineage_of

    if not is_bundle(given.weights):
        return {"quantized": False}
    facts = lineage_of(given.weights)
    return {
        "quantized": True,
        "file": BUNDLE if facts else None,
        "fingerprint": facts.get(FINGERPRINT),
        "bundle_source": facts.get("source", {}),
        "recipe": facts.get("recipe", {}),
    }
