"""An exported program as a language model: what generation and evaluation call, run by ExecuTorch.

Its "hidden states" are logits already, so `logits` gives back what it is given.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from g4tool.backends.executorch.folder import PROGRAM, ExportFacts, check_files, read_facts
from g4tool.backends.executorch.library import load_runtime, quiet
from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import CONFIG, read_json
from g4tool.errors import G4Error
from g4tool.generate.sampler import Sampling
from g4tool.model.config import TextConfig


class Methods(Protocol):
    """A loaded program; both methods work on one cache. Inputs as in g4tool.backends.executorch."""

    device: torch.device

    def prefill(self, *inputs: Tensor) -> Tensor: ...

    def decode(self, *inputs: Tensor) -> Tensor: ...


class ExportedModel:
    """Batch 1, positions from 0 to `max_seq_len`. The methods are those of `TextModel`.

    `config` is the model's own, its longest sequence cut to what the program's cache holds.
    """

    def __init__(self, methods: Methods, facts: ExportFacts, config: TextConfig) -> None:
        self.methods = methods
        self.facts = facts
        self.samples = facts.sampling
        self.config = replace(config, max_position_embeddings=facts.max_seq_len)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits fp32 [1, S, vocab] of a whole sequence int64 [1, S]."""
        return self.hidden(input_ids)

    @property
    def device(self) -> torch.device:
        """Where ids go in and logits come out."""
        return self.methods.device

    def allocate_cache(self, batch: int, length: int) -> None:
        """The program has its cache. Raises G4Error for another batch than 1."""
        if batch != 1:
            raise G4Error(f"an exported program runs one prompt at a time, not {batch}.")

    def reset_cache(self) -> None:
        """Starting again at position 0 needs no clearing."""

    def drop_cache(self) -> None:
        """The cache is the program's."""

    def hidden(
        self, input_ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor:
        """Logits fp32 [1, 1, vocab] after the last of ids [1, S] at position `start`.

        Without `start`, [1, S, vocab] for a whole sequence, one token at a time: a program gives no
        others. Raises G4Error for more than one row, and for more tokens than the cache holds.
        """
        if input_ids.shape[0] != 1 or pad is not None:
            raise G4Error("an exported program runs one prompt at a time.")
        first = 0 if start is None else int(start)
        count = input_ids.shape[1]
        self._check_room(first + count)
        step = 1 if start is None else self.facts.prefill_chunk
        found = [
            self._run(input_ids[:, at : at + step], first + at) for at in range(0, count, step)
        ]
        return torch.stack(found if start is None else found[-1:], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """What `hidden` gave."""
        return hidden

    def next_ids(
        self, input_ids: Tensor, start: Tensor, sampling: Sampling, uniform: float
    ) -> Tensor:
        """The id that a program with sampling chooses after ids [1, S]: int64 [1].

        Raises G4Error for more tokens than the cache holds.
        """
        step = self.facts.prefill_chunk
        first, count = int(start), input_ids.shape[1]
        self._check_room(first + count)
        knobs = (
            torch.tensor(sampling.temperature, dtype=torch.float32),
            torch.tensor(sampling.top_k),
            torch.tensor(sampling.top_p, dtype=torch.float32),
            torch.tensor(uniform, dtype=torch.float32),
        )
        for at in range(0, count, step):
            found = self._run(input_ids[:, at : at + step], first + at, knobs)
        return found.view(1)

    def _check_room(self, end: int) -> None:
        if end > self.facts.max_seq_len:
            raise G4Error(
                f"position {end} is beyond the {self.facts.max_seq_len} tokens that the "
                f"program holds; export it with a larger --max-seq-len."
            )

    def _run(self, ids: Tensor, start: int, knobs: Sequence[Tensor] = ()) -> Tensor:
        inputs = (ids.contiguous(), torch.tensor(start), *knobs)
        return self.methods.decode(*inputs) if ids.shape[1] == 1 else self.methods.prefill(*inputs)


class XnnpackMethods:
    """Both methods of a .pte in the wheel's runtime, over shared mutable buffers.

    Raises G4Error for a file that the runtime does not load.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        runtime = load_runtime()
        try:
            with quiet():
                # Two programs would be two caches: one program, two methods.
                self._program = runtime.load_program(path)
                self._prefill = self._program.load_method("prefill")
                self._decode = self._program.load_method("decode")
        except (RuntimeError, ValueError) as error:
            raise G4Error(
                f"{path} cannot be loaded by this executorch ({error}); export the model again."
            ) from error
        if self._prefill is None or self._decode is None:
            raise G4Error(f"{path} lacks the methods prefill and decode: g4 did not export it.")

    def prefill(self, *inputs: Tensor) -> Tensor:
        """See g4tool.backends.executorch.program."""
        return self._call(self._prefill, inputs)

    def decode(self, *inputs: Tensor) -> Tensor:
        """See g4tool.backends.executorch.program."""
        return self._call(self._decode, inputs)

    def _call(self, method: object, inputs: Sequence[Tensor]) -> Tensor:
        # The result lies in the program's memory, which the next call writes to.
        result: Tensor = method.execute(list(inputs))[0].clone()  # type: ignore[attr-defined]
        return result


def open_export(folder: Path, whole: bool = False) -> ExportedModel:
    """The program in `folder`, ready to run; `whole`: every byte of its files is checked first.

    Raises G4Error for a damaged or foreign folder, and for what this machine lacks to run it.
    """
    facts = read_facts(folder)
    check_files(folder, facts, whole)
    config = parse_text_config(read_json(folder / CONFIG), str(folder / CONFIG))
    if facts.backend == "cuda":
        from g4tool.backends.executorch.cuda_runtime import CudaMethods, check_gpu

        check_gpu(folder, facts)
        weights = [folder / name for name in facts.files if name.endswith(".ptd")]
        return ExportedModel(CudaMethods(folder / PROGRAM, weights), facts, config)
    return ExportedModel(XnnpackMethods(folder / PROGRAM), facts, config)
