"""The model card: what the Hub reads of it, what a person reads, and nothing made up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from g4tool.errors import G4Error
from g4tool.hub.card import CardFacts, Folder, base_metadata, card
from g4tool.quantize.account import TensorAccount

BASE = """---
license: other
license_name: some-terms
license_link: https://example.org/terms
language: [en, de]
library_name: transformers
pipeline_tag: image-text-to-text
extra_gated_heading: Accept
---
# Base
"""


def _account(name: str, scheme: str, error: float) -> TensorAccount:
    return TensorAccount(name, name, scheme, 32, "hqq", (64, 64), 2304, error, "the default")


FACTS = CardFacts(
    repo="someone/Gemma4-31B-HQQ-INT4",
    layout="torchao",
    base="google/gemma-4-31B-it",
    commit="c" * 40,
    metadata=yaml.safe_load(BASE.split("---")[1]),
    lineage={
        "recipe": {"scheme": "int4-hqq", "group_size": 32, "rules": [{}, {}]},
        "bits_per_weight": 4.5,
        "versions": {"torch": "2.13.0", "g4": "0.1.0"},
    },
    accounts=[
        _account("layers.0.mlp.up_proj.weight", "int4-hqq", 0.07),
        _account("layers.1.mlp.up_proj.weight", "int4-hqq", 0.09),
        _account("norm.weight", "keep", 0.0),
    ],
    nbytes=20_900_000_000,
    experts=False,
)


def _front(text: str) -> dict[str, Any]:
    found: dict[str, Any] = ModelCard(text).data.to_dict()
    return found


def test_the_hub_reads_what_it_is_made_of() -> None:
    front = _front(card(FACTS))
    assert front["base_model"] == "google/gemma-4-31B-it"
    assert front["base_model_relation"] == "quantized"
    assert front["license"] == "other"
    assert front["license_name"] == "some-terms"
    assert front["license_link"] == "https://example.org/terms"
    assert front["language"] == ["en", "de"]
    # Not the base's: nothing but g4 loads this one.
    assert front["library_name"] == "g4"
    assert front["pipeline_tag"] == "text-generation"
    assert {"gemma4", "int4", "4-bit", "hqq", "torchao"} <= set(front["tags"])
    assert not any(key.startswith("extra_gated") for key in front)


def test_groups_are_stated_where_they_are_the_schemes() -> None:
    text = card(FACTS)
    assert "Scheme `int4-hqq`, group 32,\none tensor" in text
    assert "- recipe: scheme `int4-hqq`, group 32, 2 rules" in text
    assert "int4 with float zero points, int8 symmetric" in text
    recipe = {"scheme": "int8", "group_size": 32, "rules": []}
    text = card(replace(FACTS, lineage={**FACTS.lineage, "recipe": recipe}))
    assert "Scheme `int8`, one scale a row,\none tensor" in text
    assert "group 32" not in text


def test_a_licence_is_copied_and_never_made_up() -> None:
    text = card(replace(FACTS, metadata={}, base=None, commit=None))
    front = _front(text)
    assert not {"license", "license_name", "license_link", "base_model"} & front.keys()
    assert "icence" not in text
    text = card(replace(FACTS, metadata={"license": "apache-2.0"}))
    assert _front(text)["license"] == "apache-2.0"
    assert "The licence is the base model's: `apache-2.0`. What" in text


def test_each_layout_says_who_may_load_it() -> None:
    ours = card(FACTS)
    assert 'g4 run someone/Gemma4-31B-HQQ-INT4 "' in ours
    assert "**Do not load these files with transformers, vLLM or SGLang.**" in ours
    assert "vllm serve" not in ours
    packed = card(replace(FACTS, layout="compressed-tensors"))
    assert "vllm serve someone/Gemma4-31B-HQQ-INT4" in packed
    assert 'from_pretrained("someone/Gemma4-31B-HQQ-INT4", dtype="auto")' in packed
    assert "Do not load" not in packed
    assert "import g4tool.hf" not in packed
    assert _front(packed)["library_name"] == "transformers"
    experts = card(replace(FACTS, layout="compressed-tensors", experts=True))
    assert "import g4tool.hf" in experts


def test_a_layout_in_a_folder_says_who_may_load_it_too() -> None:
    name = "someone/Gemma4-31B-HQQ-INT4"
    folders = [
        Folder("compressed-tensors", "compressed-tensors", 19_000_000_000),
        Folder("executorch", "executorch", 22_000_000_000, " (12 groups clamped)"),
    ]
    text = card(replace(FACTS, folders=folders, experts=True))
    assert f'hf download {name} --include "compressed-tensors/*" --local-dir .' in text
    assert "vllm serve ./compressed-tensors" in text
    assert "import g4tool.hf" in text
    assert "gemma4_31b.export --prequantized executorch --backend cuda" in text
    assert "ExecuTorch's wheel (12 groups clamped):" in text
    assert "| the root | torchao | 20.90 GB | g4; not transformers, vLLM, SGLang |" in text
    assert "| `executorch/` | executorch | 22.00 GB | ExecuTorch's Gemma 4 example, g4 |" in text
    row = "| `compressed-tensors/` | compressed-tensors | 19.00 GB | vLLM, SGLang, transformers"
    assert f"{row} after `import g4tool.hf`, g4 |" in text
    assert f"{row}, g4 |" in card(replace(FACTS, folders=folders))

    other = [Folder("torchao", "torchao", 19_000_000_000)]
    text = card(replace(FACTS, layout="compressed-tensors", folders=other))
    assert f"vllm serve {name}" in text
    assert 'g4 run ./torchao "' in text
    assert "**Do not load these files with transformers, vLLM or SGLang.**" in text
    assert "Scheme `int4-sym`" in text
    assert "hqq" not in _front(text)["tags"]


def test_folders_sizes_errors_and_figures() -> None:
    evaluation = {
        "prediction": {"perplexity": 12.3456},
        "beside": {
            "reference": {"perplexity": 12.0},
            "fidelity": {"kl_mean": 0.0123, "top1": 0.954},
        },
        "texts": ["held-out"],
        "tokens": 8192,
    }
    folders = [
        Folder("export-cuda", "export-cuda", 21_000_000_000, ", up to 4096 tokens"),
        Folder("compile-neuron", "compile-neuron", 5_000_000, ""),
    ]
    text = card(replace(FACTS, evaluation=evaluation, folders=folders))
    assert "4.50 bits a weight: 20.90 GB" in text
    assert "| mlp.up_proj | 0-1 | int4-hqq | 32 | 4.61 kB | 8.00 % | 9.00 % |" in text
    assert "| norm |  | 16 bit | 32 | 2.30 kB |  |  |" in text
    assert "| KL(base, this), nats a token | 0.0123 |" in text
    assert "| same most likely token | 95.40 % |" in text
    assert "### `export-cuda/` (21.00 GB)" in text
    assert 'hf download someone/Gemma4-31B-HQQ-INT4 --include "export-cuda/*"' in text
    assert {"executorch", "neuron"} <= set(_front(text)["tags"])
    assert "## Quality" not in card(FACTS)
    with pytest.raises(G4Error, match="not what `g4 eval --json` prints"):
        card(replace(FACTS, evaluation={"prediction": {}}))


def test_the_bases_card(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    assert base_metadata(path) == {}
    path.write_text(BASE)
    assert base_metadata(path)["license_name"] == "some-terms"
    path.write_text("# no front matter")
    assert base_metadata(path) == {}
    path.write_text("---\nlicense: [\n---\n")
    with pytest.raises(G4Error, match="front matter is no YAML"):
        base_metadata(path)
