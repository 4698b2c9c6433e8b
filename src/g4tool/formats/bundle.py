"""What quantized weights a folder holds: a bundle of g4, or a checkpoint by another maker.

A bundle is a checkpoint's folder whose weights are quantized, and g4.json that says how. The
header of a quantized file does not tell which of two meanings its int4 codes have (see
g4tool.formats.read_torchao); g4.json does, or failing that config.json, or the names ExecuTorch
gives.

Bundles of models of one size have shards of the same names, tensors and shapes. So that one that
strayed into another's folder is noticed, g4.json and the header of every shard carry the same
fingerprint of what the bundle was made from.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from g4tool.checkpoint.folder import (
    CONFIG,
    has_pickles,
    quantization_section,
    read_json,
    weight_files,
)
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error

BUNDLE = "g4.json"
# The key of the fingerprint, in g4.json and in the header's metadata of a shard.
FINGERPRINT = "g4_bundle"

# What every bundle's g4.json holds, beside whatever its maker adds.
CONVENTION: dict[str, Any] = {
    "format": "g4-bundle",
    "format_version": 1,
    "int4": {
        "codes": "unsigned, 0 to 15, the even column in the low nibble",
        "zero": "in units of the code",
        "value": "(code - zero) * scale",
    },
    "int8": {"codes": "signed", "value": "code * scale"},
}

Layout = Literal["g4", "executorch", "torchao", "compressed-tensors"]
"""How quantized weights lie: in torchao's tensors as g4's g4.json says, as ExecuTorch's example
writes them, as torchao's own kernels read them; or compressed-tensors, by whomever."""


def layout_of(folder: Path | str) -> Layout | None:
    """How the folder's quantized weights lie; None where they are plain, or g4 knows no such form.

    Raises G4Error for a config.json that is not JSON, and a file whose header is broken.
    """
    folder = Path(folder)
    files = weight_files(folder)
    # An exported program keeps its model's config.json too. Pickles are refused when opened.
    if not files and not (folder.is_dir() and has_pickles(folder)):
        return None
    raw = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    method = quantization_section(raw).get("quant_method")
    if method == "compressed-tensors":
        return "compressed-tensors"
    if (folder / BUNDLE).is_file():
        return "g4"
    if method == "torchao":
        return "torchao"
    if method is not None:
        return None
    for path in files:
        with SafetensorsFile(path) as file:
            if any(name.endswith("_packed") for name in file.tensors):
                return "compressed-tensors"
            if "tensor_names" in file.metadata:
                # Only ExecuTorch's example drops the prefix; any other file is of unknown meaning.
                bare = any(name.startswith("embed_tokens.") for name in file.tensors)
                return "executorch" if bare else "g4"
    return None


def is_bundle(folder: Path | str) -> bool:
    """Whether the folder holds quantized weights in a form that g4 reads."""
    return layout_of(folder) is not None


def fingerprint(source: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """SHA-256 in hex of a bundle's source and recipe, JSON values both, as g4.json has them."""
    facts = {"source": dict(source), "recipe": dict(recipe)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_shards(files: Mapping[str, SafetensorsFile], facts: Mapping[str, Any]) -> None:
    """Raise G4Error for a file of a bundle that lacks the fingerprint in `facts`, its g4.json.

    Where g4.json has none, no file may have one; where `facts` are empty, since there is no
    g4.json, all files must have the same.
    """
    first = next(iter(files.values()))
    expected = facts.get(FINGERPRINT) if facts else first.metadata.get(FINGERPRINT)
    for file in files.values():
        if file.metadata.get(FINGERPRINT) != expected:
            other = f"the {BUNDLE}" if facts else first.path.name
            raise G4Error(
                f"{file.path} belongs to another bundle than {other} beside it; "
                f"quantize the checkpoint again."
            )


def read_bundle(folder: Path) -> dict[str, Any]:
    """g4.json of a bundle. Raises G4Error when it is missing or states another convention."""
    path = folder / BUNDLE
    if not path.is_file():
        raise G4Error(
            f"{folder} has quantized weights but no {BUNDLE}, so what its int4 codes mean is not "
            f"known (torchao's own are signed); quantize the original checkpoint with g4."
        )
    facts = read_json(path)
    for key, value in CONVENTION.items():
        if facts.get(key) != value:
            raise G4Error(
                f"{path}: {key} is {facts.get(key)!r}, but this version of g4 reads only "
                f"{value!r}; quantize the checkpoint again."
            )
    return facts


def lineage_of(folder: Path) -> dict[str, Any]:
    """g4.json of a bundle; empty where another maker's weights have none."""
    return read_bundle(folder) if (folder / BUNDLE).is_file() else {}
