"""Which tensor gets which scheme, and why.

Every tensor of a checkpoint gets one plan. Three kinds are protected whatever the rules say:
vectors and scalars, the router (an error in it picks other experts), and the towers; embeddings
may be kept or 8 bit, never 4 bit. The rules decide on the rest, then the options' scheme.

A matrix whose columns the group does not divide gets the largest smaller group that does, or 8 bit
by row where none does. A tied head is the embedding; asked for with a scheme of its own it becomes
a tensor more, made from the embedding, and the bundle's config.json is untied.
"""

import re
from dataclasses import dataclass
from functools import cache

import torch

from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.errors import UsageError
from g4tool.model.variants import VARIANTS
from g4tool.quantize import grid
from g4tool.quantize.options import QuantizeOptions, Rule, Scheme, check_options

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
TABLE = "embed_tokens_per_layer.weight"

_FALLBACK_GROUPS = (128, 64, 32, 16)
_TOWERS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one tensor.

    `shape` and `dtype` are those of `source`, the tensor it is made from (the embedding for an
    untied head). `group_size` in columns and `solver` are None where the tensor is kept.
    """

    name: str
    hf_name: str
    scheme: Scheme
    group_size: int | None
    solver: str | None
    reason: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str


def plan(checkpoint: Checkpoint, options: QuantizeOptions, qat: bool = False) -> list[TensorPlan]:
    """A plan for every tensor, text model first, then an untied head, then the towers.

    `qat`: the checkpoint was trained for Q4_0, whose grid the weights then keep. Raises
    UsageError for options or a rule that cannot be meant.
    """
    check_options(options)
    names = [*checkpoint.names, *checkpoint.extras]
    for number, rule in enumerate(options.rules, start=1):
        _check_reach(number, rule, names)
    plans = [_text_plan(checkpoint, options, name, qat) for name in checkpoint.names]
    if options.head != "tied" and HEAD not in checkpoint.names:
        plans.append(_head_plan(checkpoint, options, qat))
    plans += [_kept(checkpoint, name, "a tower is carried through") for name in checkpoint.extras]
    return plans


def unmatched_rules(checkpoint: Checkpoint, options: QuantizeOptions) -> list[str]:
    """A line for each rule that matches nothing here; `plan` has refused those of no Gemma 4."""
    names = [*checkpoint.names, *checkpoint.extras]
    return [
        f"Rule {number} ({rule.match!r}) matches nothing in this checkpoint."
        for number, rule in enumerate(options.rules, start=1)
        if not any(re.search(rule.match, name) for name in names)
    ]


def _check_reach(number: int, rule: Rule, names: list[str]) -> None:
    # One recipe may serve several sizes, so a rule for what another size has is fine; one that
    # fits no Gemma 4 at all is misspelt.
    if not any(re.search(rule.match, name) for name in (*names, *_published_names())):
        raise UsageError(
            f"Rule {number} ({rule.match!r}) matches no tensor of this checkpoint nor of any "
            f"Gemma 4; rules are matched with names such as layers.0.mlp.down_proj.weight."
        )


@cache
def _published_names() -> tuple[str, ...]:
    names = {name for config in VARIANTS.values() for name in text_tensors(config)}
    return (*sorted(names), HEAD, *_TOWERS)


def _text_plan(
    checkpoint: Checkpoint, options: QuantizeOptions, name: str, trained: bool
) -> TensorPlan:
    found = _rule_for(name, options)
    asked = f"; {found[0]} asked for {found[1].scheme}" if found else ""
    if found and found[1].scheme == "keep":
        return _kept(checkpoint, name, found[0])
    if len(checkpoint.info(name).shape) < 2:
        return _kept(checkpoint, name, f"a vector or scalar stays as it is{asked}")
    if ".router." in name:
        return _kept(checkpoint, name, f"the router stays as it is{asked}")
    if name in (EMBEDDING, TABLE):
        return _embedding_plan(checkpoint, options, name)
    if name == HEAD and options.head != "tied":
        return _head_plan(checkpoint, options, trained)
    if found:
        where, rule = found
        return _matrix(checkpoint, options, name, rule, where, trained)
    if options.scheme == "keep":
        return _kept(checkpoint, name, "the scheme of the options")
    rule = Rule("", options.scheme, _default_group(options), options.solver)
    return _matrix(checkpoint, options, name, rule, "the scheme of the options", trained)


def _rule_for(name: str, options: QuantizeOptions) -> tuple[str, Rule] | None:
    for number, rule in enumerate(options.rules, start=1):
        if re.search(rule.match, name):
            return f"rule {number} ({rule.match!r})", rule
    return None


def _default_group(options: QuantizeOptions) -> int | None:
    return options.group_size if options.scheme.startswith("int4") else None


def _embedding_plan(checkpoint: Checkpoint, options: QuantizeOptions, name: str) -> TensorPlan:
    found = _rule_for(name, options)
    if found is None:
        if options.scheme == "int8":
            rule = Rule("", "int8")
            return _matrix(checkpoint, options, name, rule, "the scheme of the options", False)
        return _kept(checkpoint, name, "embeddings are never 4 bit; a rule may make them int8")
    where, rule = found
    if rule.scheme.startswith("int4"):
        raise UsageError(
            f"{where[0].upper()}{where[1:]} asks for {rule.scheme} for {name}, which breaks the "
            f"model: embeddings are never stored at 4 bit; give int8 or keep for it, before that "
            f"rule."
        )
    return _matrix(checkpoint, options, name, rule, where, False)


def _head_plan(checkpoint: Checkpoint, options: QuantizeOptions, trained: bool) -> TensorPlan:
    source = HEAD if HEAD in checkpoint.names else EMBEDDING
    scheme = options.head
    assert scheme != "tied"
    where = f"head: {scheme}"
    if scheme == "keep":
        return _kept(checkpoint, HEAD, where, source)
    solver = options.solver if scheme == options.scheme else None
    group = options.group_size if scheme.startswith("int4") else None
    rule = Rule("", scheme, group, solver)
    # The head of a checkpoint trained for Q4_0 is its embedding, which the grid leaves out.
    return _matrix(checkpoint, options, HEAD, rule, where, trained and source == HEAD, source)


def _kept(checkpoint: Checkpoint, name: str, reason: str, source: str | None = None) -> TensorPlan:
    info = checkpoint.info(source or name)
    return TensorPlan(
        name,
        checkpoint.hf_name(name),
        "keep",
        None,
        None,
        reason,
        info.shape,
        info.dtype,
        source or name,
    )


def _matrix(
    checkpoint: Checkpoint,
    options: QuantizeOptions,
    name: str,
    rule: Rule,
    reason: str,
    trained: bool,
    source: str | None = None,
) -> TensorPlan:
    """The plan of a weight [..., N, K] that becomes integers, with a group that divides K."""
    info = checkpoint.info(source or name)
    columns = info.shape[-1]
    scheme: Scheme = rule.scheme
    solver = _solver(rule, options)
    group = rule.group_size or (options.group_size if scheme.startswith("int4") else columns)
    if trained and scheme.startswith("int4"):
        solver, group, note = _trained_grid(rule, options, solver, group, columns)
        reason = f"{reason}; {note}"
    if columns % group:
        wanted = group
        scheme, group, note = _fallback(scheme, wanted, columns)
        reason = f"{reason}; {note}"
        solver = "int8" if scheme == "int8" else solver
    return TensorPlan(
        name,
        checkpoint.hf_name(name),
        scheme,
        group,
        solver,
        reason,
        info.shape,
        info.dtype,
        source or name,
    )


def _solver(rule: Rule, options: QuantizeOptions) -> str:
    if rule.scheme == "int4-hqq":
        default = options.solver if options.scheme == "int4-hqq" else None
        return rule.solver or default or "hqq"
    return {"int4-rtn": "rtn", "int4-sym": "symmetric"}.get(rule.scheme, "int8")


def _trained_grid(
    rule: Rule, options: QuantizeOptions, solver: str, group: int, columns: int
) -> tuple[str, int, str]:
    """Solver, group and note for a checkpoint that was trained for Q4_0."""
    forced = rule.solver or options.solver
    if forced:
        return solver, group, f"not on its trained grid, since the solver {forced} was asked for"
    if columns % grid.GROUP:
        return solver, group, f"not on its trained grid: {columns} columns are not groups of 32"
    note = "keeps the grid it was trained on"
    if group != grid.GROUP:
        note += f", which has groups of {grid.GROUP}, not {group}"
    return ("grid-symmetric" if rule.scheme == "int4-sym" else "grid"), grid.GROUP, note


def _fallback(scheme: Scheme, wanted: int, columns: int) -> tuple[Scheme, int, str]:
    """The largest smaller group that divides the columns, or int8 by row where none does."""
    group = next((g for g in _FALLBACK_GROUPS if g < wanted and columns % g == 0), None)
    if group is not None:
        return scheme, group, f"{wanted} does not divide {columns} columns, {group} does"
    # Not 16 bit, which would pass for quantized, and no error: one odd matrix should not cost
    # the user the whole model.
    return "int8", columns, f"no group divides {columns} columns, so int8 by row"
