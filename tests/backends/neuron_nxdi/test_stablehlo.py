import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from g4tool.backends.neuron.interface import CompileJob, compiler
from g4tool.backends.neuron.stablehlo import rank_graph
from g4tool.backends.neuron.stablehlo_rank import canonical_name, rank_model
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, tiny_folder
from g4tool.errors import G4Error
from g4tool.model.variants import VARIANTS

LENGTH = 64
PROMPT = 40  # past the window


def settings(ranks: int) -> dict[str, Any]:
    return {"tp_degree": ranks, "seq_len": LENGTH, "torch_dtype": "float32"}


def test_texts_and_their_description(tmp_path: Path) -> None:
    events: list[Any] = []
    job = CompileJob(
        tiny_folder("tiny-26b-a4b"), settings(4) | {"context_encoding_buckets": [16]}, tmp_path
    )
    compiler("stablehlo")(job, events.append)
    assert [(x["model"], x["bucket"], x["done"], x["total"]) for x in events[:-1]] == [
        ("context_encoding_model", 16, 1, 2),
        ("token_generation_model", 1, 2, 2),
    ]
    assert events[-1]["event"] == "done"
    assert {(tmp_path / name).is_file() for name in events[-1]["files"]} == {True}
    listing = json.loads((tmp_path / "stablehlo" / "graphs.json").read_text())
    assert (listing["purpose"], listing["ranks"]) == ("inspection", 4)
    graph = listing["graphs"]["context_encoding_model_16.mlir"]
    shapes = {x["name"]: x["shape"] for x in graph["arguments"] if x["kind"] == "weight"}
    assert set(shapes) == set(text_tensors(TINY["tiny-26b-a4b"]))
    assert shapes["embed_tokens.weight"] == [1024, 128]
    assert shapes["layers.2.self_attn.k_proj.weight"] == [64, 128]  # two heads, on two ranks each
    assert shapes["layers.0.experts.gate_up_proj.weight"] == [8, 128, 128]
    assert not list(tmp_path.rglob("*.neff"))


# An expert of the 26B-A4B on 16 ranks is 44 wide, which the canonical model would not take.
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [(x, n) for x in sorted(VARIANTS) for n in (4, 8, 16) if VARIANTS[x].num_heads % n == 0],
)
def test_ranks_of_the_published_models_hold_their_part(variant: str, ranks: int) -> None:
    config = VARIANTS[variant]
    model = rank_model(config, ranks, 1, 2048, torch.bfloat16)
    whole = {name: torch.Size(shape).numel() for name, shape in text_tensors(config).items()}
    parts = {canonical_name(name): x.numel() for name, x in model.state_dict().items()}
    assert set(parts) == set(whole)
    for name, size in whole.items():
        split = size == parts[name] * ranks
        replicated = any(part in name for part in ("k_proj", "v_proj")) and parts[name] < size
        kept = size == parts[name] and ".experts." not in name
        assert split or replicated or kept, name
    assert whole["embed_tokens.weight"] == parts["embed_tokens.weight"] * ranks


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(G4Error, match="16 is more than the model's 8 query heads"):
        rank_graph(VARIANTS["e2b"], {"tp_degree": 16}, 1)


def test_a_dtype_that_is_not_lowered_is_refused() -> None:
    with pytest.raises(G4Error, match="float8"):
        rank_graph(TINY["tiny-31b"], {"torch_dtype": "float8_e4m3fn"}, 1)


def shard(name: str, whole: Tensor, shape: list[int], rank: int, ranks: int) -> Tensor:
    """The part of a canonical tensor that a rank is given."""
    if "gate_up_proj" in name:
        return torch.cat([half.chunk(ranks, 1)[rank] for half in whole.chunk(2, 1)], 1)
    places = [i for i, size in enumerate(shape) if size != whole.shape[i]]
    if not places:
        return whole
    pieces = whole.split(shape[places[0]], places[0])
    return pieces[rank * len(pieces) // ranks]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(TINY))
def test_ranks_together_are_the_model(name: str, ranks: int) -> None:
    pytest.importorskip("jax", reason="needs jax (pip install jax) to run StableHLO text")
    import numpy as np

    from tests.backends.neuron_nxdi.jaxlib_run import Program

    model = load_text_model(open_checkpoint(tiny_folder(name)), dtype=torch.float32)
    model.allocate_cache(1, LENGTH)
    ids = torch.randint(3, 4000, (1, PROMPT), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        prompt = model(ids, torch.tensor(0))[:, -1:]
        step = model(prompt.argmax(-1), torch.tensor(PROMPT))
    weights = model.state_dict()
    caches: list[dict[str, Any]] = [{} for _ in range(ranks)]

    def run(tokens: Tensor, start: int) -> list[Any]:
        graph = rank_graph(TINY[name], settings(ranks), tokens.shape[1])
        arguments = []
        for rank in range(ranks):
            inputs = iter((tokens.numpy(), np.array(start), np.array(tokens.shape[1] - 1)))
            given = []
            for x in graph.arguments:
                if x["kind"] == "input":
                    value = next(inputs).astype(np.int32)
                elif x["kind"] == "rank":
                    value = np.array(rank, np.int32)
                elif x["kind"] == "cache":
                    value = caches[rank].get(x["name"], np.zeros(x["shape"], np.float32))
                else:
                    part = shard(x["name"], weights[x["name"]], x["shape"], rank, ranks)
                    value = part.contiguous().numpy()
                given.append(value)
            arguments.append(given)
        results = Program(graph.text, ranks)(arguments)
        for rank, values in enumerate(results):
            for value, x in zip(values, graph.results, strict=True):
                if "replaces" in x:
                    caches[rank][x["name"]] = value
        return [values[-1] for values in results]

    for made, expected in ((run(ids, 0), prompt), (run(prompt.argmax(-1), PROMPT), step)):
        for logits in made:
            assert np.abs(logits - expected.numpy()).max() <= 1e-4
