"""Fixtures of this room."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from g4tool.generate.tokenizer import Tokenizer
from tests.generate.tiny import write_tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matmuls: a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    """The folder's tokenizer."""
    return Tokenizer(folder)
