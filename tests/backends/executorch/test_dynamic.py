"""Int4 layers on XNNPACK's int8 kernels: the split of the weight, and what comes of it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from g4tool.backends.executorch.dynamic import DynamicInt4Linear
from g4tool.backends.executorch.plain import make_plain
from g4tool.backends.executorch.verify import Tolerance, compare, eager, trace, walks
from g4tool.generate.tokenizer import Tokenizer
from g4tool.kernels.int4 import Int4Linear, dequantize_int4, pack_int4
from g4tool.model.text import TextModel
from g4tool.pipeline.artifact import Source
from g4tool.pipeline.store import Store
from g4tool.stages.build import build
from g4tool.stages.loading import load_folder
from g4tool.stages.proof import proof_ids
from tests.backends.executorch.conftest import WINDOW, recipe_of

GROUP, COLUMNS, ROWS = 32, 256, 96
KL = 1e-3
"""Nats a token that int8 activations may cost tiny-31b."""


def layer(zeros: float) -> Int4Linear:
    """Random int4 weights whose zero points lie around `zeros`."""
    torch.manual_seed(0)
    groups = COLUMNS // GROUP
    return Int4Linear(
        pack_int4(torch.randint(0, 16, (ROWS, COLUMNS))),
        (torch.rand(groups, ROWS) * 0.01 + 0.01).bfloat16(),
        (torch.rand(groups, ROWS) * 4 + zeros).bfloat16(),
    )


@pytest.mark.parametrize("zeros", [5.5, -3.0, 14.0])
def test_the_two_parts_are_the_weight(zeros: float) -> None:
    leaf = layer(zeros)
    split = DynamicInt4Linear(leaf)
    whole = split.linear.weight.dequantize()
    whole = whole + split.correction.repeat_interleave(GROUP, 1)
    exact = dequantize_int4(leaf.qdata, leaf.scale, leaf.zero, torch.float32)
    assert (whole - exact).abs().max() <= 1e-6


def test_xnnpack_keeps_the_zero_points(tmp_path: Path) -> None:
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.runtime import Runtime

    leaf = layer(14.0)
    model = nn.Sequential(leaf)
    make_plain(model, int8_activations=True)
    x = torch.randn(1, 7, COLUMNS)
    program = export(model, (x,), dynamic_shapes=({1: Dim("length", min=2, max=16)},), strict=True)
    dynamic = ConfigPrecisionType.DYNAMIC_QUANT
    manager = to_edge_transform_and_lower(
        program,
        partitioner=[
            XnnpackPartitioner(config_precisions=dynamic, per_op_mode=True),
            XnnpackPartitioner(),
        ],
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    ).to_executorch()
    path = tmp_path / "layer.pte"
    path.write_bytes(manager.buffer)
    method = Runtime.get().load_program(path).load_method("forward")
    assert method is not None
    found: Tensor = method.execute([x])[0]
    with torch.no_grad():
        exact = layer(14.0)(x)
    # Activations in 256 steps of their range; without zero points it would be off by whole units.
    assert (found - exact).abs().max() <= 0.02 * exact.abs().max()
    assert len(manager.buffer) < 2 * leaf.qdata.nbytes + 16_000


def test_a_model_with_int8_activations_stays_near_the_exact_one(tmp_path: Path) -> None:
    stage = build(recipe_of("tiny-31b")).export_cpu
    assert stage is not None
    assert not isinstance(stage.weights, Source)
    folder = Store(tmp_path / "home").ensure(stage.weights).path
    model, _ = load_folder(folder, torch.float32, "cpu")
    assert isinstance(model, TextModel)
    ids = proof_ids(Tokenizer(folder), WINDOW)
    places = walks(ids, WINDOW, 256, 96)[1:3]
    exact = [trace(eager(model, 256), walk) for walk in places]
    make_plain(model, int8_activations=True)
    found = compare("int8", exact, [trace(eager(model, 256), walk) for walk in places], Tolerance())
    assert found.kl is not None
    assert found.agree is not None
    assert 0 < found.kl < KL
    assert found.agree > 0.9
