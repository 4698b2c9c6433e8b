"""Mixture of experts: the router, and the expert matrices three ways.

One token: gather the chosen experts' weights. Many tokens: sort them by expert and multiply group
by group; gathering there would copy gigabytes. Or run every expert on every token, where a backend
has neither a sort nor a grouped matmul. All three give the same sums.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.errors import G4Error
from g4tool.model.arithmetic import PLAIN, Arithmetic
from g4tool.model.config import MoeConfig
from g4tool.model.norm import rms_norm


@torch.library.custom_op("g4::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows x [M, in] sorted by expert, times weight [experts, out, in] -> [M, out].

    offsets int32 [experts] is where each expert's rows end. Torch's own operator, wrapped: its
    shape inference refuses float32 (torch 2.13), which its kernel takes. It has no gradient.
    """
    return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


class ExpertLinear(nn.Module):
    """One matrix an expert: weight [experts, out, in]. A quantized twin has the same methods.

    Sizes are multiples of 8: grouped matmul wants rows of whole 16-byte blocks in 16-bit dtypes.
    """

    def __init__(self, experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        if out_features % 8 or in_features % 8:
            raise G4Error(
                f"expert matrices of {out_features}x{in_features} cannot be run: "
                "both sizes must be multiples of 8"
            )
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def chosen(self, x: Tensor, index: Tensor) -> Tensor:
        """x [N, k, in] through experts index [N, k] -> [N, k, out]; copies N*k matrices."""
        return (self.weight[index] @ x.unsqueeze(-1)).squeeze(-1)

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, in] sorted by expert -> [M, out]; offsets int32 [experts]: where each ends."""
        out: Tensor = grouped_mm(x, self.weight, offsets)
        return out

    def every(self, x: Tensor) -> Tensor:
        """x [experts or 1, N, in], each expert's own or common to all -> [experts, N, out]."""
        return x @ self.weight.transpose(1, 2)


class Router(nn.Module):
    """Chooses experts for each token; reads the raw residual and has its own normalisation."""

    def __init__(self, hidden_size: int, moe: MoeConfig, eps: float) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.eps = eps
        self.root = hidden_size**-0.5
        self.proj = nn.Linear(hidden_size, moe.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(moe.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., d] -> mixing weights float32 [..., k] and expert indices int64 [..., k].

        Probabilities over all experts; the k largest are scaled to sum to one, then each by its
        expert's own factor.
        """
        scores = self.proj(rms_norm(x, self.eps) * self.scale * self.root)
        weights, index = torch.topk(torch.softmax(scores, dim=-1, dtype=torch.float32), self.top_k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.per_expert_scale[index].float(), index


class Experts(nn.Module):
    """The gated expert feed-forwards of one layer.

    `prefill` says how many tokens at once are run: "grouped", or "every" for training and for a
    backend that lacks sort and grouped matmul (memory then grows with tokens times experts).
    """

    arithmetic: Arithmetic = PLAIN

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.num_experts = moe.num_experts
        self.prefill: Literal["grouped", "every"] = "grouped"
        self.gate_up_proj = ExpertLinear(moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        self.down_proj = ExpertLinear(moe.num_experts, hidden_size, moe.intermediate_size)

    def forward(self, x: Any, weights: Tensor, index: Tensor) -> Any:
        """x [B, S, d] -> [B, S, d]; weights float32 and index int64 are the router's [B, S, k].

        For one token a row, x and the result may be of the arithmetic's own kind.
        """
        batch, length, top_k = index.shape
        if length == 1 and batch * top_k <= self.num_experts:
            return self._gathered(x, weights.flatten(0, 1), index.flatten(0, 1))
        flat = x.reshape(-1, x.shape[-1])
        weights = weights.reshape(-1, top_k)
        index = index.reshape(-1, top_k)
        mixed = (self._grouped if self.prefill == "grouped" else self._every)(flat, weights, index)
        return mixed.to(x.dtype).view(x.shape)

    def _gathered(self, x: Any, weights: Tensor, index: Tensor) -> Any:
        run = self.arithmetic
        inner = run.gated_halves(run.chosen(self.gate_up_proj, x, index))
        return run.weighted(run.chosen(self.down_proj, inner, index), weights)

    def _grouped(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        top_k = index.shape[-1]
        experts, order = torch.sort(index.reshape(-1), stable=True)
        numbers = torch.arange(self.num_experts, device=x.device)
        offsets = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        inner = self.arithmetic.gated_halves(self.gate_up_proj.grouped(x[order // top_k], offsets))
        outer = self.down_proj.grouped(inner, offsets)
        back = torch.argsort(order)
        return (outer[back].view(-1, top_k, x.shape[-1]) * weights.unsqueeze(-1)).sum(1)

    def _every(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        numbers = torch.arange(self.num_experts, device=x.device)
        picked = index.unsqueeze(-1) == numbers
        share = torch.where(picked, weights.unsqueeze(-1), 0.0).sum(1)  # [N, experts]
        inner = self.arithmetic.gated_halves(self.gate_up_proj.every(x.unsqueeze(0)))
        outer = self.down_proj.every(inner)
        return (outer * share.t().unsqueeze(-1)).sum(0)
