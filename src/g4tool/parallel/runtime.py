"""A rank's part of the canonical model, joined to the others'.

The model is the canonical one of the plan's rank config, so no layer is told again. What is added
stands at the leaves: sums behind the matrices that write to the residual stream, and lookups and
scores over a part of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from g4tool.model.text import TextModel
from g4tool.parallel.group import Group
from g4tool.parallel.plan import Plan, Split


class PartEmbedding(nn.Module):
    """Rows `start` to `stop` of a table, `part`, among ranks that have the others."""

    def __init__(
        self, part: nn.Module, start: int, stop: int, sizes: Sequence[int], group: Group
    ) -> None:
        super().__init__()
        self.part = part
        self.start, self.stop = start, stop
        self.sizes = tuple(sizes)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., dim], unscaled, for any ids int64 [...] of the whole table."""
        mine = (ids >= self.start) & (ids < self.stop)
        rows = self.part((ids - self.start).clamp(0, self.stop - self.start - 1))
        return self.group.sum(rows.masked_fill(~mine.unsqueeze(-1), 0))

    def project(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden [..., dim] against all ranks' rows."""
        part = cast(Any, self.part)
        return self.group.gather(part.project(hidden), self.sizes)


def build_rank(plan: Plan, rank: int) -> TextModel:
    """The unfilled model of a rank, on the meta device. `join_ranks` comes after filling it."""
    with torch.device("meta"):
        return TextModel(plan.rank_config(rank))


def join_ranks(model: TextModel, plan: Plan, group: Group) -> TextModel:
    """Joins a filled rank's model to the others, which do the same; returns it."""
    for name, split in plan.splits.items():
        if not name.endswith(".weight"):
            continue
        path = name.removesuffix(".weight")
        if split.kind == "vocabulary" and path != "lm_head":
            model.set_submodule(path, _part_embedding(model.get_submodule(path), split, group))
        elif split.after == "gather":
            _gather_after(model.get_submodule(path), _sizes(split), group)
        elif path.endswith(".experts.down_proj") and split.after == "sum":
            # Behind the mixture, where there is one row a token and not one a chosen expert.
            _sum_after(model.get_submodule(path.removesuffix(".down_proj")), group)
        elif split.after == "sum":
            _sum_after(model.get_submodule(path), group)
        elif split.note and path.endswith(".o_proj"):
            width = split.shape[-1] // group.size
            _gather_before(model.get_submodule(path), [width] * group.size, group)
    return model


def _part_embedding(part: nn.Module, split: Split, group: Group) -> PartEmbedding:
    ((start, stop),) = split.runs[group.rank]
    return PartEmbedding(part, start, stop, _sizes(split), group)


def _sizes(split: Split) -> list[int]:
    return [sum(stop - start for start, stop in runs) for runs in split.runs]


def _sum_after(module: nn.Module, group: Group) -> None:
    module.register_forward_hook(lambda _, __, out: group.sum(out))


def _gather_after(module: nn.Module, sizes: Sequence[int], group: Group) -> None:
    module.register_forward_hook(lambda _, __, out: group.gather(out, sizes))


def _gather_before(module: nn.Module, sizes: Sequence[int], group: Group) -> None:
    module.register_forward_pre_hook(lambda _, given: (group.gather(given[0], sizes),))
