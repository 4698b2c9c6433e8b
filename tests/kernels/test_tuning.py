"""The tiles of the one-row kernels at the shapes of all variants."""

from g4tool.kernels.tuning import vector_tile
from g4tool.model.config import TextConfig
from g4tool.model.variants import VARIANTS


def columns_of(config: TextConfig) -> set[int]:
    """The columns of every weight of a variant."""
    found = {config.hidden_size, config.per_layer_dim or config.hidden_size}
    for layer in config.layers:
        found |= {layer.intermediate_size, config.num_heads * layer.head_dim}
    return found | ({config.moe.intermediate_size} if config.moe else set())


COLUMNS = sorted(set().union(*map(columns_of, VARIANTS.values())))


def test_tiles_run_over_by_less_than_a_packed_row() -> None:
    for chunk in (16, 32):
        for columns in {chunk * n for n in range(1, 80)} | set(COLUMNS):
            for count in (1, 2000, 2**18):
                tile = vector_tile(count, columns, chunk)
                turns = -(-columns // chunk // tile["ACROSS"])
                covered = -(-turns // tile["SPLITS"]) * tile["SPLITS"] * tile["ACROSS"]
                assert columns // chunk <= covered <= 2 * (columns // chunk)
