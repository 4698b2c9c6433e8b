"""What `g4 bench` counts, against counts made by hand; and that its figures fit together."""

from pathlib import Path

import pytest
import torch

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import write_tiny
from g4tool.errors import UsageError
from g4tool.evaluate.bench import Limits, Speed, Work, count_work, measure_speed, shares
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS


def test_a_token_of_31b_reads_what_the_published_sizes_say() -> None:
    with torch.device("meta"):
        model = TextModel(VARIANTS["31b"]).to(torch.bfloat16)
    none = count_work(model, 0)
    weights = sum(p.numel() for p in model.parameters())
    # All of it, the tied table once, and the 60 layer scalars, which are buffers.
    assert none.decode_bytes == 2 * weights + 2 * 60
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert none.operations == 2 * matrices
    # 50 layers of 16 heads of 256 and a window of 1024, 10 of 4 heads of 512.
    context = 32768
    cache = 2 * 2 * (50 * 1024 * 16 * 256 + 10 * context * 4 * 512)
    assert count_work(model, context).decode_bytes == none.decode_bytes + cache


def test_experts_count_by_those_chosen_and_tables_by_a_row() -> None:
    with torch.device("meta"):
        model = TextModel(VARIANTS["26b-a4b"]).to(torch.bfloat16)
        small = TextModel(VARIANTS["e2b"]).to(torch.bfloat16)
    experts = 30 * 128 * 3 * 704 * 2816
    rest = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2)
    assert count_work(model, 0).operations == 2 * (experts * 8 // 128 + rest)
    table = 262144 * 35 * 256
    everything = sum(p.numel() for p in small.parameters())
    assert count_work(small, 0).decode_bytes == 2 * (everything - table + 35 * 256) + 2 * 35


def test_shares_are_rates_times_work_over_limits() -> None:
    found = shares(Speed(1000.0, 50.0), Work(10**9, 2 * 10**9), Limits(1e11, 1e13))
    assert found["prefill_of_matmul_rate"] == 0.2
    assert found["decode_of_read_bandwidth"] == 0.5


def test_speed_needs_room(tmp_path: Path) -> None:
    write_tiny("tiny-e2b", tmp_path / "m")
    model = load_text_model(open_checkpoint(tmp_path / "m"), torch.float32)
    speed = measure_speed(model, 16, 4, 1)
    assert speed.prefill > 0
    assert speed.decode > 0
    with pytest.raises(UsageError, match="has room for"):
        measure_speed(model, model.config.max_position_embeddings, 1, 1)
