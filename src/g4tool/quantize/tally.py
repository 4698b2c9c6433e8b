"""Adds the blocks of a tensor up to its line in the account."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from g4tool.checkpoint.writer import Spec
from g4tool.quantize.account import TensorAccount, check_error
from g4tool.quantize.grid import is_grid
from g4tool.quantize.pack import Packed
from g4tool.quantize.policy import TensorPlan
from g4tool.quantize.solvers import relative_error


@dataclass
class Tally:
    """What the blocks of a tensor add up to; `error` and `energy` have one value a row."""

    error: list[float] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)
    off_grid: int = 0
    groups: int = 0

    def add(self, result: Packed) -> None:
        """Add a block's."""
        self.error += result.error.tolist()
        self.energy += result.energy.tolist()
        self.off_grid += result.off_grid
        self.groups += result.scale.numel()

    def account(self, item: TensorPlan, nbytes: int) -> TensorAccount:
        """The account of the whole tensor. Raises G4Error for one that its scheme cannot hold."""
        account = TensorAccount(
            name=item.name,
            hf_name=item.hf_name,
            scheme=item.scheme,
            group_size=item.group_size,
            solver=item.solver,
            shape=item.shape,
            nbytes=nbytes,
            rel_error=relative_error(self.error, self.energy),
            reason=item.reason,
            off_grid=self.off_grid / self.groups if is_grid(item.solver) else None,
        )
        check_error(account)
        return account


def specs_size(specs: Iterable[Spec]) -> int:
    """Bytes of the tensors."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs)
