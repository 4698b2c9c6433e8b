"""What torchrun tells each process that it starts; needs no torch."""

import os
from typing import NamedTuple

from g4tool.errors import UsageError


class Launch(NamedTuple):
    """This process among `size` of them; `local` counts those of this machine."""

    rank: int
    local: int
    size: int


def launched() -> Launch | None:
    """This process's place among several, None where it is alone.

    Raises UsageError for values that are not whole numbers.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = Launch(rank, int(os.environ.get("LOCAL_RANK", rank)), size)
    except ValueError as error:
        raise UsageError(f"RANK, LOCAL_RANK or WORLD_SIZE is no number ({error}).") from error
    return found if size > 1 else None
