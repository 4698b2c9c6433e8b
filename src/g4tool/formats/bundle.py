"""A bundle: a checkpoint's folder whose weights are quantized, and g4.json that says how.

The header of a quantized file does not tell which of two meanings its int4 codes have (see
g4tool.kernels.int4), so a folder without g4.json is somebody else's and not read.

Bundles of models of one size have shards of the same names, tensors and shapes. So that one that
strayed into another's folder is noticed, g4.json and the header of every shard carry the same
fingerprint of what the bundle was made from.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4tool.checkpoint.folder import read_json, weight_files
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


def is_bundle(folder: Path | str) -> bool:
    """Whether the folder holds quantized weights: a bundle, or torchao's files by another maker.

    Raises G4Error where there is no g4.json and a safetensors file is broken.
    """
    folder = Path(folder)
    return (folder / BUNDLE).is_file() or any(_is_quantized(path) for path in weight_files(folder))


def fingerprint(source: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """SHA-256 in hex of a bundle's source and recipe, JSON values both, as g4.json has them."""
    facts = {"source": dict(source), "recipe": dict(recipe)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_shards(files: Mapping[str, SafetensorsFile], facts: Mapping[str, Any]) -> None:
    """Raise G4Error for a file of a bundle that lacks the fingerprint in `facts`, its g4.json.

    Where g4.json has none, no file may have one.
    """
    expected = facts.get(FINGERPRINT)
    for file in files.values():
        if file.metadata.get(FINGERPRINT) != expected:
            raise G4Error(
                f"{file.path} belongs to another bundle than the {BUNDLE} beside it; "
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


def _is_quantized(path: Path) -> bool:
    with SafetensorsFile(path) as file:
        return "tensor_names" in file.metadata
