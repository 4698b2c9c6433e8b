"""The one file that the Gemma 4 example in ExecuTorch's wheel reads with `--prequantized`.

Its names are the canonical ones, without prefix; the head is a tensor of its own, and everything
lies in one `model.safetensors`. The values are those of the torchao bundle, byte for byte.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from g4tool.checkpoint.config import parse_text_config, to_hf_config
from g4tool.checkpoint.names import published_prefix
from g4tool.checkpoint.tensorfile import SafetensorsFile, row_blocks
from g4tool.checkpoint.writer import SINGLE, Spec, TensorFileWriter
from g4tool.errors import UsageError
from g4tool.formats.bundle import FINGERPRINT
from g4tool.formats.torchao import Stored, part_names, shard_layout
from g4tool.model.config import TextConfig
from g4tool.progress import Progress, Report, silent

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_model(config: TextConfig) -> None:
    """Raise UsageError for a model that the example does not have."""
    if config.moe or config.per_layer_dim:
        kind = "mixture-of-experts models" if config.moe else "models with per-layer embeddings"
        raise UsageError(
            f"the format executorch is for ExecuTorch's example of dense Gemma 4, which does not "
            f"run {kind}: leave it out of quantize.formats."
        )


def file_layout(weights: Sequence[tuple[str, Stored]]) -> tuple[dict[str, Spec], dict[str, str]]:
    """Tensors and header metadata of the file for weights (canonical name, form), towers left out.

    A tied head becomes a copy of the embedding, whatever its form.
    """
    return shard_layout(stored for _, _, stored in _renamed(weights))


def write_file(
    path: Path,
    weights: Sequence[tuple[str, Stored]],
    shards: Iterable[Path],
    fingerprint: str | None = None,
    report: Report = silent,
) -> int:
    """Copy the weights out of the shards of a torchao bundle into the file `path`, block by block.

    `weights` are canonical names with the forms they have in the bundle. Returns how many int4
    groups have a zero point below 0: the example's packing for CUDA takes those for 0.
    """
    specs, metadata = file_layout(weights)
    if fingerprint is not None:
        metadata = {**metadata, FINGERPRINT: fingerprint}
    files = [SafetensorsFile(shard) for shard in shards]
    below = 0
    try:
        place = {name: file for file in files for name in file.tensors}
        renamed = _renamed(weights)
        with TensorFileWriter(path, specs, metadata) as writer:
            for done, (_, old, new) in enumerate(renamed, start=1):
                targets = part_names(new.name, new.kind)
                for part, source in part_names(old.name, old.kind).items():
                    for values in _copied(place[source], source, writer, targets[part]):
                        if part == "zero" and new.kind == "int4":
                            below += int((values < 0).sum())
                report(Progress("write", done, len(renamed), "tensors", new.name))
    finally:
        for file in files:
            file.close()
    return below


def file_index(weights: Sequence[tuple[str, Stored]]) -> dict[str, Any]:
    """What an index over the file would say."""
    specs, _ = file_layout(weights)
    total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())
    return {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(specs, SINGLE)}


def file_config(bundle_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json beside the file: the text model alone, in the spelling that the example reads.

    It reads the later spelling of head sizes as if they were not there. `bundle_config` is that of
    the torchao bundle.
    """
    text = bundle_config.get("text_config") or bundle_config
    section = bundle_config["quantization_config"]
    prefix = published_prefix(bundle_config)
    ids = {key: text[key] for key in _IDS if key in text}
    kept = [name.removeprefix(prefix) for name in section["ignore"] if name.startswith(prefix)]
    return {
        **to_hf_config(parse_text_config(bundle_config)),
        **ids,
        "tie_word_embeddings": False,
        "quantization_config": {**section, "ignore": kept},
    }


def _renamed(weights: Sequence[tuple[str, Stored]]) -> list[tuple[str, Stored, Stored]]:
    """Canonical name, form in the bundle, form in the file."""
    result = [(name, form, _under(name, form)) for name, form in weights]
    if all(name != _HEAD for name, _ in weights):
        embedding = next(form for name, form in weights if name == _EMBEDDING)
        result.append((_HEAD, embedding, _under(_HEAD, embedding)))
    return result


def _under(name: str, form: Stored) -> Stored:
    return Stored(name, form.kind, form.shape, form.dtype, form.group)


def _copied(
    file: SafetensorsFile, source: str, writer: TensorFileWriter, target: str
) -> Iterator[Tensor]:
    """Copies a tensor and gives each block on the way."""
    info = file.info(source)
    for start, stop in row_blocks(info.rows, info.row_nbytes):
        values = file.read(source, start, stop)
        writer.write(target, values, start)
        yield values
