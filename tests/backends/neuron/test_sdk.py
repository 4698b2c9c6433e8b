"""Missing, a placeholder from PyPI, too old, broken: each told apart, with the remedy."""

from pathlib import Path

import pytest

from g4tool.backends.neuron.sdk import INDEX, probe
from g4tool.errors import UsageError
from tests.backends.neuron.sdk_stand_in import REAL, install, python_with

_STUBS = {
    "torch-neuronx": "1.0",
    "neuronx-cc": "1.0.post1",
    "neuronx-distributed": "0.1",
    "neuronx-distributed-inference": "0.1.0",
}


@pytest.mark.parametrize(
    ("versions", "stubs", "state", "detail"),
    [
        ({}, (), "missing", "torch-neuronx, neuronx-cc, neuronx-distributed and"),
        (
            {"torch-neuronx": REAL["torch-neuronx"]},
            (),
            "missing",
            "neuronx-cc, neuronx-distributed and neuronx-distributed-inference are missing",
        ),
        (
            {"torch-neuronx": "1.0"},
            ("torch-neuronx",),
            "placeholder",
            "torch-neuronx 1.0 is PyPI's placeholder, not the SDK",
        ),
        (
            {"neuronx-cc": "1.0.post1"},
            ("neuronx-cc",),
            "placeholder",
            "neuronx-cc 1.0.post1 is PyPI's placeholder",
        ),
        (_STUBS, tuple(_STUBS), "placeholder", "neuronx-distributed-inference 0.1.0 are PyPI's"),
        (
            {**REAL, "neuronx-cc": "2.15.128.0"},
            (),
            "too old",
            "neuronx-cc 2.15.128.0 is older than 2.21",
        ),
        (REAL, ("torch-neuronx",), "placeholder", "torch-neuronx 2.9.0.2.11.19912 is PyPI's"),
        (REAL, (), "ok", ""),
    ],
)
def test_situations(
    versions: dict[str, str], stubs: tuple[str, ...], state: str, detail: str, tmp_path: Path
) -> None:
    install(tmp_path, versions, stubs)
    sdk = probe(python_with(tmp_path))
    assert sdk.state == state
    assert detail in sdk.detail
    assert sdk.versions == versions
    if state != "ok":
        message = sdk.message(Path("/x/python"))
        assert f"--extra-index-url={INDEX}" in message
        assert "--plan-only" in message
        assert message.endswith("No NEFF was made.")


def test_a_package_that_breaks_on_import(tmp_path: Path) -> None:
    install(tmp_path, REAL)
    (tmp_path / "neuronxcc" / "__init__.py").write_text("import libnrt_that_is_not_there")
    sdk = probe(python_with(tmp_path))
    assert sdk.state == "broken"
    assert "neuronx-cc cannot be imported (ModuleNotFoundError" in sdk.detail


def test_a_package_that_ends_the_process(tmp_path: Path) -> None:
    install(tmp_path, REAL)
    (tmp_path / "neuronxcc" / "__init__.py").write_text("import os; os.abort()")
    sdk = probe(python_with(tmp_path))
    assert sdk.state == "broken"
    assert sdk.detail.endswith("ended that Python with exit code -6")
    assert sdk.versions == REAL


def test_packages_that_print_what_is_no_text(tmp_path: Path) -> None:
    install(tmp_path, REAL)
    (tmp_path / "neuronxcc" / "__init__.py").write_text(r"import os; os.write(1, b'\xff\xfe{')")
    assert probe(python_with(tmp_path)).state == "ok"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, r"\(No such file or directory\)"),
        ("#!/bin/sh\ncat\necho '{}'\nexit 7\n", r"\(it ended with exit code 7 and no answer\)"),
    ],
)
def test_no_python(script: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "python"
    if script:
        path.write_text(script)
        path.chmod(0o755)
    with pytest.raises(UsageError, match=f"cannot be run as a Python {words}"):
        probe(path)
