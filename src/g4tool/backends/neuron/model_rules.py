"""Rules on the model and what is asked of it, before there is a program: one function a rule."""

from collections.abc import Iterator, Mapping
from typing import Any

from g4tool.backends.neuron.findings import Finding
from g4tool.backends.neuron.memory import RankMemory, rank_memory
from g4tool.backends.neuron.nxdi_layout import check_even
from g4tool.backends.neuron.setting_names import NAMES
from g4tool.backends.neuron.settings import NeuronOptions
from g4tool.backends.neuron.targets import GIB, smallest_instance
from g4tool.errors import G4Error
from g4tool.model.config import TextConfig
from g4tool.parallel.plan import Plan, check_degree

# NxD Inference's attention kernels take heads up to this size.
_KERNEL_HEAD = 128
# What weights and caches may take of a core before activations are likely not to fit.
_FULL = 0.85
_TOWERS = ("vision_config", "audio_config")


def check_model(
    plan: Plan,
    options: NeuronOptions,
    settings: Mapping[str, Any],
    raw_config: Mapping[str, Any],
) -> list[Finding]:
    """What compiler and NxD Inference would say of this model with these settings."""
    memory = rank_memory(plan, options.batch, options.seq_len, options.dtype)
    return [
        *_in_common(plan, options, raw_config, memory),
        *_even(plan),
        *_kernels(plan, settings),
        *_names(settings),
    ]


def check_bundle(
    plan: Plan, options: NeuronOptions, raw_config: Mapping[str, Any], memory: RankMemory
) -> list[Finding]:
    """The same of a quantized model, which is divided but cannot be compiled."""
    return [*_in_common(plan, options, raw_config, memory), *_quantized(plan), *_ranks_differ(plan)]


def check_wish(text: TextConfig, options: NeuronOptions) -> list[Finding]:
    """What needs neither weights nor settings: the ranks, the chip, the length.

    Raises UsageError for a degree that does not divide the query heads.
    """
    check_degree(text, options.tp)
    return [*_lnc(options), *_instance(options), *_length(text, options)]


def _in_common(
    plan: Plan, options: NeuronOptions, raw_config: Mapping[str, Any], memory: RankMemory
) -> Iterator[Finding]:
    yield from _lnc(options)
    yield from _instance(options)
    yield from _kv_heads(plan)
    yield from _length(plan.config, options)
    yield from _window(plan, options)
    yield from _towers(raw_config)
    yield from _memory(memory, options)


def _quantized(plan: Plan) -> Iterator[Finding]:
    kinds = sorted({x.kind for x in plan.layouts.values() if x.kind != "plain"})
    yield Finding(
        "NXDI_QUANTIZED",
        "warning",
        " and ".join(kinds),
        "NxD Inference has no such weights, so no program can use these shards; compile the "
        "checkpoint that the bundle was made from.",
    )


def _ranks_differ(plan: Plan) -> Iterator[Finding]:
    differ = next((split for split in plan.splits.values() if not split.is_even), None)
    if differ is not None:
        yield Finding(
            "NXDI_UNEVEN",
            "warning",
            f"tp {plan.degree}",
            "ranks differ in shape, and one program serves all ranks "
            f"({differ.name}: {differ.note}).",
        )


def _lnc(options: NeuronOptions) -> Iterator[Finding]:
    if options.lnc not in options.chip.lnc:
        allowed = " or ".join(map(str, sorted(options.chip.lnc)))
        yield Finding(
            "NCC_EARG001",
            "error",
            f"lnc {options.lnc}",
            f"{options.chip.name} groups {allowed} physical cores to a logical one.",
        )


def _instance(options: NeuronOptions) -> Iterator[Finding]:
    if options.lnc in options.chip.lnc and not smallest_instance(
        options.chip, options.tp, options.lnc
    ):
        most = max(
            options.chip.logical_cores(n, options.lnc) for n in options.chip.instances.values()
        )
        yield Finding(
            "NXDI_CORES",
            "error",
            f"tp {options.tp}",
            f"the largest {options.chip.name} instance known here has {most} logical cores.",
        )


def _even(plan: Plan) -> Iterator[Finding]:
    try:
        check_even(plan)
    except G4Error as error:
        # One program serves all ranks, so their shapes are alike.
        yield Finding("NXDI_UNEVEN", "error", f"tp {plan.degree}", str(error))


def _kv_heads(plan: Plan) -> Iterator[Finding]:
    fewer = {
        layer.num_kv_heads
        for layer in plan.config.layers
        if layer.kv_source is None and layer.num_kv_heads % plan.degree
    }
    if fewer:
        heads = " and ".join(map(str, sorted(fewer)))
        yield Finding(
            "NXDI_KV_HEADS",
            "warning",
            f"tp {plan.degree}",
            f"layers with {heads} key-value heads repeat them, so their caches take more memory.",
        )


def _kernels(plan: Plan, settings: Mapping[str, Any]) -> Iterator[Finding]:
    largest = max(layer.head_dim for layer in plan.config.layers)
    for name, value in settings.items():
        if "attn" in name and name.endswith("kernel_enabled") and value and largest > _KERNEL_HEAD:
            yield Finding(
                "NXDI_HEAD_DIM",
                "error",
                name,
                f"the kernel takes head sizes up to {_KERNEL_HEAD}, and this model has {largest}.",
            )


def _length(text: TextConfig, options: NeuronOptions) -> Iterator[Finding]:
    most = text.max_position_embeddings
    if options.seq_len > most:
        yield Finding(
            "NXDI_LENGTH",
            "error",
            f"seq_len {options.seq_len}",
            f"the model was trained for {most} positions.",
        )


def _window(plan: Plan, options: NeuronOptions) -> Iterator[Finding]:
    window = plan.config.sliding_window
    slides = any(layer.attention == "sliding" for layer in plan.config.layers)
    if slides and options.seq_len > window:
        yield Finding(
            "NXDI_WINDOW",
            "warning",
            f"seq_len {options.seq_len}",
            f"sliding layers keep the last {window} tokens, which NxD Inference's own models did "
            "not always do right before SDK 2.31: compare tokens past the window with `g4 run`.",
        )


def _towers(raw_config: Mapping[str, Any]) -> Iterator[Finding]:
    found = [name for name in _TOWERS if raw_config.get(name)]
    if found:
        yield Finding(
            "NXDI_TEXT_ONLY",
            "warning",
            ", ".join(found),
            "the text model is compiled; images and sound are not.",
        )


def _names(settings: Mapping[str, Any]) -> Iterator[Finding]:
    for name in settings:
        if name not in NAMES:
            yield Finding(
                "NXDI_NAME",
                "error",
                name,
                "NxD Inference has no such setting, and would ignore it with a warning.",
            )


def _memory(memory: RankMemory, options: NeuronOptions) -> Iterator[Finding]:
    if options.lnc not in options.chip.lnc:
        return
    need = memory.total
    have = options.chip.core_memory(options.lnc)
    where = f"{need / GIB:.1f} GiB of {have / GIB:.1f} GiB a core"
    if need > have:
        yield Finding(
            "NCC_EOOM001",
            "error",
            where,
            "weights and caches alone do not fit; use more ranks, a smaller batch or length.",
        )
    elif need > _FULL * have:
        yield Finding(
            "NCC_EVRF009", "warning", where, "activations may not fit beside weights and caches."
        )
