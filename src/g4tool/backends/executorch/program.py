"""The canonical model as two exported programs over one key-value cache.

    prefill(tokens int64 [1, S], 2 <= S <= prefill_chunk; start int64 []) -> fp32 [1, vocab]
    decode(tokens int64 [1, 1]; start int64 []) -> fp32 [1, vocab]

`start` is the position of the first token; the result are the logits after the last one. A program
that samples takes four more scalars (see g4tool.backends.executorch.sampling) and gives the next id
instead, int64 [1, 1]. A backend swaps the quantized leaves for its own before (plain.py, fused.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from g4tool.backends.executorch.fused import groups_experts
from g4tool.backends.executorch.sampling import SCALARS, next_id
from g4tool.errors import UsageError
from g4tool.model.moe import Experts
from g4tool.model.text import TextModel

METHODS = ("prefill", "decode")


@dataclass(frozen=True)
class ProgramOptions:
    """What shapes a program. Lengths in tokens; `sampling`: the program chooses the next id."""

    max_seq_len: int = 4096
    prefill_chunk: int = 1024
    sampling: bool = False

    def __post_init__(self) -> None:
        if self.max_seq_len < 2:
            raise UsageError(f"--max-seq-len {self.max_seq_len}: give at least 2 tokens.")
        if not 2 <= self.prefill_chunk <= self.max_seq_len:
            raise UsageError(
                f"--prefill-chunk {self.prefill_chunk}: give 2 to {self.max_seq_len} tokens, what "
                f"the cache holds."
            )

    def within(self, most: int) -> "ProgramOptions":
        """The same, cut to a model's longest sequence."""
        length = min(self.max_seq_len, most)
        return replace(self, max_seq_len=length, prefill_chunk=min(self.prefill_chunk, length))


def constant_methods(
    model: TextModel, options: ProgramOptions, bos_id: int, eos_ids: list[int]
) -> dict[str, int | list[int]]:
    """What a runner asks the program itself."""
    return {
        "max_seq_len": options.max_seq_len,
        "prefill_chunk": options.prefill_chunk,
        "sliding_window": model.config.sliding_window,
        "vocab_size": model.config.vocab_size,
        "bos_id": bos_id,
        "eos_ids": eos_ids,
        "sampling": int(options.sampling),
    }


@torch.no_grad()
def export_methods(model: TextModel, options: ProgramOptions) -> dict[str, ExportedProgram]:
    """Both methods, strictly exported, with a cache of `max_seq_len` tokens in the model's dtype.

    The programs refer to the model's weights and copy none.
    """
    length = Dim("length", min=2, max=options.prefill_chunk)
    scalars = (torch.tensor(3), *(SCALARS if options.sampling else ()))
    fixed = tuple(None for _ in scalars)
    method = _Sampling(model) if options.sampling else _Logits(model)
    device = model.norm.weight.device
    with _prepared(model, options.max_seq_len):
        programs = {}
        for name, count, shape in (("prefill", 4, {1: length}), ("decode", 1, None)):
            tokens = torch.zeros(1, min(count, options.prefill_chunk), dtype=torch.int64)
            inputs = tuple(each.to(device) for each in (tokens, *scalars))
            shapes = None if shape is None else (shape, *fixed)
            programs[name] = export(method, inputs, dynamic_shapes=shapes, strict=True)
    return programs


class _Logits(nn.Module):
    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        hidden = self.model.hidden(tokens, start)
        return self.model.logits(hidden[:, -1]).float()


class _Sampling(_Logits):
    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        start: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
    ) -> Tensor:
        return next_id(super().forward(tokens, start), temperature, top_k, top_p, uniform)


@contextmanager
def _prepared(model: TextModel, length: int) -> Iterator[None]:
    """The model with a cache; experts whose leaves have no grouped product that can be exported
    run every token, which needs neither it nor a sort."""
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    before = [module.prefill for module in experts]
    model.allocate_cache(1, length)
    for module in experts:
        module.prefill = "grouped" if groups_experts(module) else "every"
    try:
        yield
    finally:
        for module, prefill in zip(experts, before, strict=True):
            module.prefill = prefill
        model.drop_cache()
