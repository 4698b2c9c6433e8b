"""The runner, built once for all its tests."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "runner"


def _package(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return found.submodule_search_locations[0]


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the built g4-runner."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    prefix = f"{_package('executorch')};{_package('nlohmann_json')}"
    build = tmp_path_factory.mktemp("runner")
    cmake = [sys.executable, "-m", "cmake"]
    for command in (
        [*cmake, "-S", SOURCE, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"],
        [*cmake, "--build", build],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return build / "g4-runner"
