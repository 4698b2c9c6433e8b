"""What a check finds: a code that can be looked up, how bad it is, where, and what to do."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from g4tool.errors import G4Error

Level = Literal["error", "warning"]

COMPILER_CODES = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/compiler/error-codes/"
"""Codes that begin with NCC_ are the Neuron compiler's own, published there."""


@dataclass(frozen=True)
class Finding:
    """One thing that the compiler or NxD Inference refuses (error) or may refuse (warning).

    Codes NCC_… are the compiler's published ones; NXDI_… are rules of NxD Inference or of g4's port
    to it, named here.
    """

    code: str
    level: Level
    where: str
    message: str


def refuse_errors(findings: Iterable[Finding]) -> None:
    """Raises G4Error with all errors among the findings."""
    errors = [f"{each.code} ({each.where}): {each.message}" for each in findings if is_error(each)]
    if errors:
        raise G4Error("this model cannot be compiled for Neuron as asked: " + " ".join(errors))


def is_error(finding: Finding) -> bool:
    """Whether compilation would fail for certain."""
    return finding.level == "error"


def as_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Findings as plain values, errors first."""
    return [asdict(each) for each in sorted(findings, key=lambda f: (f.level, f.code, f.where))]
