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


def test_no_python(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be run as a Python"):
        probe(tmp_path / "python")
