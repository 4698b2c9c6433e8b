import pytest

from g4tool.recipe.check import check
from g4tool.recipe.document import RecipeError, parse
from g4tool.recipe.model import Recipe


def load(text: str) -> Recipe:
    return check(parse(text, "g4.yaml"))


def mistakes(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(text)
    return str(caught.value).split("\n")


HEAD = "name: x\nmodel: m\n"


def test_the_smallest_recipe_and_its_defaults() -> None:
    recipe = load(HEAD)
    assert (recipe.name, recipe.model, recipe.revision) == ("x", "m", "main")
    assert (recipe.convert.materialize, recipe.convert.dtype) == (False, None)
    absent = (recipe.export_cuda, recipe.export_cpu, recipe.compile_neuron, recipe.upload)
    assert (recipe.quantize, *absent) == (None,) * 5


def test_an_empty_section_asks_for_its_stage_with_defaults() -> None:
    recipe = load(
        HEAD + "quantize:\nexport-cuda: {}\nexport-cpu: {max_seq_len: 512}\ncompile-neuron:\n"
    )
    assert recipe.quantize
    quantize = recipe.quantize
    assert (quantize.scheme, quantize.group_size, quantize.solver) == ("int4-hqq", 32, None)
    assert (quantize.layerwise, quantize.head, quantize.rules) == (True, "tied", [])
    assert recipe.export_cuda
    assert (recipe.export_cuda.max_seq_len, recipe.export_cuda.prefill_chunk) == (4096, 1024)
    assert recipe.export_cpu
    assert (recipe.export_cpu.int8_activations, recipe.export_cpu.prefill_chunk) == (False, 512)
    assert recipe.compile_neuron
    neuron = recipe.compile_neuron
    assert (neuron.tp, neuron.batch, neuron.seq_len, neuron.target) == (4, 1, 2048, "trn2")


def test_all_mistakes_of_a_file_at_once_in_the_order_of_its_keys() -> None:
    text = """\
name: x
quantize:
  grup_size: 3
  scheme: int4-hq
  layerwise: 1
  rules:
    - {match: '(', scheme: keep}
    - mach: a
  rules: []
  group_size: 48
convrt: {}
"""
    assert mistakes(text) == [
        "g4.yaml: model: this key is needed",
        "g4.yaml:3: quantize.grup_size: unknown key; did you mean group_size?",
        "g4.yaml:4: quantize.scheme: 'int4-hq' is not one of int4-hqq, int4-rtn, int4-sym, int8, "
        "keep; did you mean int4-hqq?",
        "g4.yaml:5: quantize.layerwise: wants true or false, not 1",
        "g4.yaml:9: quantize.rules: this key is set twice",
        "g4.yaml:7: quantize.rules.0.match: not a valid regular expression: missing ), "
        "unterminated subpattern at position 0",
        "g4.yaml:8: quantize.rules.1.match: this key is needed",
        "g4.yaml:8: quantize.rules.1.scheme: this key is needed",
        "g4.yaml:8: quantize.rules.1.mach: unknown key; did you mean match?",
        "g4.yaml:10: quantize.group_size: 48 is not one of 32, 64, 128",
        "g4.yaml:11: convrt: unknown key; did you mean convert?",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "foo: 1",
            "foo: unknown key; known: compile-neuron, convert, export-cpu, export-cuda, model, "
            "name, quantize, revision, upload",
        ),
        ("export_cuda: {}", "export_cuda: unknown key; did you mean export-cuda?"),
        ("revision: 1234567", "revision: wants text, not 1234567; put quotes around it"),
        ("revision:", "revision: wants text, not nothing"),
        ("quantize: [1]", "quantize: wants a mapping of keys, not a list"),
        ("quantize: {rules: {}}", "quantize.rules: wants a list, not a mapping"),
        ("quantize: {rules: [keep]}", "quantize.rules.0: wants a mapping of keys, not 'keep'"),
        (
            "quantize: {group_size: '32'}",
            "quantize.group_size: '32' is not one of 32, 64, 128; did you mean 32?",
        ),
        ("quantize: {solver: als}", "quantize.solver: 'als' is not one of hqq, rtn, reference"),
        (
            "quantize: {rules: [{match: a, scheme: int4-rtn, group_size: 256}]}",
            "quantize.rules.0: a 4-bit scheme has groups of 32, 64 or 128, not 256",
        ),
        (
            "quantize: {rules: [{match: a, scheme: keep, group_size: 32}]}",
            "quantize.rules.0: scheme keep takes neither group_size nor solver",
        ),
        (
            "quantize: {rules: [{match: a, scheme: int8, solver: hqq}]}",
            "quantize.rules.0: scheme int8 takes no solver",
        ),
        (
            "quantize: {rules: [{match: '', scheme: keep}]}",
            "quantize.rules.0.match: must not be empty",
        ),
        (
            "convert: {dtype: float32}",
            "convert: dtype needs materialize: true, an index cannot change the numbers",
        ),
        (
            "export-cpu: {max_seq_len: 128, prefill_chunk: 1024}",
            "export-cpu: prefill_chunk 1024 is longer than max_seq_len 128",
        ),
        ("export-cpu: {max_seq_len: 0}", "export-cpu.max_seq_len: 0 is not greater than 0"),
        ("compile-neuron: {tp: 1.5}", "compile-neuron.tp: wants a whole number, not 1.5"),
        ("compile-neuron: {tp: true}", "compile-neuron.tp: wants a whole number, not true"),
        ("upload: {repo: mine}", "upload.repo: 'mine' is not of the form owner/name"),
        ("upload: {}", "upload.repo: this key is needed"),
    ],
)
def test_one_mistake(line: str, message: str) -> None:
    assert mistakes(HEAD + line) == [f"g4.yaml:3: {message}"]


def test_a_name_is_a_word() -> None:
    assert mistakes("name: a/b\nmodel: m") == [
        "g4.yaml:1: name: 'a/b' is not of the form letters, digits, dots, hyphens"
    ]


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ("a{99999999999}", "the repetition number is too large"),
        ("(" * 3000 + ")" * 3000, "nested too deeply"),
    ],
)
def test_expressions_that_pythons_compiler_gives_up_on(match: str, said: str) -> None:
    text = HEAD + f"quantize: {{rules: [{{match: '{match}', scheme: int8}}]}}\n"
    assert mistakes(text) == [
        f"g4.yaml:3: quantize.rules.0.match: not a valid regular expression: {said}"
    ]


def test_a_number_too_long_to_be_written_out() -> None:
    assert mistakes(HEAD + f"revision: 0x{'f' * 9999}\n") == [
        "g4.yaml:3: revision: wants text, not a huge number; put quotes around it"
    ]
    (said,) = mistakes(HEAD + f"quantize: {{group_size: 0x{'f' * 9999}}}\n")
    assert said.startswith("g4.yaml:3: quantize.group_size: a huge number")
