"""The arithmetic of a layer in parts, each of which a device may be given its own of.

The modules say what follows what, once, and leave each part to their `arithmetic`: here in plain
PyTorch. Another one, set by `use`, must give the same numbers up to rounding. What `norm`, `join`
(its second result), `product`, `products`, `chosen`, `heads` (its queries), `attend` and the gates
return is only ever handed to the next part, so another arithmetic may hand on what it likes there.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from g4tool.model.cache import KeyValueCache, Span
from g4tool.model.norm import RMSNorm, rms_norm
from g4tool.model.rope import rotate

KeysValues = tuple[Tensor, Tensor]


class Arithmetic:
    """Plain PyTorch. Shapes are [B, S, ...] throughout."""

    one_token = False
    """Whether it runs one token of one row at a time, and reads span.positions, not span.mask."""

    def norm(self, norm: RMSNorm, x: Tensor) -> Any:
        """x [..., dim], normalised and scaled."""
        return norm(x)

    def unscaled(self, x: Tensor, eps: float) -> Tensor:
        """x [..., dim], normalised."""
        return rms_norm(x, eps)

    def join(
        self, x: Tensor, branch: Any, after: RMSNorm, before: RMSNorm | None = None
    ) -> tuple[Tensor, Any]:
        """The stream x [B, S, d] with a branch's result added, and what the next branch is given.

        The first is x + after(branch), the second before(that), or that itself.
        """
        x = x + after(branch)
        return x, x if before is None else before(x)

    def leave(self, x: Tensor, branch: Any, after: RMSNorm, scale: Tensor) -> Tensor:
        """What a layer leaves of its stream x [B, S, d]: (x + after(branch)) * scale."""
        left: Tensor = (x + after(branch)) * scale
        return left

    def product(self, leaf: nn.Module, x: Any) -> Any:
        """x [..., in] through one leaf."""
        return leaf(x)

    def products(self, leaves: Sequence[nn.Module], x: Any) -> Any:
        """x [..., in] through each of several leaves."""
        return [leaf(x) for leaf in leaves]

    def gated(self, made: Any) -> Any:
        """gelu(gate) * up of `products` of the two."""
        return self.gated_by(made[0], made[1])

    def gated_by(self, made: Any, other: Tensor) -> Any:
        """gelu(made) * other."""
        return F.gelu(made, approximate="tanh") * other

    def heads(
        self,
        made: Any,
        span: Span,
        q_norm: RMSNorm,
        k_norm: RMSNorm | None,
        value_from_key: bool,
        cache: KeyValueCache | None,
    ) -> tuple[Any, KeysValues | None]:
        """Queries [B, H, S, D], and keys and values to attend to, [B, kv heads, K, D] each.

        `made` are the products q, k and v, or q and k, or with no `k_norm` q alone. Queries and
        keys are normalised and rotated, values normalised. New ones go into the cache.
        """
        split = [each.view(*each.shape[:-1], -1, q_norm.weight.shape[0]) for each in made]
        queries = self.turned(split[0], q_norm, span).transpose(1, 2)
        if k_norm is None:
            return queries, None
        keys = self.turned(split[1], k_norm, span).transpose(1, 2)
        values = self.unscaled(split[1 if value_from_key else 2], q_norm.eps).transpose(1, 2)
        # Without slots to write to, this is a whole sequence that leaves the cache alone.
        if cache is None or (span.slots is None and span.newest is None):
            return queries, (keys, values)
        return queries, cache.update(keys, values, span)

    def turned(self, x: Tensor, norm: RMSNorm, span: Span) -> Tensor:
        """Heads x [B, S, heads, D], normalised, scaled and rotated."""
        return rotate(norm(x), span.cos, span.sin)

    def attend(self, queries: Any, keys: Tensor, values: Tensor, span: Span) -> Any:
        """Queries [B, H, S, D] over keys and values [B, kv heads, K, D] -> [B, S, H * D]."""
        batch, _, length, size = queries.shape
        if length == 1:
            # A group's query heads stand in for a sequence: keys are read once, not once a head.
            mixed = F.scaled_dot_product_attention(
                queries.view(batch, keys.shape[1], -1, size),
                keys,
                values,
                attn_mask=span.mask,
                scale=1.0,
            )
            # Kernels differ in the strides of their result, and a traced view would bake in one.
            mixed = mixed.clone(memory_format=torch.contiguous_format).view(queries.shape)
        else:
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=span.mask, scale=1.0, enable_gqa=True
            )
        return mixed.transpose(1, 2).flatten(2)

    def route(self, router: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mixing weights float32 [B, S, k] and expert indices int64 [B, S, k]."""
        return cast(tuple[Tensor, Tensor], router(x))

    def chosen(self, leaf: Any, x: Any, index: Tensor) -> Any:
        """x [B, 1, in] or [B, k, in] through experts index [B, k] of each row -> [B, k, out]."""
        return leaf.chosen(x.expand(-1, index.shape[-1], -1), index)

    def gated_halves(self, made: Any) -> Any:
        """gelu(first half) * second half of [..., 2 f]."""
        gate, up = made.chunk(2, dim=-1)
        return self.gated_by(gate, up)

    def weighted(self, made: Any, weights: Tensor) -> Any:
        """Sum of the chosen experts' results [B, k, d] by weights float32 [B, k] -> [B, 1, d]."""
        return (made * weights.unsqueeze(-1)).sum(1, keepdim=True).to(made.dtype)

    def both(self, dense: Any, mixed: Any, dense_norm: RMSNorm, mixed_norm: RMSNorm) -> Any:
        """The dense branch and the experts', each normalised, as one."""
        return dense_norm(dense) + mixed_norm(mixed)


PLAIN = Arithmetic()


def use(model: nn.Module, arithmetic: Arithmetic) -> None:
    """Has every module of the model that has an arithmetic use this one from now on."""
    for module in model.modules():
        if hasattr(module, "arithmetic"):
            cast(Any, module).arithmetic = arithmetic
