"""Tiles of the Triton kernels for one row, by shape: a rule that needs no measuring."""

from functools import lru_cache

_PROGRAMS = 600
"""Enough for every multiprocessor to have several at once (132 of them on an H200)."""

_MOST_SPLITS = 8


@lru_cache
def vector_tile(count: int, columns: int, chunk: int = 32) -> dict[str, int]:
    """Launch constants of the one-row kernels for `count` rows of `columns` columns.

    A tile is ROWS rows by ACROSS chunks, what one thread loads at once. Few rows are split over the
    columns until there are enough programs. A last, partly filled tile runs over by less than one
    row of packed activations, which the kernels count on.
    """
    chunks = columns // chunk
    across = 8
    while across >= 2 * chunks:
        across //= 2
    rows = 64 if count >= 64 * _PROGRAMS else 32
    blocks = -(-count // rows)
    splits = 1
    while (
        blocks * splits < _PROGRAMS
        and splits < _MOST_SPLITS
        and chunks // (across * splits * 2) >= 2
    ):
        splits *= 2
    return {"ROWS": rows, "ACROSS": across, "SPLITS": splits, "STAGES": 3, "num_warps": 2}
