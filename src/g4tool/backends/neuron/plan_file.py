"""plan.json: everything that is decided before the compiler is asked."""

from collections.abc import Sequence
from typing import Any

from g4tool.backends.neuron.findings import Finding, as_json
from g4tool.backends.neuron.memory import RankMemory, cache_bytes
from g4tool.backends.neuron.nxdi_layout import cache_shapes, neuron_name
from g4tool.backends.neuron.settings import NeuronOptions, buckets, compiler_flags
from g4tool.backends.neuron.targets import smallest_instance
from g4tool.parallel.plan import Layout, Plan

PARTS = ("context_encoding_model", "token_generation_model")
"""NxD Inference's names for the programs of prompts and of one token."""


def plan_content(
    plan: Plan,
    options: NeuronOptions,
    findings: Sequence[Finding],
    memory: RankMemory,
    programs: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """plan.json's content: JSON values only. Sizes in bytes, lengths in tokens.

    `memory` is that of the rank that needs the most.
    """
    shapes = cache_shapes(plan.config, plan.degree, options.batch, options.seq_len)
    lengths = buckets(options.seq_len)
    each_cache = cache_bytes(shapes, options.dtype)
    return {
        "format": "g4-neuron-plan",
        "format_version": 1,
        "target": options.chip.name,
        "logical_nc_config": options.lnc,
        "instance": smallest_instance(options.chip, options.tp, options.lnc),
        "tp_degree": plan.degree,
        "batch_size": options.batch,
        "seq_len": options.seq_len,
        "dtype": options.dtype,
        "programs": [
            {
                "model": part,
                "bucket": length,
                "new_tokens": length if part == PARTS[0] else 1,
                "compiler_flags": compiler_flags(options, part),
            }
            for part in programs
            for length in lengths
        ],
        "memory": {
            "weights_per_rank": memory.weights,
            "caches_per_rank": memory.caches,
            "core": options.chip.core_memory(options.lnc),
        },
        "caches": {
            str(layer): {"shape": list(shape), "bytes": each_cache[layer]}
            for layer, shape in shapes.items()
        },
        "weights": {
            name: {
                **_stored(name, plan.layouts.get(name, Layout())),
                "split": split.kind,
                "axis": split.axis,
                "shape": list(split.shape),
                "rank_shape": list(split.rank_shape(0)),
                "runs": [[list(run) for run in runs] for runs in split.runs],
                "after": split.after,
                **({"note": split.note} if split.note else {}),
            }
            for name, split in plan.splits.items()
        },
        "findings": as_json(findings),
    }


def _stored(name: str, layout: Layout) -> dict[str, Any]:
    """The port's parameter, or how a weight that the port cannot take is stored."""
    if layout.kind == "plain":
        return {"parameter": neuron_name(name)}
    return {"stored": layout.kind, "group_size": layout.group}
