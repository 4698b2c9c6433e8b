"""Whole checkpoints through the driver: files, account, lineage, and what breaks."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.names import hf_name
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.errors import G4Error
from g4tool.files import sha256, write_json
from g4tool.formats.bundle import fingerprint
from g4tool.kernels.int4 import dequantize_int4
from g4tool.model.config import LayerConfig, TextConfig
from g4tool.quantize import driver, solvers
from g4tool.quantize.account import (
    TensorAccount,
    bits_per_weight,
    check_account,
    check_error,
    from_json,
    lines,
    rows,
    to_json,
    totals,
)
from g4tool.quantize.bundle import bundle_config, bundle_index, bundle_side_files, lineage
from g4tool.quantize.driver import quantize_unit, units
from g4tool.quantize.options import QuantizeOptions, Rule, Scheme
from g4tool.quantize.policy import plan

Tiny = Callable[[str], Path]


def quantize(checkpoint: Checkpoint, folder: Path, options: QuantizeOptions) -> list[TensorAccount]:
    folder.mkdir(exist_ok=True)
    plans = plan(checkpoint, options)
    made = units(plans, options.layerwise)
    mark = fingerprint({"model": checkpoint.folder.name}, {})
    accounts = [
        a for u in made for a in quantize_unit(checkpoint, u, folder / u.file, fingerprint=mark)
    ]
    write_json(folder / "config.json", bundle_config(checkpoint, options, plans))
    if options.layerwise:
        write_json(folder / "model.safetensors.index.json", bundle_index(made))
    facts = lineage(
        checkpoint, accounts, source={}, recipe={}, versions={"torch": "2"}, fingerprint=mark
    )
    write_json(folder / "g4.json", facts)
    return accounts


def test_units_are_one_a_layer_and_one_for_the_rest(tiny: Tiny) -> None:
    plans = plan(open_checkpoint(tiny("tiny-e2b")), QuantizeOptions())
    made = units(plans)
    assert [u.label for u in made] == ["outside the layers", *(f"layer {i}" for i in range(5))]
    assert made[1].file == "model-00002-of-00006.safetensors"
    assert {item.name for u in made for item in u.tensors} == {item.name for item in plans}
    assert [u.file for u in units(plans, layerwise=False)] == ["model.safetensors"]


def test_fused_experts_are_quantized_expert_by_expert(moe_704: Checkpoint, tmp_path: Path) -> None:
    options = QuantizeOptions(group_size=128)
    accounts = {a.name: a for a in quantize(moe_704, tmp_path / "out", options)}
    name = "layers.1.experts.down_proj.weight"
    assert (accounts[name].scheme, accounts[name].group_size) == ("int4-hqq", 64)
    assert accounts[name].nbytes == 2 * 128 * (704 // 2 + 704 // 64 * 4)
    with SafetensorsFile(tmp_path / "out" / "model-00003-of-00003.safetensors") as file:
        stem = "model.layers.1.experts._down_proj_"
        parts = [file.read(stem + part) for part in ("qdata", "scale", "zero_point")]
    assert parts[0].shape == (2, 128, 352)
    assert parts[1].shape == (2, 11, 128)
    stored = dequantize_int4(*parts, torch.float32)
    source = moe_704.read(name).float()
    assert (stored - source).norm() / source.norm() == pytest.approx(
        accounts[name].rel_error, rel=1e-4
    )
    assert accounts[name].rel_error < 0.09


def test_bytes_and_account_do_not_depend_on_blocks(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny("tiny-26b-a4b"))
    options = QuantizeOptions(rules=(Rule(r"^embed_tokens", "int8"),))
    whole = quantize(checkpoint, tmp_path / "a", options)
    monkeypatch.setattr(driver, "_READ_BYTES", 40_000)
    monkeypatch.setattr(solvers, "_BLOCK_CPU", 5000)
    in_blocks = quantize(checkpoint, tmp_path / "b", options)
    assert in_blocks == whole
    for file in sorted((tmp_path / "a").iterdir()):
        assert sha256(file) == sha256(tmp_path / "b" / file.name), file.name


def test_layers_or_one_file_hold_the_same_values(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("tiny-31b"))
    options = QuantizeOptions(head="int4-hqq")
    quantize(checkpoint, tmp_path / "layers", options)
    quantize(checkpoint, tmp_path / "one", replace(options, layerwise=False))
    index = json.loads((tmp_path / "layers" / "model.safetensors.index.json").read_text())
    with SafetensorsFile(tmp_path / "one" / "model.safetensors") as one:
        assert set(index["weight_map"]) == set(one.tensors)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.tensors.values())
        for name, file in index["weight_map"].items():
            with SafetensorsFile(tmp_path / "layers" / file) as shard:
                assert torch.equal(shard.read(name), one.read(name)), name


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_names_file_and_tensor(tiny: Tiny, tmp_path: Path, value: float) -> None:
    folder = tmp_path / "source"
    shutil.copytree(tiny("tiny-31b"), folder)
    key = "layers.2.mlp.up_proj.weight"
    for shard in sorted(folder.glob("*.safetensors")):
        values = load_file(shard)
        name = next((n for n in values if n.endswith(key)), None)
        if name is not None:
            values[name][7, 3] = value
            save_file(values, shard, {"format": "pt"})
            break
    checkpoint = open_checkpoint(folder)
    unit = units(plan(checkpoint, QuantizeOptions()))[3]
    with pytest.raises(G4Error, match=rf"{shard.name}: .*{key}, rows 0 to .*, has NaN or infinity"):
        quantize_unit(checkpoint, unit, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("out*"))


def test_a_skipped_expert_tensor_fails_the_account(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("tiny-26b-a4b"))
    options = QuantizeOptions(rules=(Rule(r"layers\.2\.experts", "keep"),))
    accounts = quantize(checkpoint, tmp_path / "out", options)
    check_account(checkpoint, options, accounts)
    with pytest.raises(G4Error, match=r"layers\.2\.experts\.gate_up_proj\.weight is left in 16"):
        check_account(checkpoint, QuantizeOptions(), accounts)
    with pytest.raises(G4Error, match="is in the checkpoint but not in the bundle"):
        check_account(checkpoint, options, accounts[1:])


def test_account_adds_up_and_prints(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("tiny-31b"))
    accounts = quantize(checkpoint, tmp_path / "out", QuantizeOptions())
    on_disk = 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with SafetensorsFile(path) as file:
            on_disk += sum(info.nbytes for info in file.tensors.values())
    assert sum(t.nbytes for t in totals(accounts).values()) == on_disk
    assert sum(t.weights for t in totals(accounts).values()) == 2_805_312 + 6
    int4 = [a for a in accounts if a.scheme == "int4-hqq"]
    assert bits_per_weight(int4) == 5.0
    up_proj = next(row for row in rows(accounts) if row.kind == "mlp.up_proj")
    assert (up_proj.layers, up_proj.tensors, up_proj.group_size) == ("0-5", 6, 32)
    assert 0.06 < up_proj.mean_error <= up_proj.max_error < 0.08
    assert any(line.startswith("mlp.up_proj") and "0-5" in line for line in lines(accounts))
    assert from_json(json.loads(json.dumps(to_json(accounts)))) == accounts


def test_lineage_states_the_convention_and_nothing_of_the_machine(
    tiny: Tiny, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny("tiny-e2b"))
    quantize(checkpoint, tmp_path / "out", QuantizeOptions())
    text = (tmp_path / "out" / "g4.json").read_text()
    facts = json.loads(text)
    assert facts["int4"]["value"] == "(code - zero) * scale"
    assert {t["name"] for t in facts["tensors"]} == set(checkpoint.names)
    assert str(tmp_path) not in text
    assert str(checkpoint.folder) not in text


def test_side_files_are_all_but_weights_and_config(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(tiny("tiny-31b"), folder)
    names = ["processor_config.json", "NOTICE", "special_tokens_map.json", "preprocessor.x"]
    for name in [*names, "pytorch_model.bin", ".gitattributes"]:
        (folder / name).write_text("x")
    found = bundle_side_files(open_checkpoint(folder))
    assert set(names) | {"chat_template.jinja", "tokenizer.json"} <= set(found)
    assert not {"pytorch_model.bin", "config.json", "model.safetensors.index.json"} & set(found)


def test_transformers_refuses_the_bundle(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantize(open_checkpoint(tiny("tiny-31b")), tmp_path / "out", QuantizeOptions(head="int8"))
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("name", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_bundle_runs_near_its_source(tiny: Tiny, tmp_path: Path, name: str) -> None:
    from g4tool.checkpoint.load import load_text_model
    from g4tool.formats.load import load_bundle

    checkpoint = open_checkpoint(tiny(name))
    rules = (Rule("^embed_tokens", "int8"), Rule("proj", "int8", 32))
    quantize(checkpoint, tmp_path / "out", QuantizeOptions(rules=rules))
    ids = torch.arange(2, 22).view(1, -1)
    with torch.no_grad():
        expected = load_text_model(checkpoint, torch.float32, "cpu")(ids)
        result = load_bundle(tmp_path / "out", torch.float32)(ids)
    # 8 bit everywhere, amplified by random layers; unrelated logits would be 1.4 apart.
    assert (result - expected).norm() / expected.norm() < 0.4


def one_matrix(folder: Path, values: torch.Tensor) -> tuple[Checkpoint, str]:
    """A checkpoint of one layer whose up_proj holds `values` [256, 256] in fp32."""
    name = "layers.0.mlp.up_proj.weight"
    config = TextConfig(64, 256, 4, (LayerConfig("full", 64, 1, 256),), 8, 64)
    shapes = {hf_name(n, "model."): shape for n, shape in text_tensors(config).items()}
    tensors = {n: torch.ones(shape, dtype=torch.bfloat16) for n, shape in shapes.items()}
    tensors[f"model.{name}"] = values
    folder.mkdir()
    write_json(folder / "config.json", to_hf_config(config))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder), name


def normal() -> torch.Tensor:
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", ["int4-hqq", "int4-rtn", "int4-sym", "int8"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (normal() * 1e-42, r"does not hold its values.* \(relative error \d"),
        (normal().sign() * 3e38, r"rows 0 to 255, has values beyond 8\.5e\+37"),
        (normal().clamp(-3, 3) * 1e38, r"rows 0 to 255, has values beyond 8\.5e\+37"),
    ],
    ids=["subnormal", "largest", "large"],
)
def test_values_beyond_what_a_scale_holds_are_refused(
    tmp_path: Path, scheme: Scheme, values: torch.Tensor, message: str
) -> None:
    checkpoint, name = one_matrix(tmp_path / "source", values)
    with pytest.raises(G4Error, match=message) as error:
        quantize(checkpoint, tmp_path / "out", QuantizeOptions(scheme))
    assert name in str(error.value)
    assert not list((tmp_path / "out").glob("*-00002-of-*"))
    rule = re.search(r"scheme keep with a rule that matches '(.*)'\.$", str(error.value))
    assert rule
    kept = QuantizeOptions(scheme, rules=(Rule(rule[1], "keep"),))
    assert {a.name for a in quantize(checkpoint, tmp_path / "out", kept)} == set(checkpoint.names)


def outliers(size: float, both: bool) -> torch.Tensor:
    values = normal()
    values.view(-1, 128)[:, 5] = size
    if both:
        values.view(-1, 128)[:, 9] = -size
    return values


@pytest.mark.parametrize("scheme", ["int4-hqq", "int4-rtn", "int4-sym"])
@pytest.mark.parametrize(
    "values",
    [
        torch.distributions.StudentT(2.5).sample((256, 256)),
        outliers(20, both=False),
        outliers(2000, both=True),
        normal() * (normal().abs() > 2.5),
        normal() * 1e-38,
        normal() * 1e36,
    ],
    ids=["student", "outliers", "opposite outliers", "sparse", "small", "large"],
)
def test_heavy_tails_are_quantized(tmp_path: Path, scheme: Scheme, values: torch.Tensor) -> None:
    checkpoint, name = one_matrix(tmp_path / "source", values)
    accounts = quantize(checkpoint, tmp_path / "out", QuantizeOptions(scheme, 128))
    assert next(a for a in accounts if a.name == name).rel_error < 0.54


@pytest.mark.parametrize("error", [0.66, float("inf"), float("nan")])
def test_an_error_that_no_rounding_explains_is_refused(error: float) -> None:
    account = TensorAccount("a.weight", "a.weight", "int8", 32, None, (1, 32), 36, error, "")
    with pytest.raises(G4Error, match=r"^a\.weight: int8 does not hold.*'a\\\.weight'\.$"):
        check_error(account)
    check_error(replace(account, rel_error=0.64))


def test_a_shard_of_another_bundle_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """A fine-tune has the names, shapes and sizes of its base model."""
    from g4tool.formats.load import load_bundle

    fine_tune = tmp_path / "tuned"
    shutil.copytree(tiny("tiny-31b"), fine_tune)
    quantize(open_checkpoint(tiny("tiny-31b")), tmp_path / "a", QuantizeOptions())
    quantize(open_checkpoint(fine_tune), tmp_path / "b", QuantizeOptions())
    load_bundle(tmp_path / "a")
    shard = "model-00003-of-00007.safetensors"
    shutil.copy(tmp_path / "b" / shard, tmp_path / "a" / shard)
    with pytest.raises(G4Error, match=rf"a/{shard} belongs to another bundle than the g4\.json"):
        load_bundle(tmp_path / "a")
