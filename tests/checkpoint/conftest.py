"""Checkpoints to test with: the tiny ones, and helpers that damage or rewrite a folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.tiny import TINY, write_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three tiny models by name. Read only."""
    base = tmp_path_factory.mktemp("tiny")
    for name in TINY:
        write_tiny(name, base / name)
    return {name: base / name for name in TINY}


@pytest.fixture(scope="session")
def tiny_tensors(tiny_folders: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    """All tensors of each tiny model by key, as the safetensors package reads them."""
    return {name: load_all(folder) for name, folder in tiny_folders.items()}


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


@pytest.fixture
def make_folder(
    tmp_path: Path,
    tiny_folders: dict[str, Path],
    tiny_tensors: dict[str, dict[str, torch.Tensor]],
) -> Callable[..., Path]:
    """Writes a single-file folder of a tiny model, `change` applied to its tensors and config."""

    def make(
        name: str,
        change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None] | None = None,
    ) -> Path:
        tensors = dict(tiny_tensors[name])
        config = json.loads((tiny_folders[name] / "config.json").read_text())
        if change:
            change(tensors, config)
        folder = tmp_path / f"{name}-changed"
        write_folder(folder, tensors, config)
        return folder

    return make


def write_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """One model.safetensors and a config.json, written by the safetensors package."""
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
