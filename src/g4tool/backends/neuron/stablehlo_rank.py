"""The canonical model as one of several ranks runs it, to be exported: sizes without weights.

It is the model of the plan's runtime with its collectives said so that torch.export sees them. One
program serves all ranks: a rank's number, where the runtime knows it, is an argument here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed._functional_collectives  # gives the collectives below their shapes
from torch import Tensor, nn

from g4tool.backends.neuron.nxdi_layout import even_plan
from g4tool.model.config import TextConfig
from g4tool.model.decoder import DecoderLayer
from g4tool.model.text import TextModel
from g4tool.parallel.plan import Plan
from g4tool.parallel.runtime import PartEmbedding, join_ranks

# All ranks are one group here, so any name of it will do.
_GROUP = "ranks"


@dataclass(frozen=True)
class TracedGroup:
    """The ranks as a program names them: collectives are recorded, not run."""

    size: int
    rank: int = 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        reduced = torch.ops._c10d_functional.all_reduce(x, "sum", _GROUP)
        out: Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
        return out

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """All ranks' x [..., n] side by side; `sizes` are all n."""
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, self.size, _GROUP)
        parts = torch.ops._c10d_functional.wait_tensor(gathered).chunk(self.size)
        return torch.cat(parts, dim=-1)


class NumberedEmbedding(PartEmbedding):
    """A rank's rows of the vocabulary; `rank` int32 [] is the rank's number."""

    rank: Tensor

    def __init__(self, other: PartEmbedding) -> None:
        super().__init__(other.part, other.start, other.stop, other.sizes, other.group)
        number = torch.zeros((), dtype=torch.int32, device="meta")
        self.register_buffer("rank", number, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """As the runtime's."""
        rows = self.stop - self.start
        place = ids - self.rank * rows
        mine = (place >= 0) & (place < rows)
        found = self.part(place.clamp(0, rows - 1))
        return self.group.sum(torch.where(mine.unsqueeze(-1), found, 0.0))


def rank_model(
    config: TextConfig, ranks: int, batch: int, length: int, dtype: torch.dtype
) -> TextModel:
    """A rank's model with caches for `length` tokens a row, all on the meta device.

    Raises UsageError or G4Error for a degree that does not split the model evenly (see even_plan).
    """
    plan = even_plan(config, ranks)
    with torch.device("meta"):
        # With experts of the whole width, cut below: the canonical ones come in blocks of 8.
        model = TextModel(replace(plan.rank_config(0), moe=config.moe))
    if ranks > 1:
        _cut_whole(model, plan)
        join_ranks(model, plan, TracedGroup(ranks))
        for name, module in list(model.named_children()):
            if isinstance(module, PartEmbedding):
                setattr(model, name, NumberedEmbedding(module))
    for block in model.layers:
        if config.moe is not None:
            # Sorting tokens by expert has no counterpart in StableHLO with static shapes.
            cast(DecoderLayer, block).experts.prefill = "every"
    model.to(dtype).allocate_cache(batch, length)
    return model.eval()


def canonical_name(name: str) -> str:
    """The canonical name of a parameter of a rank's model."""
    return name.replace(".part.", ".").removeprefix("model.")


class LastToken(nn.Module):
    """A step whose result is the scores of one token a row."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, start: Tensor, last: Tensor) -> Tensor:
        """Logits [B, 1, vocab] of the token at place `last`, int64 [], of input_ids [B, S]."""
        states = self.model.hidden(input_ids, start)
        return self.model.logits(states.index_select(1, last[None]))


def _cut_whole(model: TextModel, plan: Plan) -> None:
    """Gives a rank's shape to the weights that are still whole: the vocabulary's, the experts'."""
    for name, split in plan.splits.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if tuple(getattr(module, leaf).shape) != split.rank_shape(0):
            weight = torch.empty(split.rank_shape(0), device="meta")
            setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
