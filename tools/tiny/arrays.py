"""The packed corpus as a file. Read where the models are trained, so it needs numpy only."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint16]


def save(arrays: dict[str, Ids], path: Path) -> None:
    """Writes the arrays as one compressed .npz file."""
    named: dict[str, Any] = {name.replace("/", "."): ids for name, ids in arrays.items()}
    with path.open("wb") as file:
        np.savez_compressed(file, **named)


def load(path: Path) -> dict[str, Ids]:
    """What `save` wrote."""
    with np.load(path) as file:
        return {name.replace(".", "/"): file[name] for name in file.files}
