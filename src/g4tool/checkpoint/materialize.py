"""Writes a checkpoint anew in the published layout: experts fused, dead tensors left out."""

from pathlib import Path
from typing import Any

import torch

from g4tool.checkpoint.folder import CONFIG, side_files
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.names import hf_name, published_prefix
from g4tool.checkpoint.writer import SHARD_BYTES, ReadRows, Spec, write_checkpoint
from g4tool.files import write_bytes, write_json
from g4tool.progress import Report, silent


def materialize(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Report = silent,
) -> list[Path]:
    """Write `checkpoint` into `folder`, with its small files; return all files written.

    With `dtype` every floating-point tensor, the towers' included, is converted to it; otherwise
    each keeps its own. Streams in row blocks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for relative in side_files(checkpoint.folder):
        path = folder / relative
        path.parent.mkdir(exist_ok=True)
        if relative == CONFIG:
            write_json(path, published_config(checkpoint.raw_config, dtype))
        else:
            write_bytes(path, (checkpoint.folder / relative).read_bytes())
        written.append(path)
    specs, read = published_layout(checkpoint, dtype)
    return written + write_checkpoint(folder, specs, read, shard_bytes=shard_bytes, report=report)


def published_layout(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None
) -> tuple[dict[str, Spec], ReadRows]:
    """Keys, dtypes and shapes as published, and what reads rows of a key."""
    prefix = published_prefix(checkpoint.raw_config)
    source = {hf_name(name, prefix): name for name in checkpoint.names}
    source.update((key, key) for key in checkpoint.extras)
    specs: dict[str, Spec] = {}
    for key, name in source.items():
        info = checkpoint.info(name)
        to = info.dtype if dtype is None or not info.dtype.is_floating_point else dtype
        specs[key] = (to, info.shape)
    return specs, lambda key, start, stop: checkpoint.read(source[key], start, stop)


def published_config(raw_config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The content of config.json beside weights converted to `dtype`."""
    if dtype is None:
        return raw_config
    name = str(dtype).removeprefix("torch.")
    # `torch_dtype` is the older name of the key; a wrapper has it in each part.
    return {
        key: name
        if key in ("dtype", "torch_dtype")
        else (published_config(value, dtype) if isinstance(value, dict) else value)
        for key, value in raw_config.items()
    }
