"""Int4 products of one row as operators that compile into ExecuTorch's CUDA programs.

The kernels of g4tool.kernels.triton_int4 read words of four bytes. A view of the bytes as words is
an operator that ExecuTorch's CUDA runtime lacks, so here pointers are cast inside the kernels.
"""

# Triton's functions have no types, and names of constants in capitals.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from g4tool.kernels.triton_int4 import (
    _vector,
    _vector_chosen,
    launchable,
    pack_rows,
    packed_stride,
    sum_splits,
)
from g4tool.kernels.tuning import vector_tile


@triton.jit
def _row(
    packed, out, qdata, scale, zero, count, columns: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    words = qdata.to(tl.pointer_type(tl.int32))
    _vector(
        packed, out, words, scale, zero, count, words, scale, zero, 0, words, scale, zero, 0,
        columns, GROUP, ROWS, ACROSS, SPLITS, STAGES,
    )  # fmt: skip


@triton.jit
def _chosen(
    packed, out, index, qdata, scale, zero, count, columns: tl.constexpr, stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    _vector_chosen(
        packed, out, index, qdata.to(tl.pointer_type(tl.int32)), scale, zero, count, columns,
        stride, 1, GROUP, ROWS, ACROSS, SPLITS, STAGES,
    )  # fmt: skip


@triton_op("g4::export_int4_row", mutates_args=())
def int4_row(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [..., K] of one row @ w.T -> [..., N] in the dtype of x."""
    count, columns = qdata.shape[0], x.shape[-1]
    packed = pack_rows(x.reshape(1, -1))
    tile = vector_tile(count, columns)
    parts = packed.new_empty((tile["SPLITS"], count))
    launchable(_row)[(triton.cdiv(count, tile["ROWS"]), tile["SPLITS"])](
        packed, parts, qdata, scale, zero, count, columns, GROUP=columns // scale.shape[0], **tile
    )
    return sum_splits(parts, x.dtype).view(*x.shape[:-1], count)


@triton_op("g4::export_int4_chosen", mutates_args=())
def int4_chosen(x: Tensor, index: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [rows, k, K] through expert index [rows, k] of each -> [rows, k, N]."""
    count, columns, slots = qdata.shape[1], x.shape[-1], index.numel()
    packed = pack_rows(x.reshape(-1, columns))
    tile = vector_tile(count * slots, columns)
    parts = packed.new_empty((tile["SPLITS"], slots, count))
    launchable(_chosen)[(triton.cdiv(count, tile["ROWS"]), tile["SPLITS"], slots)](
        packed, parts, index.reshape(-1), qdata, scale, zero, count, columns,
        packed_stride(columns), GROUP=columns // scale.shape[1], **tile,
    )  # fmt: skip
    return sum_splits(parts, x.dtype).view(*index.shape, count)
