"""One token through a `TextModel` on a CUDA device, with the Triton kernels of `kernels`.

The same numbers as `TextModel.hidden` for one row and one token, up to rounding, in a quarter of
the launches: what lies between two matrix products is one kernel, products of one input are one
launch, and the experts' weights are read where they lie. Leaves of any other kind than int4 run as
they are. Nothing here waits for the device, so the step can be recorded as a CUDA graph.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.register import has_triton
from g4tool.kernels.triton_attention import decode_attention
from g4tool.kernels.triton_decode import gated, gated_by, heads, mixture, residual
from g4tool.kernels.triton_int4 import (
    Weight,
    chosen_parts,
    empty_packed,
    takes,
    vector_parts,
)
from g4tool.model.attention import Attention
from g4tool.model.config import LayerConfig
from g4tool.model.decoder import DecoderLayer
from g4tool.model.rope import rope_tables
from g4tool.model.text import TextModel

_MOST_WEIGHTS = 3  # of one launch

Rotation = tuple[Tensor, Tensor]
Input = tuple[Tensor, Tensor]
"""A vector [K], plain and packed (`triton_int4.pack_rows`)."""


def runs(model: object) -> bool:
    """Whether `decode_hidden` takes this model: a text model on a CUDA device with Triton.

    One whose modules carry hooks, as the ranks of a parallel model do, is run module by module.
    """
    if type(model) is not TextModel or not has_triton(model.device):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    sizes = {layer.head_dim for layer in model.config.layers}
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def decode_hidden(model: TextModel, ids: Tensor, position: Tensor) -> Tensor:
    """Final normalised states [1, 1, d] of the token ids [1, 1] at 0-dim int64 `position`.

    Reads and writes the model's cache, which must be for one row, as `TextModel.hidden` does.
    """
    config = model.config
    x = model.embed_tokens(ids)
    x = x * model.embed_scales[x.dtype]
    per_layer = model.per_layer_rows(ids, x)[0, 0] if config.per_layer_dim else None
    tables = {
        kind: rope_tables(position.view(1, 1), config.rope[kind], layer.head_dim, x.dtype)
        for kind, layer in model.kinds.items()
    }
    blocks = [cast(DecoderLayer, block) for block in model.layers]
    befores = [*(block.input_layernorm.weight for block in blocks[1:]), model.norm.weight]
    stream, *state = residual(
        x.view(-1), config.rms_norm_eps, before=blocks[0].input_layernorm.weight
    )
    for number, block in enumerate(blocks):
        layer = config.layers[number]
        source = number if layer.kv_source is None else layer.kv_source
        cache = blocks[source].self_attn.cache
        assert cache is not None
        attended = _attend(
            block.self_attn,
            layer,
            config.num_heads,
            (state[0], state[1]),
            tables[layer.attention],
            (cache.keys, cache.values),
            position,
        )
        own = None if per_layer is None else per_layer[number]
        stream, *state = _feed_forward(
            block, config.rms_norm_eps, stream, attended, befores[number], own
        )
    return state[0].view(1, 1, -1)


def _attend(
    attention: Attention,
    layer: LayerConfig,
    count: int,
    given: Input,
    rotation: Rotation,
    cache: tuple[Tensor, Tensor],
    position: Tensor,
) -> Tensor:
    """Parts of the attention branch before its norm."""
    leaves = [attention.q_proj]
    if attention.makes_kv:
        leaves.append(attention.k_proj)
        if not attention.value_from_key:
            leaves.append(attention.v_proj)
    q = heads(
        _products(leaves, given),
        attention.q_norm.weight,
        attention.k_norm.weight if attention.makes_kv else None,
        *rotation,
        position,
        cache if attention.makes_kv else None,
        count,
        attention.eps,
        given[0].dtype,
        attention.value_from_key,
    )
    packed = empty_packed(1, q.numel(), q.device)
    mixed = decode_attention(q, *cache, position, packed)
    return _products([attention.o_proj], (mixed.view(-1), packed))


def _feed_forward(
    block: DecoderLayer,
    eps: float,
    stream: Tensor,
    attended: Tensor,
    before: Tensor,
    per_layer: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rest of a layer after attention: the stream, and the next norm's result as an Input."""
    after = block.post_attention_layernorm.weight
    stream, normed, packed = residual(
        stream, eps, attended, after, before=block.pre_feedforward_layernorm.weight
    )
    mlp = block.mlp
    inner = gated(_products([mlp.gate_proj, mlp.up_proj], (normed, packed))[:, None], stream.dtype)
    out = _products([mlp.down_proj], (inner[0].view(-1), inner[1]))
    if block.has_experts:
        out = _experts(block, eps, stream, out)
    after = block.post_feedforward_layernorm.weight
    if per_layer is None:
        return residual(stream, eps, out, after, block.layer_scalar, before)
    stream, plain, packed = residual(stream, eps, out, after)
    out = _products([block.per_layer_input_gate], (plain, packed))
    out = _products([block.per_layer_projection], gated_by(out, per_layer))
    after = block.post_per_layer_input_norm.weight
    return residual(stream, eps, out, after, block.layer_scalar, before)


def _experts(block: DecoderLayer, eps: float, stream: Tensor, dense: Tensor) -> Tensor:
    """The dense branch's parts and the experts' together, as one part [1, d]."""
    weights, index = block.router(stream[None])
    _, normed, packed = residual(stream, eps, before=block.pre_feedforward_layernorm_2.weight)
    count = index.numel()
    gate_up = block.experts.gate_up_proj
    inner = gated(_chosen(gate_up, (normed[None], packed), index, count), stream.dtype)
    mixed = _chosen(block.experts.down_proj, inner, index, 1)
    return mixture(
        dense,
        mixed,
        weights.view(-1),
        block.post_feedforward_layernorm_1.weight,
        block.post_feedforward_layernorm_2.weight,
        eps,
        stream.dtype,
    )


def _products(leaves: Sequence[nn.Module], given: Input) -> Tensor:
    """One vector through several leaves [N_i, K]: parts [splits, sum N_i]."""
    plain, packed = given
    weights = [_int4(leaf, Int4Linear, plain) for leaf in leaves]
    ready = [weight for weight in weights if weight is not None]
    groups = {weight[1].shape[0] for weight in ready}
    if len(ready) == len(leaves) <= _MOST_WEIGHTS and len(groups) == 1:
        return vector_parts(packed, ready)
    return torch.cat([leaf(plain[None]) for leaf in leaves], -1)


def _chosen(leaf: nn.Module, given: Input, index: Tensor, share: int) -> Tensor:
    """Rows [slots / share, K] through the experts index [1, slots]: parts [splits, slots, N]."""
    plain, packed = given
    weight = _int4(leaf, Int4ExpertLinear, plain)
    if weight is not None:
        return chosen_parts(packed, index.view(-1), weight, share)
    out: Tensor = leaf.chosen(plain.expand(index.numel(), -1)[None], index)  # type: ignore[operator]
    return out


def _int4(leaf: nn.Module, kind: type[nn.Module], x: Tensor) -> Weight | None:
    """The leaf's weight if it is of this very kind, and the kernels take it."""
    if type(leaf) is not kind or not takes(x, leaf.qdata, leaf.scale):  # type: ignore[arg-type]
        return None
    return cast(Weight, (leaf.qdata, leaf.scale, leaf.zero))
