"""What a compressed-tensors bundle holds, derived from the plan of the bundle beside it.

Its loaders know integer zero points only, and compressed-tensors 0.18 to 0.20 loads none but the
symmetric ones: so every 4-bit weight is solved with the zero at code 8. What was trained on a
symmetric grid keeps it.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.names import hf_name, published_prefix
from g4tool.checkpoint.writer import Spec
from g4tool.errors import UsageError
from g4tool.formats import compressed_tensors as layout
from g4tool.formats.torchao import Kind, Stored
from g4tool.quantize.driver import Unit
from g4tool.quantize.grid import is_grid
from g4tool.quantize.policy import EMBEDDING, HEAD, TABLE, TensorPlan
from g4tool.quantize.tally import specs_size

_GROUPS = (128, 64, 32)
# Layers that vLLM joins into one, so that all members are alike or none is quantized.
_JOINED = (
    re.compile(r"(layers\.\d+\.self_attn)\.[qkv]_proj\.weight"),
    re.compile(r"(layers\.\d+\.mlp)\.(?:gate|up)_proj\.weight"),
    re.compile(r"(layers\.\d+\.experts)\.(?:gate_up|down)_proj\.weight"),
)


def compressed_plan(checkpoint: Checkpoint, plans: Iterable[TensorPlan]) -> list[TensorPlan]:
    """The plan of the compressed-tensors bundle that stands beside a bundle with `plans`.

    Embeddings and head stay as they are in the checkpoint: loaders quantize linear layers alone,
    and the head shares its weight with the embedding. Weights that vLLM joins get the finest scheme
    of any of them.
    """
    prefix = published_prefix(checkpoint.raw_config)
    result = []
    for item in plans:
        if item.source != item.name:
            continue  # A head made from the embedding; here it is tied to it.
        known = item.name in checkpoint.names
        result.append(
            replace(_symmetric(item), hf_name=hf_name(item.name, prefix) if known else item.hf_name)
        )
    return _joined_alike(result)


def check_plan(plans: Iterable[TensorPlan]) -> None:
    """Raise UsageError for a bundle with nothing quantized, which its loaders do not take."""
    if all(item.scheme == "keep" for item in plans):
        raise UsageError(
            "the format compressed-tensors would hold no quantized matrix (embeddings and head "
            "stay in 16 bit there): leave it out of quantize.formats, or give another scheme."
        )


def compressed_units(units: Iterable[Unit], plans: Iterable[TensorPlan]) -> list[Unit]:
    """The same files as `units`, with the tensors of `plans` in them."""
    by_name = {item.name: item for item in plans}
    return [
        replace(u, tensors=tuple(by_name[t.name] for t in u.tensors if t.name in by_name))
        for u in units
    ]


def _symmetric(item: TensorPlan) -> TensorPlan:
    if item.scheme == "keep":
        return item
    if item.name in (EMBEDDING, TABLE, HEAD):
        return _kept(item, "embeddings and head stay in 16 bit in this format")
    if item.scheme == "int8":
        return _int8(item)
    solver = "grid-symmetric" if is_grid(item.solver) else "symmetric"
    return replace(item, scheme="int4-sym", solver=solver)


def _int8(item: TensorPlan) -> TensorPlan:
    """One scale a row or groups that vLLM has; of experts it wants groups."""
    columns = item.shape[-1]
    if _whole_row(item):
        # A word holds four codes.
        return _kept(item, "its columns do not fill whole words") if columns % 4 else item
    if item.group_size in _GROUPS:
        return item
    group = next((group for group in _GROUPS if columns % group == 0), None)
    if group is None:
        return _kept(item, "no group that vLLM has divides its columns")
    return replace(item, group_size=group, reason=f"{item.reason}; in groups that vLLM has")


def _whole_row(item: TensorPlan) -> bool:
    return len(item.shape) == 2 and item.group_size == item.shape[-1]


def _kept(item: TensorPlan, why: str) -> TensorPlan:
    reason = f"{item.reason}; {why}"
    return replace(item, scheme="keep", group_size=None, solver=None, reason=reason)


def _joined_alike(plans: list[TensorPlan]) -> list[TensorPlan]:
    teams: dict[str, list[TensorPlan]] = {}
    for item in plans:
        found = next((m for pattern in _JOINED if (m := pattern.fullmatch(item.name))), None)
        if found:
            teams.setdefault(f"{found.re.pattern} {found[1]}", []).append(item)
    finest = {
        item.name: min(team, key=_coarseness)
        for team in teams.values()
        if len({_kind_and_group(item) for item in team}) > 1
        for item in team
    }
    return [_like(item, finest[item.name]) if item.name in finest else item for item in plans]


def _kind_and_group(item: TensorPlan) -> tuple[str, int | None]:
    row = item.scheme == "int8" and _whole_row(item)
    return item.scheme, None if row else item.group_size


def _coarseness(item: TensorPlan) -> tuple[int, int]:
    return ("keep", "int8", "int4-sym").index(item.scheme), item.group_size or 0


def _like(item: TensorPlan, model: TensorPlan) -> TensorPlan:
    if _kind_and_group(item) == _kind_and_group(model):
        return item
    why = f"as {model.name}, which vLLM joins with it"
    if model.scheme == "keep":
        return _kept(item, why)
    _, group = _kind_and_group(model)
    if item.shape[-1] % (group or 1):
        return _kept(item, why)
    return replace(
        item,
        scheme=model.scheme,
        group_size=group or item.shape[-1],
        solver=model.solver,
        reason=f"{item.reason}; {why}",
    )


def stored(item: TensorPlan) -> Stored:
    """The form that a tensor has in the file."""
    kinds: dict[str, Kind] = {"keep": "plain", "int8": "int8"}
    kind = kinds.get(item.scheme, "int4")
    dtype = item.dtype if kind == "plain" else torch.bfloat16
    return Stored(item.hf_name, kind, item.shape, dtype, item.group_size)


def unit_specs(unit: Unit) -> dict[str, Spec]:
    """Tensors of the unit's file, name -> (dtype, shape).

    The widest first, as safetensors itself orders them, so that all are aligned.
    """
    specs: dict[str, Spec] = {}
    for item in unit.tensors:
        specs.update(layout.weight_specs(stored(item)))
    return dict(sorted(specs.items(), key=lambda entry: -entry[1][0].itemsize))


def compressed_config(checkpoint: Checkpoint, plans: Iterable[TensorPlan]) -> dict[str, Any]:
    """config.json: the source's, with the `quantization_config` that these plans make."""
    plans = list(plans)
    ignore = [] if any(item.name == HEAD for item in plans) else [HEAD.removesuffix(".weight")]
    for item in plans:
        if item.scheme != "keep" or len(item.shape) < 2 or item.name in (EMBEDDING, TABLE):
            continue
        ignore.append(layout.target(item.hf_name))
    section = layout.quantization_config(
        [stored(item) for item in plans], list(dict.fromkeys(ignore))
    )
    return {**checkpoint.raw_config, "quantization_config": section}


def compressed_index(units: Iterable[Unit]) -> dict[str, Any]:
    """model.safetensors.index.json: every tensor by the name it has, and the total size."""
    weight_map: dict[str, str] = {}
    total = 0
    for unit in units:
        specs = unit_specs(unit)
        weight_map.update(dict.fromkeys(specs, unit.file))
        total += specs_size(specs.values())
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
