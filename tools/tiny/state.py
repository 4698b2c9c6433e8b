"""What one piece of training leaves for the next, as safetensors files."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from g4tool.errors import G4Error
from g4tool.files import write_bytes

Tensors = dict[str, Tensor]


@dataclass
class State:
    """A model in training: weights by parameter name, now and when the dev loss was lowest.

    `history` has one record a measurement; `best` is that lowest loss, at `best_step`. The
    optimizer's moments are not kept: they last twenty steps.
    """

    step: int = 0
    seconds: float = 0.0
    best: float = float("inf")
    best_step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    best_weights: Tensors = field(default_factory=dict)


def state_file(folder: Path, name: str) -> Path:
    """Where the state of model `name` is kept."""
    return folder / f"{name}.state.safetensors"


def best_file(folder: Path, name: str) -> Path:
    """Where the best weights of model `name` are kept: bfloat16, canonical names."""
    return folder / f"{name}.best.safetensors"


def write_state(folder: Path, name: str, state: State) -> None:
    """Writes both files, each whole or not at all; values are rounded to bfloat16.

    That keeps the files of three models small enough to carry; a rounding of the weights once a
    piece is far below the noise of training.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "step": state.step,
        "seconds": state.seconds,
        "best": state.best,
        "best_step": state.best_step,
        "history": state.history,
    }
    metadata = {"format": "pt", "facts": json.dumps(facts)}
    write_bytes(state_file(folder, name), save(_stored(state.weights), metadata))
    write_bytes(best_file(folder, name), save(_stored(state.best_weights), {"format": "pt"}))


def read_state(folder: Path, name: str) -> State:
    """What `write_state` wrote. Raises G4Error when the state's file is missing.

    The best weights may have been left behind: then the search for them starts anew.
    """
    facts, weights = _read(state_file(folder, name))
    state = State(**json.loads(facts["facts"]), weights=weights)
    if best_file(folder, name).is_file():
        _, state.best_weights = _read(best_file(folder, name))
    else:
        state.best = float("inf")
    return state


def _stored(tensors: Tensors) -> Tensors:
    return {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in tensors.items()}


def _read(path: Path) -> tuple[dict[str, str], Tensors]:
    if not path.is_file():
        raise G4Error(f"{path} is not there: give the folder that an earlier piece wrote.")
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
