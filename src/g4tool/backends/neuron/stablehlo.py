"""Writes a model's programs for Neuron as StableHLO text, for inspection.

NxD Inference's successor takes StableHLO. No Neuron compiler has taken these texts yet; jaxlib
parses and runs them. Nothing here is an executable, and no file looks like one.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from g4tool.backends.neuron.interface import CompileJob, EventReport
from g4tool.backends.neuron.stablehlo_program import Graph, lower
from g4tool.backends.neuron.stablehlo_rank import LastToken, canonical_name, rank_model
from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import read_config
from g4tool.errors import G4Error
from g4tool.model.config import TextConfig

FOLDER = "stablehlo"
GRAPHS = "graphs.json"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def compile_model(job: CompileJob, report: EventReport) -> None:
    """Writes job.out/stablehlo: a text for each prompt bucket, one for a step, and graphs.json.

    All ranks run one text, each with its own weights and its number; graphs.json gives the
    arguments, in order, by canonical name with a rank's shape. Only config.json is read. Raises
    G4Error for a model that the degree does not split.
    """
    text = parse_text_config(read_config(job.model))
    folder = job.out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    programs = list(_programs(job.settings))
    described = {}
    for done, (name, tokens) in enumerate(programs, start=1):
        file = f"{name}_{tokens}.mlir"
        graph = rank_graph(text, job.settings, tokens)
        (folder / file).write_text(graph.text)
        described[file] = {"arguments": graph.arguments, "results": graph.results}
        report(
            {
                "event": "bucket",
                "model": name,
                "bucket": tokens,
                "done": done,
                "total": len(programs),
            }
        )
    listing = {
        "purpose": "inspection",
        "ranks": int(job.settings.get("tp_degree", 1)),
        "graphs": described,
    }
    (folder / GRAPHS).write_text(json.dumps(listing, indent=1) + "\n")
    files = [(Path(FOLDER) / name).as_posix() for name in (*described, GRAPHS)]
    report({"event": "done", "files": files, "versions": {"torch": version("torch")}})


def rank_graph(text: TextConfig, settings: Mapping[str, Any], tokens: int) -> Graph:
    """What a rank computes for `tokens` new tokens a row.

    `settings` are NxD Inference's, of which tp_degree, batch_size, seq_len and torch_dtype count.
    """
    ranks = int(settings.get("tp_degree", 1))
    batch = int(settings.get("batch_size", 1))
    dtype = str(settings.get("torch_dtype", "bfloat16")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise G4Error(f"torch_dtype is {dtype!r}; the StableHLO writer knows {', '.join(_DTYPES)}.")
    model = rank_model(text, ranks, batch, _length(settings), _DTYPES[dtype])
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    # Two tensors: torch.export takes one that is given twice for a single input.
    start, last = (torch.zeros((), dtype=torch.int64, device="meta") for _ in range(2))
    with torch.no_grad(), warnings.catch_warnings():
        # torch.export warns about its own future.
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.export.export(LastToken(model), (ids, start, last), strict=False)
        return lower(program, ranks, canonical_name)


def _programs(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Name and new tokens of each program: a prompt's by bucket, and one token's."""
    for bucket in settings.get("context_encoding_buckets") or [_length(settings)]:
        yield "context_encoding_model", int(bucket)
    yield "token_generation_model", 1


def _length(settings: Mapping[str, Any]) -> int:
    return int(settings.get("seq_len", 128))
