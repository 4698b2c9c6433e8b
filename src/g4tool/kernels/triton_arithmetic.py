"""The layers' arithmetic in Triton kernels, for CUDA devices; see `model.arithmetic`.

`TritonArithmetic` takes any chunk. `TokenArithmetic` takes one token of one row, and between two
matrix products it needs one kernel where the plain one needs ten: a product leaves its unsummed
parts, the part after it sums them and leaves its result plain and packed for the next product.
Nothing waits for the device, so a step can be recorded as a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from g4tool.kernels import triton_attention, triton_decode, triton_router, triton_rows
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.triton_int4 import (
    Weight,
    chosen_parts,
    empty_packed,
    takes,
    vector_parts,
)
from g4tool.model.arithmetic import Arithmetic, KeysValues
from g4tool.model.cache import KeyValueCache, Span
from g4tool.model.norm import RMSNorm

_MOST_WEIGHTS = 3  # of one launch


class Row(NamedTuple):
    """What a product reads: rows [..., K], plain and packed (`triton_int4.pack_rows`)."""

    plain: Tensor
    packed: Tensor


class TritonArithmetic(Arithmetic):
    """Norms, residual and attention of chunks. Head sizes are powers of two of at least 16."""

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """See Arithmetic."""
        return triton_rows.normed_rows(x, norm.eps, norm.weight)

    def unscaled(self, x: Tensor, eps: float) -> Tensor:
        """See Arithmetic."""
        return triton_rows.normed_rows(x, eps)

    def join(
        self, x: Tensor, branch: Tensor, after: RMSNorm, before: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Arithmetic."""
        flat = (-1, x.shape[-1])
        last = None if before is None else before.weight
        stream, given = triton_decode.join(
            x.reshape(flat), after.eps, branch.reshape(flat), after.weight, before=last
        )
        return stream.view(x.shape), given.view(x.shape)

    def leave(self, x: Tensor, branch: Tensor, after: RMSNorm, scale: Tensor) -> Tensor:
        """See Arithmetic."""
        flat = (-1, x.shape[-1])
        stream, _ = triton_decode.join(
            x.reshape(flat), after.eps, branch.reshape(flat), after.weight, scale
        )
        return stream.view(x.shape)

    def turned(self, x: Tensor, norm: RMSNorm, span: Span) -> Tensor:
        """See Arithmetic."""
        if len(x) > 1:
            return super().turned(x, norm, span)
        return triton_rows.turned_rows(x, norm.eps, norm.weight, span.cos, span.sin)

    def gated(self, made: list[Tensor]) -> Tensor:
        """See Arithmetic; the result takes the place of the gate."""
        return triton_decode.gate_into(made[0], made[1])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
        """See Arithmetic. Several rows run in torch's kernel."""
        if span.mask is None or len(queries) > 1 or queries.shape[2] == 1:
            out: Tensor = super().attend(queries, keys, values, span)
            return out
        mixed = triton_attention.chunk_attention(queries, keys, values, span.mask)
        return mixed.transpose(1, 2).flatten(2)


class TokenArithmetic(Arithmetic):
    """One token of one row in `dtype`, over caches of the same dtype."""

    one_token = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._left: tuple[Tensor, RMSNorm, RMSNorm | None, Row] | None = None
        self._next: dict[RMSNorm, RMSNorm] = {}

    def norm(self, norm: RMSNorm, x: Tensor) -> Row:
        """x [1, 1, d]."""
        if self._left is not None and self._left[0] is x:
            _, after, known, row = self._left
            if known is norm:
                return row
            self._next[after] = norm
        packed = empty_packed(1, x.shape[-1], x.device)
        stream = x.view(1, -1)
        _, given = triton_decode.join(stream, norm.eps, before=norm.weight, packed=packed)
        return Row(given, packed)

    def join(
        self, x: Tensor, branch: Tensor, after: RMSNorm, before: RMSNorm | None = None
    ) -> tuple[Tensor, Row]:
        """x [1, 1, d], and a product's parts [splits, d]."""
        return self._join(x, branch, after, before, None)

    def leave(self, x: Tensor, branch: Tensor, after: RMSNorm, scale: Tensor) -> Tensor:
        """See Arithmetic. The norm that followed in an earlier step is made along with it."""
        following = self._next.get(after)
        x, row = self._join(x, branch, after, following, scale)
        self._left = (x, after, following, row)
        return x

    def _join(
        self,
        x: Tensor,
        branch: Tensor,
        after: RMSNorm,
        before: RMSNorm | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Row]:
        packed = empty_packed(1, x.shape[-1], x.device)
        stream, given = triton_decode.join(
            x.view(1, -1),
            after.eps,
            branch,
            after.weight,
            scale,
            None if before is None else before.weight,
            packed,
        )
        return stream.view(x.shape), Row(given, packed)

    def product(self, leaf: nn.Module, x: Row) -> Tensor:
        """Parts [splits, N]."""
        return self.products([leaf], x)

    def products(self, leaves: Sequence[nn.Module], x: Row) -> Tensor:
        """Parts [splits, sum N_i]."""
        weights = [_int4(leaf, Int4Linear, x.plain) for leaf in leaves]
        ready = [weight for weight in weights if weight is not None]
        groups = {weight[1].shape[0] for weight in ready}
        if len(ready) == len(leaves) <= _MOST_WEIGHTS and len(groups) == 1:
            return vector_parts(x.packed, ready)
        # Leaves of any other kind run as they are.
        return torch.cat([leaf(x.plain) for leaf in leaves], -1)

    def gated(self, made: Tensor) -> Row:
        """Parts [splits, 2 f]."""
        return self.gated_halves(made[:, None])

    def gated_halves(self, made: Tensor) -> Row:
        """Parts [splits, rows, 2 f]."""
        return Row(*triton_decode.gated(made, self.dtype))

    def gated_by(self, made: Tensor, other: Tensor) -> Row:
        """Parts [splits, P], and other [1, 1, P]."""
        return Row(*triton_decode.gated_by(made, other.reshape(-1)))

    def heads(
        self,
        made: Tensor,
        span: Span,
        q_norm: RMSNorm,
        k_norm: RMSNorm | None,
        value_from_key: bool,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, KeysValues | None]:
        """Query heads [H, D], and the whole cache."""
        store = None if cache is None or k_norm is None else (cache.keys, cache.values)
        kv_heads = 0 if store is None else store[0].shape[1] * (1 if value_from_key else 2)
        assert span.positions is not None
        q = triton_decode.heads(
            made,
            q_norm.weight,
            None if k_norm is None else k_norm.weight,
            span.cos,
            span.sin,
            span.positions,
            store,
            made.shape[-1] // q_norm.weight.shape[0] - kv_heads,
            q_norm.eps,
            self.dtype,
            value_from_key,
        )
        return q, store

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: Span) -> Row:
        """Query heads [H, D] over what the cache holds up to the token."""
        assert span.positions is not None
        packed = empty_packed(1, queries.numel(), queries.device)
        mixed = triton_attention.decode_attention(queries, keys, values, span.positions, packed)
        return Row(mixed.view(1, -1), packed)

    def route(self, router: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """See Arithmetic; x [1, 1, d]."""
        own = cast(Any, router)
        if type(own.proj) is not nn.Linear:
            return super().route(router, x)
        weights, index = triton_router.route(
            x.view(-1),
            own.proj.weight,
            own.scale,
            own.per_expert_scale,
            own.eps,
            own.root,
            own.top_k,
        )
        return weights.view(1, 1, -1), index.view(1, 1, -1)

    def chosen(self, leaf: Any, x: Row, index: Tensor) -> Tensor:
        """One row for all experts index [1, k], or one each: parts [splits, k, N]."""
        weight = _int4(leaf, Int4ExpertLinear, x.plain)
        if weight is None:
            out: Tensor = leaf.chosen(x.plain.expand(index.numel(), -1)[None], index)
            return out
        return chosen_parts(x.packed, index.view(-1), weight, index.numel() // len(x.plain))

    def weighted(self, made: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Left to `both`."""
        return made, weights

    def both(
        self,
        dense: Tensor,
        mixed: tuple[Tensor, Tensor],
        dense_norm: RMSNorm,
        mixed_norm: RMSNorm,
    ) -> Tensor:
        """One part [1, d]."""
        made, weights = mixed
        return triton_decode.mixture(
            dense,
            made,
            weights.view(-1),
            dense_norm.weight,
            mixed_norm.weight,
            dense_norm.eps,
            self.dtype,
        )


def _int4(leaf: nn.Module, kind: type[nn.Module], x: Tensor) -> Weight | None:
    """The leaf's weight if it is of this very kind, and the kernels take it."""
    if type(leaf) is not kind or not takes(x, leaf.qdata, leaf.scale):  # type: ignore[arg-type]
        return None
    return cast(Weight, (leaf.qdata, leaf.scale, leaf.zero))
