"""One bad program a rule, in StableHLO text; and programs that no rule has a word against."""

import pytest
import torch

from g4tool.backends.neuron.graph import Graph, TensorType, parse_tensor, read_stablehlo
from g4tool.backends.neuron.graph_rules import RULES, check_graph
from g4tool.backends.neuron.stablehlo import rank_graph
from g4tool.checkpoint.tiny import TINY

_GOOD = "%1 = stablehlo.add %a, %b : tensor<4x8xbf16>"
_ADD = '({ ^bb0(%x: tensor<{t}>, %y: tensor<{t}>): %z = "stablehlo.add"(%x, %y) : (tensor<{t}>, tensor<{t}>) -> tensor<{t}> "stablehlo.return"(%z) : (tensor<{t}>) -> () })'  # noqa: E501


def _adding(dtype: str) -> str:
    return _ADD.replace("{t}", dtype)


_WINDOW = (
    f'%1 = "stablehlo.reduce_window"(%a, %b) {_adding("f32")} '
    "{window_dimensions = array<i64: 2, 2>, %s} : (tensor<4x4xf32>, tensor<f32>) -> tensor<3x3xf32>"
)
_CONVOLUTION = (
    "%1 = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], "
    "window = {{{}}} {{batch_group_count = 1 : i64}} : "
    "(tensor<1x4x4x1xf32>, tensor<3x3x1x1xf32>) -> tensor<1x9x9x1xf32>"
)
_REDUCE = (
    '%1 = "stablehlo.OP"(%a) '
    + _adding("i32")
    + " {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8xi32>) -> tensor<8xi32>"
)
_IOTA = "%0 = stablehlo.iota dim = 0 : tensor<10xi32>\n%5 = stablehlo.reshape %0 : (tensor<10xi32>) -> tensor<10x1xi32>\n"  # noqa: E501

BAD = {
    "EMOD025": "%1 = stablehlo.add %a, %b : tensor<?x8xbf16>",
    "EVRF004": "%1 = stablehlo.add %a, %b : tensor<4xcomplex<f32>>",
    "EVRF005": "%1 = stablehlo.convert %a : (tensor<4xf32>) -> tensor<4xf8E4M3FNUZ>",
    "EVRF051": "%1 = stablehlo.convert %a : (tensor<4xf32>) -> tensor<4xf8E4M3FN>",
    "EVRF006": "%s, %1 = stablehlo.rng_bit_generator %a, algorithm = PHILOX : "
    "(tensor<2xui32>) -> (tensor<2xui32>, tensor<4xui32>)",
    "EVRF013": "%1:2 = chlo.top_k(%a, k = 5) : tensor<8xi32> -> (tensor<5xi32>, tensor<5xi32>)",
    "EHCA005": "%1 = stablehlo.custom_call @Mystery(%a) : (tensor<4xf32>) -> tensor<4xf32>",
    "EVRF016": f'%1 = "stablehlo.scatter"(%a, %b, %c) {_adding("i32")} {{unique_indices = true}} : '
    "(tensor<8xi32>, tensor<2x1xi32>, tensor<2xi32>) -> tensor<8xi32>",
    "EVRF017": _WINDOW.replace("%s", "base_dilations = array<i64: 1, 2>"),
    "EVRF018": _WINDOW.replace("%s", "window_dilations = array<i64: 2, 1>"),
    "EVRF019": f'%1:2 = "stablehlo.reduce_window"(%a, %b, %c, %d) {_adding("f32")} '
    "{window_dimensions = array<i64: 2>} : (tensor<4xf32>, tensor<4xf32>, tensor<f32>, tensor<f32>)"
    " -> (tensor<3xf32>, tensor<3xf32>)",
    "EVRF035": "%1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : "
    "(tensor<4x8xi32>, tensor<8x4xi32>) -> tensor<4x4xi32>",
    "EVRF061": _REDUCE.replace("OP", "all_reduce"),
    "EVRF063": _REDUCE.replace("OP", "reduce_scatter"),
    "EVRF062": "%1 = stablehlo.power %a, %b : tensor<4xi64>",
    "ESFH002": "%1 = stablehlo.constant dense<5000000000> : tensor<ui64>",
    "EVRF056": _IOTA
    + '%1 = "stablehlo.gather"(%a, %5) {dimension_numbers = #stablehlo.gather<offset_dims = [1], '
    "collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, "
    "slice_sizes = array<i64: 1, 4>} : (tensor<3x4xf32>, tensor<10x1xi32>) -> tensor<10x4xf32>",
    "EVRF031": _IOTA
    + f'%1 = "stablehlo.scatter"(%a, %5, %c) {_adding("f32")} {{scatter_dimension_numbers = '
    "#stablehlo.scatter<update_window_dims = [1], inserted_window_dims = [0], "
    "scatter_dims_to_operand_dims = [0], index_vector_dim = 1>} : "
    "(tensor<3x4xf32>, tensor<10x1xi32>, tensor<10x4xf32>) -> tensor<3x4xf32>",
    "EVRF010": _CONVOLUTION.format("lhs_dilate = [2, 2], rhs_dilate = [2, 2]"),
    "EVRF011": _CONVOLUTION.format("stride = [2, 2], lhs_dilate = [2, 2]"),
    "EBIR023": "%1 = stablehlo.custom_call @AwsNeuronCustomNativeKernel(%a, %b) {backend_config = "
    '"mlp_fused"} : (tensor<1x64xbf16>, tensor<64x5376xbf16>) -> tensor<1x64xbf16>',
    "EUOC002": '%1 = "stablehlo.triangular_solve"(%a, %b) {left_side = true} : '
    "(tensor<4x4xf32>, tensor<4x1xf32>) -> tensor<4x1xf32>",
}


@pytest.mark.parametrize("code", BAD)
def test_each_rule_finds_its_own_fault_and_no_other(code: str) -> None:
    found = check_graph(read_stablehlo("bad", f"{_GOOD}\n{BAD[code]}"), "trn2")
    assert [each.code for each in found] == [f"NCC_{code}"]
    assert found[0].level == "error"
    assert found[0].where.startswith("bad: %")


def test_every_rule_has_its_bad_program() -> None:
    assert {rule.code for rule in RULES} == {*BAD, "EBVF030"}


def test_very_large_programs_are_a_warning() -> None:
    (op,) = read_stablehlo("one", _GOOD).ops
    (found,) = check_graph(Graph("large", (op,) * 100_001), "trn2")
    assert (found.code, found.level) == ("NCC_EBVF030", "warning")


@pytest.mark.parametrize(
    ("code", "target"), [("EVRF051", "trn3"), ("EVRF035", "trn1"), ("EVRF035", "inf2")]
)
def test_rules_of_some_chips_leave_others_alone(code: str, target: str) -> None:
    assert check_graph(read_stablehlo("good there", BAD[code]), target) == []


def test_a_64_bit_product_is_wrong_on_every_chip() -> None:
    text = BAD["EVRF035"].replace("i32", "i64")
    assert [f.code for f in check_graph(read_stablehlo("g", text), "trn1")] == ["NCC_EVRF035"]


@pytest.mark.parametrize(
    "text",
    [
        _GOOD,
        BAD["EVRF016"].replace("i32>", "f32>").replace("tensor<2x1xf32>", "tensor<2x1xi32>"),
        BAD["EVRF061"].replace("xi32", "xbf16").replace("<i32", "<bf16"),
        BAD["EVRF056"].replace("3x4xf32", "10x4xf32"),
        _CONVOLUTION.format("stride = [2, 2], rhs_dilate = [2, 2]"),
        "%1 = stablehlo.custom_call @AwsNeuronRmsNorm(%a) : (tensor<4xf32>) -> tensor<4xf32>",
        "%1 = stablehlo.constant dense<5> : tensor<ui64>",
    ],
)
def test_what_is_allowed(text: str) -> None:
    assert check_graph(read_stablehlo("good", text), "trn2") == []


def test_types() -> None:
    assert parse_tensor("1x?x128xbf16") == TensorType("bf16", (1, None, 128))
    assert parse_tensor("4xcomplex<f32>") == TensorType("complex<f32>", (4,))
    assert parse_tensor("f32") == TensorType("f32", ())


@pytest.mark.parametrize(("name", "tokens"), [("tiny-e2b", 1), ("tiny-26b-a4b", 64)])
def test_the_models_own_programs_have_no_errors(name: str, tokens: int) -> None:
    torch.set_num_threads(1)
    settings = {"tp_degree": 2, "batch_size": 1, "seq_len": 64, "torch_dtype": "bfloat16"}
    text = rank_graph(TINY[name], settings, tokens).text
    graph = read_stablehlo(name, text)
    assert len(graph.ops) > 300
    assert [f for f in check_graph(graph, "trn2") if f.level == "error"] == []
