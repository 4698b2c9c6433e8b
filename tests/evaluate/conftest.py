"""The tiny models, loaded once in fp32, with short windows of the shipped text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import write_tiny
from g4tool.evaluate.corpus import Window, cut, shipped_texts, spread, window_length
from g4tool.evaluate.scores import Reference, observe
from g4tool.generate.tokenizer import Tokenizer
from g4tool.model.text import TextModel


@dataclass(frozen=True)
class Tiny:
    """A tiny model and all that comes with it; `reference` is over its windows."""

    folder: Path
    checkpoint: Checkpoint
    model: TextModel
    tokenizer: Tokenizer
    windows: list[Window]
    reference: Reference


GetTiny = Callable[[str], Tiny]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for two threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> GetTiny:
    """Name of a tiny model -> the model, made once."""
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            write_tiny(name, folder)
            checkpoint = open_checkpoint(folder)
            model = load_text_model(checkpoint, torch.float32)
            tokenizer = Tokenizer(folder)
            length = window_length(model.config)
            windows = [w for w in cut(shipped_texts(), tokenizer, length) if w.scored == length]
            windows = spread(windows, 4)
            reference = observe(model, windows)
            made[name] = Tiny(folder, checkpoint, model, tokenizer, windows, reference)
        return made[name]

    return make
