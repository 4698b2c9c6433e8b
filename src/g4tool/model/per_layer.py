"""Per-layer embeddings: a small vector for each token and layer, mixed into the layer's output."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from g4tool.model.arithmetic import Arithmetic
from g4tool.model.config import TextConfig


def per_layer_rows(
    ids: Tensor,
    x: Tensor,
    table: nn.Module,
    scales: Mapping[torch.dtype, float],
    projection: nn.Module,
    norm: nn.Module,
    config: TextConfig,
) -> Tensor:
    """What each layer is given for ids [B, S] and scaled embeddings x [B, S, d].

    See `per_layer_inputs`; `table` and `projection` are the model's two.
    """
    split = (config.num_layers, config.per_layer_dim)
    tokens = table(ids)
    tokens = (tokens * scales[tokens.dtype]).unflatten(-1, split)
    return per_layer_inputs(tokens, projection(x).unflatten(-1, split), norm, config.hidden_size)


def per_layer_inputs(tokens: Tensor, context: Tensor, norm: nn.Module, hidden_size: int) -> Tensor:
    """What each layer is given for each token: [B, S, layers, P].

    (tokens + norm(context / sqrt(hidden_size))) / sqrt(2), where tokens [B, S, layers, P] are the
    scaled rows of the per-layer table and context [B, S, layers, P] is the projection of the scaled
    embeddings. The division comes before the norm, where only its epsilon sees it.
    """
    normed: Tensor = norm(context * hidden_size**-0.5)
    return (normed + tokens) * math.sqrt(0.5)


def gated(
    x: Any, per_layer: Tensor, gate: nn.Module, projection: nn.Module, run: Arithmetic
) -> Any:
    """projection(gelu(gate x) * per_layer): x [B, S, d], per_layer [B, S, P] -> [B, S, d]."""
    return run.product(projection, run.gated_by(run.product(gate, x), per_layer))
