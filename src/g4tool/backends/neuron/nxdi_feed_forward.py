"""The feed-forwards on NxD's parallel layers: the dense one, and the experts."""

# mypy: disable-error-code="import-not-found, import-untyped, misc"

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from g4tool.backends.neuron.nxdi_config import Gemma4InferenceConfig
from g4tool.model.config import MoeConfig
from g4tool.model.feed_forward import FeedForward


class NeuronFeedForward(FeedForward):
    """The canonical feed-forward with its width split over the ranks."""

    def __init__(self, config: Gemma4InferenceConfig, hidden_size: int, width: int) -> None:
        nn.Module.__init__(self)
        settings = config.neuron_config
        columns = partial(
            ColumnParallelLinear,
            hidden_size,
            width,
            bias=False,
            gather_output=False,
            dtype=settings.torch_dtype,
        )
        self.gate_proj = columns()
        self.up_proj = columns()
        self.down_proj = RowParallelLinear(
            width,
            hidden_size,
            bias=False,
            input_is_parallel=True,
            dtype=settings.torch_dtype,
            reduce_dtype=settings.rpl_reduce_dtype,
        )


class NeuronExperts(ExpertMLPs):
    """NxD's expert layer, given mixing weights as the router leaves them, and tanh GELU."""

    def __init__(self, config: Gemma4InferenceConfig, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            hidden_size=hidden_size,
            intermediate_size=moe.intermediate_size,
            hidden_act="gelu",
            glu_mlp=True,
            capacity_factor=None,
            normalize_top_k_affinities=False,
            dtype=config.neuron_config.torch_dtype,
            # NxD's blockwise kernel knows SiLU only.
            use_torch_block_wise=True,
            # In parallel, each rank would need its number here as well, to save an index table.
            parallelize_token_to_block_mapping=False,
            logical_nc_config=config.neuron_config.logical_nc_config,
        )
        self.num_experts = moe.num_experts

    def initialize_mlp_op(self, *args: Any, **kwargs: Any) -> Any:
        """NxD's expert matrices; of its activations, "gelu" is the one with the error function."""
        experts = super().initialize_mlp_op(*args, **kwargs)
        experts._activation_fn = partial(F.gelu, approximate="tanh")
        return experts

    def forward(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """x [B, S, d] -> [B, S, d]; weights float32 and index int64 are the router's [B, S, k]."""
        batch, length, dim = x.shape
        weights, index = weights.flatten(0, 1), index.flatten(0, 1)
        numbers = torch.arange(self.num_experts, device=x.device)
        picked = index.unsqueeze(-1) == numbers
        share = torch.where(picked, weights.unsqueeze(-1), 0.0).sum(1)  # [tokens, experts]
        mixed = super().forward(x.reshape(-1, dim), share.to(x.dtype), index, seq_len=length)
        reduced: Tensor = reduce_from_tensor_model_parallel_region(
            mixed.to(x.dtype), process_group=self.moe_tensor_model_parallel_group
        )
        return reduced.view(batch, length, dim)
