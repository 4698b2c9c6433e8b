"""What makes programs for Neuron of a planned model: one function type, two implementations.

NxD Inference compiles for Inferentia2 and Trainium and is in maintenance; its successor takes
StableHLO. Whoever plans a compilation knows neither, only this file. It needs neither torch nor
the SDK to import.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from g4tool.errors import UsageError

Event = Mapping[str, Any]
EventReport = Callable[[Event], None]

_COMPILERS = {
    "nxdi": "g4tool.backends.neuron.compile_nxdi",
    "stablehlo": "g4tool.backends.neuron.stablehlo",
}


@dataclass(frozen=True)
class CompileJob:
    """A checkpoint's folder, NxD Inference's settings by name, and the folder to write to."""

    model: Path
    settings: Mapping[str, Any]
    out: Path


class Compile(Protocol):
    """Does a job. Raises G4Error where it cannot, IncompleteError where it lacks a package."""

    def __call__(self, job: CompileJob, report: EventReport) -> None:
        """Reports {"event": "bucket", "model", "bucket", "done", "total"} for each program made.

        At the end it reports {"event": "done", "files", "versions"}: files relative to job.out.
        """


def compiler(name: str) -> Compile:
    """The implementation called `name`. Raises UsageError for an unknown one."""
    if name not in _COMPILERS:
        raise UsageError(f"there is no Neuron compiler {name!r}; the names are nxdi, stablehlo.")
    made: Compile = import_module(_COMPILERS[name]).compile_model
    return made
