"""Packages under the Neuron SDK's names in a folder, as `pip install --target` would leave them.

None of them computes anything: they stand for what is or is not installed.
"""

import os
import sys
from pathlib import Path

_MODULES = {
    "torch-neuronx": "torch_neuronx",
    "neuronx-cc": "neuronxcc",
    "neuronx-distributed": "neuronx_distributed",
    "neuronx-distributed-inference": "neuronx_distributed_inference",
}
REAL = {
    "torch-neuronx": "2.9.0.2.11.19912",
    "neuronx-cc": "2.23.6484.0",
    "neuronx-distributed": "0.17.26814",
    "neuronx-distributed-inference": "0.9.17155",
}
_STUB = 'raise ImportError("WRONG PACKAGE. Please install the package from Neuron Repository")\n'


def install(folder: Path, versions: dict[str, str], stubs: tuple[str, ...] = ()) -> None:
    """Packages at these versions; `stubs` raise when imported, or cannot be found at all."""
    for name, version in versions.items():
        module = _MODULES[name]
        about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        # PyPI's placeholder for neuronx-cc has its code in a folder with a hyphen.
        where = name if name in stubs and name == "neuronx-cc" else module
        (folder / where).mkdir()
        (folder / where / "__init__.py").write_text(_STUB if name in stubs else "")


def python_with(folder: Path) -> Path:
    """A Python that sees this one's packages and those in `folder`."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{folder}${{PYTHONPATH:+{os.pathsep}$PYTHONPATH}}"\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return path
