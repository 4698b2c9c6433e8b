"""Loads one rank's part of a model: only its rows and columns are kept, whatever the artifact."""

import math
from functools import partial
from pathlib import Path

import torch

from g4tool.checkpoint.inventory import text_tensors
from g4tool.formats.load import fill
from g4tool.formats.weights import Weights, open_weights
from g4tool.kernels import cpu_int4
from g4tool.model.text import TextModel
from g4tool.parallel.cut import read_rank_part
from g4tool.parallel.group import Group
from g4tool.parallel.plan import Layout, Plan, make_plan
from g4tool.parallel.runtime import build_rank, join_ranks
from g4tool.progress import Progress, Report, silent


def plan_of(weights: Weights, degree: int) -> Plan:
    """The plan for these weights as they are stored. Raises UsageError for an impossible degree."""
    return make_plan(weights.config, degree, layouts_of(weights))


def layouts_of(weights: Weights) -> dict[str, Layout]:
    """How each weight is stored, as the plan asks it."""
    found = {name: weights.stored(name) for name in text_tensors(weights.config)}
    return {name: Layout(stored.kind, stored.group) for name, stored in found.items()}


def load_rank(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    group: Group,
    report: Report = silent,
) -> tuple[TextModel, Path]:
    """This rank's part of the model in `folder`, joined to the others', and the tokenizer's folder.

    It is to generate with: on a CPU int4 takes torch's own layout. Memory is the rank's part and
    one block of rows. Errors are those of loading the whole model.
    """
    weights = open_weights(folder)
    try:
        plan = plan_of(weights, group.size)
        model = build_rank(plan, group.rank)
        for done, (name, split) in enumerate(plan.splits.items(), start=1):
            parts = {
                part: read_rank_part(
                    split,
                    plan.layouts[name],
                    part,
                    shape,
                    math.prod(shape) * kind.itemsize,
                    group.rank,
                    partial(weights.read, name, part),
                ).to(device)
                for part, (kind, shape) in weights.specs(name).items()
            }
            fill(model, name, weights.stored(name), parts, dtype, folder)
            report(Progress("load", done, len(plan.splits), "tensors", name))
    finally:
        weights.close()
    # Before the ranks are joined, since that hooks into the modules that there are.
    cpu_int4.prepare(model, dtype)
    return join_ranks(model.eval(), plan, group), weights.folder
