"""From whatever names a model to the canonical model."""

from pathlib import Path
from typing import TYPE_CHECKING

from g4tool.errors import UsageError
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.store import Store
from g4tool.progress import Report, silent
from g4tool.stages.checkpoints import checkpoint_folder, checkpoint_stage

if TYPE_CHECKING:
    import torch

    from g4tool.backends.executorch.runtime import ExportedModel
    from g4tool.model.text import TextModel


def load(
    model: str, *, dtype: "torch.dtype | None", device: str, revision: str
) -> "TextModel | ExportedModel":
    """See `g4tool.load`."""
    given = checkpoint_stage(model, revision)
    if isinstance(given, Source):
        folder = given.path
    else:
        folder = checkpoint_folder(Store().ensure(given))
    return load_folder(folder, dtype, device)[0]


def load_folder(
    folder: Path, dtype: "torch.dtype | None", device: str, report: Report = silent
) -> tuple["TextModel | ExportedModel", Path]:
    """The model in `folder`, and the folder where its tokenizer lies (a view's is its source's).

    An exported program computes in its own dtype, on its own device.
    """
    import torch

    from g4tool.backends.executorch.folder import is_export
    from g4tool.checkpoint.load import load_text_model
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.formats.load import is_bundle, load_bundle

    if is_export(folder):
        from g4tool.backends.executorch.runtime import open_export

        return open_export(folder), folder
    dtype = dtype or torch.bfloat16
    if is_bundle(folder):
        return load_bundle(folder, dtype, device, report), folder
    checkpoint = open_checkpoint(folder)
    return load_text_model(checkpoint, dtype, device, report), checkpoint.folder


def load_to_run(
    folder: Path, dtype: "torch.dtype", device: str, report: Report = silent
) -> tuple["TextModel | ExportedModel", Path]:
    """As `load_folder`, for a model that only generates.

    On a CPU int4 takes torch's own layout; a CUDA device with Triton runs g4's kernels.
    """
    from g4tool.kernels import cpu_int4
    from g4tool.kernels.register import runs_triton
    from g4tool.model.text import TextModel

    model, files = load_folder(folder, dtype, device, report)
    if isinstance(model, TextModel):
        cpu_int4.prepare(model, dtype)
        if runs_triton(model.device):
            from g4tool.generate import cuda_graph

            cuda_graph.prepare(model)
    return model, files


def parse_dtype(name: str) -> "torch.dtype":
    """A floating-point dtype by its short or torch name. Raises UsageError for any other."""
    import torch

    known = {
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp16": torch.float16,
        "float16": torch.float16,
        "fp32": torch.float32,
        "float32": torch.float32,
    }
    if name not in known:
        raise UsageError(f"dtype {name!r} is none of {', '.join(known)}.")
    return known[name]
