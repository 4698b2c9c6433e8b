"""What the NxD Inference port lays out differently from the canonical model; needs torch only.

Parameters keep their canonical names, but for the experts, which lie inside NxD's expert layer and
have rows and columns exchanged there. Beside the weights, NxD wants each rank's number as a tensor:
one program serves all ranks, so a rank learns only from its data which it is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from g4tool.errors import G4Error
from g4tool.model.config import LayerConfig, TextConfig
from g4tool.parallel.plan import Plan, kv_heads, make_plan

_EXPERTS = ".experts."
_NXD_EXPERTS = ".experts.mlp_op."


def neuron_name(name: str) -> str:
    """The port's parameter for a canonical name."""
    return name.replace(_EXPERTS, _NXD_EXPERTS)


def neuron_tensor(name: str, tensor: Tensor) -> Tensor:
    """The canonical tensor `name`, whole or one rank's shard, as the port holds it.

    Experts [E, out, in] become [E, in, out]. The router's factors become float32: NxD keeps every
    parameter whose name ends in `scale` so.
    """
    if _EXPERTS in name:
        return tensor.transpose(1, 2).contiguous()
    return tensor.float() if name.endswith("scale") else tensor


def rank_names(config: TextConfig) -> list[str]:
    """The parameters that hold a rank's number: int32 [1] on each rank."""
    tables = (
        ["embed_tokens", "embed_tokens_per_layer"] if config.per_layer_dim else ["embed_tokens"]
    )
    return ["rank_util.rank", *(f"{table}.rank_util.rank" for table in tables)]


def neuron_state_dict(
    state_dict: Mapping[str, Tensor], config: TextConfig, degree: int
) -> dict[str, Tensor]:
    """The whole, unsharded weights under the port's names, from those under canonical names.

    Rank numbers are int32 [degree]: NxD cuts them like any other column.
    """
    ranks = torch.arange(degree, dtype=torch.int32)
    return {
        **{neuron_name(name): neuron_tensor(name, value) for name, value in state_dict.items()},
        **{name: ranks.clone() for name in rank_names(config)},
    }


def cache_slots(layer: LayerConfig, config: TextConfig, length: int) -> int:
    """Tokens a layer's cache holds: a sliding layer keeps a ring of its window, no more."""
    return min(length, config.sliding_window) if layer.attention == "sliding" else length


def cache_shapes(
    config: TextConfig, degree: int, batch: int, length: int
) -> dict[int, tuple[int, int, int, int]]:
    """[batch, kv heads of a rank, slots, head_dim] of each layer that makes keys and values.

    A layer has two caches of this shape; layers that share another's have none.
    """
    return {
        number: (
            batch,
            len(kv_heads(layer, config.num_heads, degree, 0)),
            cache_slots(layer, config, length),
            layer.head_dim,
        )
        for number, layer in enumerate(config.layers)
        if layer.kv_source is None
    }


def even_plan(config: TextConfig, degree: int) -> Plan:
    """The plan for `degree` ranks, all of whose shapes are alike: one program serves them all.

    Raises UsageError for a degree that the plan refuses, and what `check_even` raises.
    """
    plan = make_plan(config, degree, expert_block=1)
    check_even(plan)
    return plan


def check_even(plan: Plan) -> None:
    """Raises G4Error where ranks would differ in shape or would have a large weight whole."""
    for split in plan.splits.values():
        if not split.is_even or (split.kind == "replicated" and split.note):
            raise G4Error(
                f"tensor parallelism {plan.degree} does not cut every weight evenly "
                f"({split.name}: {split.note})."
            )
