"""Is AWS's Neuron SDK there, in which versions, and if not, what is there in its place?

PyPI has placeholders under the SDK's names: some raise "WRONG PACKAGE" when imported, others cannot
be imported at all. A missing SDK, a placeholder and an SDK too old each need another remedy.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from g4tool.errors import UsageError

INDEX = "https://pip.repos.neuron.amazonaws.com"
PACKAGES = {
    "torch-neuronx": ("torch_neuronx", "2.9"),
    "neuronx-cc": ("neuronxcc", "2.21"),
    "neuronx-distributed": ("neuronx_distributed", "0.15"),
    "neuronx-distributed-inference": ("neuronx_distributed_inference", "0.9"),
}
"""Distribution -> its module, and the oldest release that the port runs on."""
INSTALL = (
    f"pip install --extra-index-url={INDEX} "
    + " ".join(f'"{name}>={least}"' for name, (_, least) in PACKAGES.items())
    + " g4tool"
)
# What PyPI's placeholders call themselves.
_STUBS = {"1.0", "0.1", "0.1.0", "0.0.1", "1.0.post1"}
_TIMEOUT = 300
_ANSWER = "the Neuron SDK here: "

State = Literal["ok", "missing", "placeholder", "too old", "broken"]

# Runs in the SDK's Python, which need not have g4tool.
_PROBE = """
import importlib, importlib.metadata, json, sys
modules, found = json.loads(sys.argv[1]), {}
for name in modules:
    try:
        found[name] = [importlib.metadata.version(name), None]
    except importlib.metadata.PackageNotFoundError:
        found[name] = [None, None]
# Twice: an import may end the process.
print(sys.argv[2] + json.dumps(found), flush=True)
for name, module in modules.items():
    if found[name][0] is not None:
        try:
            importlib.import_module(module)
        except BaseException as error:
            found[name][1] = f"{type(error).__name__}: {error}"
print("\\n" + sys.argv[2] + json.dumps(found))
"""


@dataclass(frozen=True)
class Sdk:
    """What `probe` found. `versions` are those installed; `detail` says what is wrong."""

    state: State
    versions: Mapping[str, str]
    detail: str = ""

    def message(self, python: Path) -> str:
        """One sentence for a user who wanted to compile, with the remedy."""
        return (
            f"AWS's Neuron SDK is not in {python}: {self.detail}; install it on Linux x86-64 with "
            f"`{INSTALL}` into a Python of its own and name that with --neuron-python, or leave "
            f"it at the plan with --plan-only. No NEFF was made."
        )


def probe(python: Path) -> Sdk:
    """Ask `python` for the SDK's packages. Raises UsageError where it is no Python."""
    modules = {name: module for name, (module, _) in PACKAGES.items()}
    no_python = f"--neuron-python {python} cannot be run as a Python"
    try:
        ran = subprocess.run(
            [str(python), "-c", _PROBE, json.dumps(modules), _ANSWER],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT,
        )
    except OSError as error:
        raise UsageError(f"{no_python} ({error.strerror}).") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{no_python} (no answer in {_TIMEOUT} seconds).") from None
    answers = [line for line in ran.stdout.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        raise UsageError(f"{no_python} (it ended with exit code {ran.returncode} and no answer).")
    found = json.loads(answers[-1].removeprefix(_ANSWER))
    sdk = classify({name: (version, problem) for name, (version, problem) in found.items()})
    if ran.returncode and sdk.state == "ok":
        detail = f"importing its packages ended that Python with exit code {ran.returncode}"
        return Sdk("broken", sdk.versions, detail)
    return sdk


def classify(found: Mapping[str, tuple[str | None, str | None]]) -> Sdk:
    """What distributions' versions and import problems (None: imports) amount to."""
    versions = {name: version for name, (version, _) in found.items() if version is not None}
    stubs = [f"{name} {versions[name]}" for name in versions if _is_stub(*found[name])]
    if stubs:
        verb = "are PyPI's placeholders" if len(stubs) > 1 else "is PyPI's placeholder"
        return Sdk("placeholder", versions, f"{_listed(stubs)} {verb}, not the SDK")
    missing = [name for name in found if name not in versions]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        return Sdk("missing", versions, f"{_listed(missing)} {verb} missing")
    old = [
        f"{name} {versions[name]} is older than {least}"
        for name, (_, least) in PACKAGES.items()
        if _numbers(versions[name]) < _numbers(least)
    ]
    if old:
        return Sdk("too old", versions, _listed(old))
    for name, (_, problem) in found.items():
        if problem is not None:
            return Sdk("broken", versions, f"{name} cannot be imported ({problem})")
    return Sdk("ok", versions)


def _is_stub(version: str | None, problem: str | None) -> bool:
    return "WRONG PACKAGE" in (problem or "") or (version in _STUBS and problem is not None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:4])


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
