"""What ExecuTorch gets wrong without a word is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    MappingType,
    quantize_,
)
from torchao.quantization.granularity import PerGroup
from torchao.utils import unwrap_tensor_subclass

from g4tool.backends.executorch.check import (
    check_kernels,
    check_quantized,
    check_remainders,
    missing_kernels,
)
from g4tool.backends.executorch.xnnpack import check_sampling
from g4tool.errors import G4Error, UsageError

WINDOW = 8
Quantized = Callable[[object], ExportedProgram]


class Slots(nn.Module):
    """Ring slots of the positions before `start`, `shift` windows further on."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, start: Tensor) -> Tensor:
        return (start + self.shift * WINDOW - torch.arange(1, WINDOW + 1)) % WINDOW


def slots(shift: int) -> ExportedProgram:
    return export(Slots(shift), (torch.tensor(3),), strict=True)


def test_a_remainder_of_what_may_be_negative_is_refused() -> None:
    with pytest.raises(G4Error, match=r"prefill: remainder.* may be negative"):
        check_remainders("prefill", slots(0), 64)


def test_a_remainder_of_what_is_not_negative_passes() -> None:
    check_remainders("prefill", slots(1), 64)


def test_operators_without_kernel_are_named() -> None:
    kernels = {"aten::add.out"}
    own = ["executorch_prim::et_view.default", "aten::sym_size.int"]
    assert missing_kernels(["aten::add.out", *own], kernels) == []
    with pytest.raises(G4Error, match=r"decode: .* aten::cumsum.out, aten::sort.values"):
        check_kernels("decode", ["aten::sort.values", "aten::cumsum.out", "aten::add.out"], kernels)


def test_sampling_is_refused_by_the_operator_that_the_runtime_lacks() -> None:
    with pytest.raises(UsageError, match=r"--sampling: .*aten::sort"):
        check_sampling()


@pytest.fixture(params=["wrapped", "unwrapped"])
def quantized(request: pytest.FixtureRequest) -> Quantized:
    """Exports a linear layer quantized by torchao, its weight as one tensor or as its parts."""

    def make(config: object) -> ExportedProgram:
        return _quantized(config, request.param == "unwrapped")

    return make


def _quantized(config: object, unwrap: bool) -> ExportedProgram:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).eval()
    quantize_(model, config)
    if unwrap:
        unwrap_tensor_subclass(model)
    return export(model, (torch.randn(3, 64),), strict=True)


def test_weight_only_quantization_is_refused(quantized: Quantized) -> None:
    program = quantized(IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
    with pytest.raises(G4Error, match="what it is multiplied with is not"):
        check_quantized("prefill", program)


def test_weights_with_zero_points_are_refused(quantized: Quantized) -> None:
    program = quantized(
        Int8DynamicActivationIntxWeightConfig(
            torch.int4, PerGroup(32), weight_mapping_type=MappingType.ASYMMETRIC
        )
    )
    with pytest.raises(G4Error, match="zero points, which XNNPACK ignores"):
        check_quantized("prefill", program)


def test_symmetric_weights_beside_int8_activations_pass(quantized: Quantized) -> None:
    program = quantized(Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
    assert any("dequantize_affine" in str(node.target) for node in program.graph.nodes)
    check_quantized("prefill", program)
