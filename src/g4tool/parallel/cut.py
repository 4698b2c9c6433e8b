"""Cuts the tensors of a weight for a rank, and puts ranks' pieces together again.

A plain weight is one tensor, `weight`; an int4 or int8 one is several (see g4tool.kernels.int4 and
int8), of which each is cut where it belongs to the same rows or groups of columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from g4tool.checkpoint.tensorfile import row_blocks
from g4tool.errors import G4Error
from g4tool.parallel.plan import Layout, Runs, Split

ReadRows = Callable[[int, int], Tensor]
"""Rows start to stop of dimension 0 of one tensor."""


def part_cut(split: Split, layout: Layout, part: str) -> tuple[int | None, int]:
    """The axis along which a part of a weight is cut, and how many columns or rows one step is.

    The axis is None for a part that every rank has whole: a single scale a row serves any columns.
    """
    axis = split.axis
    if axis is None or layout.kind == "plain" or part == "qdata":
        return axis, 2 if axis == -1 and layout.kind == "int4" else 1
    assert layout.group is not None
    # The scales of int4 lie transposed: [groups, rows].
    turned = layout.kind == "int4"
    if axis == -2:
        return (-1 if turned else -2), 1
    if layout.group >= split.shape[-1]:
        return None, 1
    return (-2 if turned else -1), layout.group


def rank_part_shape(
    split: Split, layout: Layout, part: str, shape: Sequence[int], rank: int
) -> tuple[int, ...]:
    """Shape of what `rank` holds of a part of this whole shape."""
    axis, step = part_cut(split, layout, part)
    sizes = list(shape)
    if axis is not None:
        sizes[axis] = sum(stop - start for start, stop in _steps(split.runs[rank], step))
    return tuple(sizes)


def cut(split: Split, layout: Layout, part: str, whole: Tensor, rank: int) -> Tensor:
    """What `rank` holds of a whole part, in fresh memory."""
    axis, step = part_cut(split, layout, part)
    if axis is None:
        return whole.clone()
    runs = _steps(split.runs[rank], step)
    return torch.cat([whole.narrow(axis, start, stop - start) for start, stop in runs], axis)


def cut_blocks(
    split: Split, layout: Layout, part: str, shape: Sequence[int], nbytes: int, rank: int
) -> list[tuple[int, int, int]]:
    """How to read a rank's part in row blocks of bounded size: (start, stop, place).

    Rows start:stop of the whole part, once `cut_rows` has cut their columns, are rows of the rank's
    part from `place` on. `nbytes` is the whole part's size.
    """
    rows = shape[0] if shape else 1
    axis, step = part_cut(split, layout, part)
    by_rows = axis is not None and len(shape) + axis == 0
    runs = _steps(split.runs[rank], step) if by_rows else ((0, rows),)
    blocks: list[tuple[int, int, int]] = []
    place = 0
    for start, stop in runs:
        for low, high in row_blocks(stop - start, nbytes // max(1, rows)):
            blocks.append((start + low, start + high, place))
            place += high - low
    return blocks


def cut_rows(split: Split, layout: Layout, part: str, rows: Tensor, rank: int) -> Tensor:
    """A block of rows of a part with the columns that `rank` holds."""
    axis, _ = part_cut(split, layout, part)
    if axis is None or rows.dim() + axis == 0:
        return rows
    return cut(split, layout, part, rows, rank)


def read_rank_part(
    split: Split,
    layout: Layout,
    part: str,
    shape: Sequence[int],
    nbytes: int,
    rank: int,
    read: ReadRows,
) -> Tensor:
    """What `rank` holds of a part that `read` gives the rows of; no more of it is in memory."""
    out: Tensor | None = None
    for start, stop, place in cut_blocks(split, layout, part, shape, nbytes, rank):
        block = cut_rows(split, layout, part, read(start, stop), rank)
        if not block.dim():
            return block
        if out is None:
            whole = rank_part_shape(split, layout, part, shape, rank)
            out = block.new_empty(whole)
        out[place : place + block.shape[0]] = block
    assert out is not None, "no tensor of a model is empty"
    return out


def join(split: Split, layout: Layout, part: str, pieces: Sequence[Tensor]) -> Tensor:
    """The whole part of all ranks' pieces. Raises G4Error where ranks' copies differ."""
    axis, step = part_cut(split, layout, part)
    if axis is None:
        for rank, piece in enumerate(pieces):
            _check_same(split, part, rank, pieces[0], piece)
        return pieces[0]
    size = max(stop for runs in split.runs for _, stop in _steps(runs, step))
    shape = list(pieces[0].shape)
    shape[axis] = size
    whole = pieces[0].new_empty(shape)
    filled = torch.zeros(size, dtype=torch.bool)
    for rank, piece in enumerate(pieces):
        place = 0
        for start, stop in _steps(split.runs[rank], step):
            taken = piece.narrow(axis, place, stop - start)
            target = whole.narrow(axis, start, stop - start)
            if filled[start:stop].all():
                _check_same(split, part, rank, target, taken)
            target.copy_(taken)
            filled[start:stop] = True
            place += stop - start
    if not filled.all():
        raise G4Error(f"{split.name}: the ranks' pieces leave a gap in {part}.")
    return whole


def _steps(runs: Runs, step: int) -> Runs:
    return tuple((start // step, stop // step) for start, stop in runs)


def _check_same(split: Split, part: str, rank: int, first: Tensor, other: Tensor) -> None:
    if not torch.equal(first, other):
        raise G4Error(
            f"{split.name}: rank {rank}'s copy of {part} differs from another rank's; the shards "
            "are of different models."
        )
