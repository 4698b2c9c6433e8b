"""How a long job says where it is: plain values, so that no room needs to know who shows them."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """One step of a job: `done` of `total`, counted in `unit` ("bytes", "layers", "files")."""

    job: str
    done: int
    total: int
    unit: str
    note: str = ""


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """The report of a caller who does not want to know."""
