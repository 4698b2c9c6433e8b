"""Small checkpoints in the published layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.names import hf_name
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import write_tiny
from g4tool.checkpoint.writer import write_checkpoint
from g4tool.files import write_json
from g4tool.model.config import LayerConfig, MoeConfig, TextConfig

Random = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model -> its folder, written once."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            write_tiny(name, folders[name])
        return folders[name]

    return make


@pytest.fixture
def moe_704(tmp_path: Path) -> Checkpoint:
    """Two layers with the 26B-A4B's odd input sizes: experts of 704, a dense branch of 2112."""
    layers = tuple(LayerConfig(kind, 32, 1, 2112) for kind in ("sliding", "full"))
    return write_random(
        tmp_path,
        TextConfig(64, 128, 4, layers, 8, 64, moe=MoeConfig(2, 1, 704)),
    )


def write_random(folder: Path, config: TextConfig) -> Checkpoint:
    """A checkpoint of seeded normal weights."""
    shapes = {hf_name(name, "model."): shape for name, shape in text_tensors(config).items()}
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(s, generator=generator).mul(0.05) for n, s in shapes.items()}
    write_json(folder / "config.json", to_hf_config(config))
    specs = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    write_checkpoint(folder, specs, lambda name, start, stop: values[name][start:stop])
    return open_checkpoint(folder)
