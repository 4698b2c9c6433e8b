"""g4: takes Google's Gemma 4 models from a checkpoint to where they run.

`g4tool.load(path_or_id)` gives the canonical model, whatever the artifact.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    import torch

    from g4tool.backends.executorch.runtime import ExportedModel
    from g4tool.model.text import TextModel


def load(
    model: str, *, dtype: "torch.dtype | None" = None, device: str = "cpu", revision: str = "main"
) -> "TextModel | ExportedModel":
    """The canonical model of a Hub id, a folder (checkpoint, view or bundle) or a tiny model.

    Of the folder of an exported program it is the program, called in the same way.

    `dtype` is that of activations and of every weight that is not quantized (default bfloat16).
    Calling the result on `input_ids` [B, S] int64 gives logits [B, S, vocab]. Raises G4Error with
    what is wrong and where when the files do not make a whole Gemma 4 text model.
    """
    from g4tool.stages.loading import load as _load

    return _load(model, dtype=dtype, device=device, revision=revision)
