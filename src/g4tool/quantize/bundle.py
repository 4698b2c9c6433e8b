"""The JSON files of a bundle: config.json, the index over the shards, and g4.json, its lineage.

All are functions of the source, the recipe and the versions: no times, paths or machine.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from g4tool.checkpoint.folder import CONFIG, side_files
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.formats.bundle import BUNDLE, CONVENTION, FINGERPRINT
from g4tool.quantize.account import TensorAccount, rounded_bits, to_json
from g4tool.quantize.driver import Unit, unit_layout
from g4tool.quantize.options import QuantizeOptions
from g4tool.quantize.policy import HEAD, TensorPlan
from g4tool.quantize.tally import specs_size


def bundle_config(
    checkpoint: Checkpoint, options: QuantizeOptions, plans: Iterable[TensorPlan]
) -> dict[str, Any]:
    """The source's config.json with `quantization_config`, untied where the bundle has a head.

    `quantization_config` has no `quant_method` on purpose. transformers skips a method it does not
    know with a line in its log and fills the model with random weights; without one it raises.
    """
    plans = list(plans)
    config = dict(checkpoint.raw_config)
    text = config.get("text_config")
    if any(item.name == HEAD for item in plans):
        config["tie_word_embeddings"] = False
        if isinstance(text, dict):
            config["text_config"] = {**text, "tie_word_embeddings": False}
    config["quantization_config"] = {
        "format": "g4",
        "read_with": f"g4tool, see {BUNDLE}",
        "scheme": options.scheme,
        "bits": {"int8": 8, "keep": 16}.get(options.scheme, 4),
        "group_size": options.group_size,
        "int4": CONVENTION["int4"],
        "int8": CONVENTION["int8"],
        "ignore": [item.hf_name for item in plans if item.scheme == "keep"],
    }
    return config


def bundle_index(units: Iterable[Unit]) -> dict[str, Any]:
    """model.safetensors.index.json: every tensor that lies in a file, by the name it has there."""
    weight_map: dict[str, str] = {}
    total = 0
    for unit in units:
        specs, _ = unit_layout(unit)
        weight_map.update(dict.fromkeys(specs, unit.file))
        total += specs_size(specs.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def bundle_side_files(checkpoint: Checkpoint) -> list[str]:
    """Files to copy from the source's folder: all but its weights and its config.json."""
    return [name for name in side_files(checkpoint.folder) if name not in (CONFIG, BUNDLE)]


def lineage(
    checkpoint: Checkpoint,
    accounts: Iterable[TensorAccount],
    *,
    source: Mapping[str, Any],
    recipe: Mapping[str, Any],
    versions: Mapping[str, str],
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """g4.json: what the codes mean, what the bundle was made from and how, and every tensor.

    `source` (model, revision, hashes of its files), `recipe` and `versions` are the caller's;
    `fingerprint` is the one its shards were written with.
    """
    accounts = list(accounts)
    return {
        **CONVENTION,
        **({} if fingerprint is None else {FINGERPRINT: fingerprint}),
        "source": dict(source),
        "recipe": dict(recipe),
        "versions": dict(sorted(versions.items())),
        "bits_per_weight": rounded_bits(accounts),
        "dropped": dict(checkpoint.dropped),
        "tensors": to_json(accounts),
    }
