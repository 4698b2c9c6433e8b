"""CUDA exports on a GPU: proved on the tiny models, measured on layers of a large model's shape.

python tools/bench_export.py tiny            the three tiny models, their own compiled code
python tools/bench_export.py large --layers 6    31B's width with random int4 weights
"""

import argparse
import json
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._inductor.config

from g4tool.backends.executorch import cuda, verify
from g4tool.backends.executorch.cuda_runtime import CudaMethods
from g4tool.backends.executorch.folder import EXPORT, ExportFacts, record, to_json
from g4tool.backends.executorch.fused import make_fused
from g4tool.backends.executorch.program import ProgramOptions, constant_methods, export_methods
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS
from random_models import random_model

NEW = 128


def write_export(
    model: TextModel, options: ProgramOptions, folder: Path, eos_ids: list[int]
) -> tuple[ExportFacts, float]:
    """The program of a model on CUDA into `folder`; and the seconds it took."""
    config = model.config
    began = time.perf_counter()
    make_fused(model)
    programs = export_methods(model, options)
    lowered = cuda.lower(programs, options, constant_methods(model, options, 2, eos_ids))
    lowered.write(folder / "model.pte")
    names = ["model.pte", *cuda.write_weights(lowered, folder)]
    seconds = time.perf_counter() - began
    facts = ExportFacts(
        backend="cuda",
        activations="bfloat16",
        max_seq_len=options.max_seq_len,
        prefill_chunk=options.prefill_chunk,
        sliding_window=config.sliding_window,
        vocab_size=config.vocab_size,
        bos_id=2,
        eos_ids=eos_ids,
        sampling=options.sampling,
        turn=None,
        delegates=lowered.delegates(),
        gpu={
            "name": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
        },
        versions={"torch": torch.__version__},
        source={},
        files=record(folder, names),
    )
    (folder / EXPORT).write_text(json.dumps(to_json(facts)))
    return facts, seconds


def tiny(name: str, folder: Path) -> None:
    """Export one tiny model, and compare its own code with eager int4."""
    from g4tool.pipeline.store import Store
    from g4tool.recipe.check import check
    from g4tool.recipe.document import read
    from g4tool.recipe.load import find
    from g4tool.stages.build import build
    from g4tool.stages.loading import load_folder

    recipe = check(read(find(None))).model_copy(update={"model": name})
    stage = build(recipe, "cuda").quantize
    assert stage is not None
    bundle = Store(folder / "home").ensure(stage).path
    eager, _ = load_folder(bundle, torch.bfloat16, "cuda")
    assert isinstance(eager, TextModel)
    window = eager.config.sliding_window
    ids = [2, *torch.randint(300, 4000, (4 * window + verify.DECODED,)).tolist()]
    walks = verify.walks(ids, window, 512, 256)
    before = [verify.trace(verify.eager(eager, 512), walk) for walk in walks]
    expected = greedy(verify.eager(eager, 512), ids[: 2 * window], NEW)

    facts, seconds = write_export(eager, ProgramOptions(512, 256), folder, [1, 106])
    print(f"{name}: exported in {seconds:.1f} s; {facts.delegates}", flush=True)
    for graph in (False, True):
        methods = CudaMethods(folder / "model.pte", list(folder.glob("*.ptd")), graph)
        step = verify.methods(methods.prefill, methods.decode)
        found = [verify.trace(step, walk) for walk in walks]
        print("  ", verify.compare("own code", before, found, verify.BF16).line())
        same = greedy(step, ids[: 2 * window], NEW)
        agreed = next(
            (i for i, (a, b) in enumerate(zip(expected, same, strict=True)) if a != b), NEW
        )
        print(f"   graph {graph}: greedy agrees for {agreed} of {NEW} tokens")
        other = CudaMethods(folder / "model.pte", list(folder.glob("*.ptd")), graph)
        last = other.decode(torch.tensor([[ids[40]]]), torch.tensor(40))
        methods.prefill(torch.tensor([ids[:40]]), torch.tensor(0))
        own = methods.decode(torch.tensor([[ids[40]]]), torch.tensor(40))
        print(f"   decode without the prefill's cache differs by {(last - own).abs().max():.2f}")


def greedy(step: verify.Step, ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens after a prompt."""
    with torch.no_grad():
        logits = step(torch.tensor([ids]), 0)
        found = [int(logits.argmax())]
        for position in range(len(ids), len(ids) + count - 1):
            logits = step(torch.tensor([found[-1:]]), position)
            found.append(int(logits.argmax()))
    return found


def large(layers: int, folder: Path) -> None:
    """Time, memory and speed of a 31B-shaped model of so many layers."""
    whole = VARIANTS["31b"]
    model = random_model(replace(whole, layers=whole.layers[-layers:]))
    weights = sum(part.nbytes for part in model.state_dict().values())
    torch.cuda.reset_peak_memory_stats()
    facts, seconds = write_export(model, ProgramOptions(4096, 1024), folder, [1, 106])
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gpu = torch.cuda.max_memory_allocated() / 2**30
    size = sum(each["size"] for each in facts.files.values())
    print(
        f"31B width, {layers} layers, {weights / 1e9:.2f} GB of weights: exported in {seconds:.0f} "
        f"s, host peak {host:.1f} GiB, GPU peak {gpu:.2f} GiB, files {size / 1e9:.2f} GB"
    )
    del model
    torch.cuda.empty_cache()
    began = time.perf_counter()
    methods = CudaMethods(folder / "model.pte", list(folder.glob("*.ptd")))
    methods.decode(torch.tensor([[5]]), torch.tensor(0))
    torch.cuda.synchronize()
    print(f"   load to first token {time.perf_counter() - began:.1f} s")
    ids = torch.randint(300, 4000, (1, 1000), device="cuda")
    for label, call, count in (
        ("prefill 1000", lambda: methods.prefill(ids, torch.tensor(0)), 1000),
        ("decode at 500", lambda: methods.decode(ids[:, :1], torch.tensor(500)), 1),
    ):
        call()  # type: ignore[no-untyped-call]
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        median = sorted(times)[5]
        print(f"   {label}: {median * 1e3:.2f} ms, {count / median:.1f} tok/s with {layers} layers")


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("tiny", "large"))
    parser.add_argument("--models", nargs="*", default=["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.what == "large":
        with tempfile.TemporaryDirectory() as folder:
            large(arguments.layers, Path(folder))
        return
    # The proof is about right answers: a few candidates a product will do.
    if hasattr(torch._inductor.config.test_configs, "max_mm_configs"):
        torch._inductor.config.test_configs.max_mm_configs = 2
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            tiny(name, Path(folder))


if __name__ == "__main__":
    main()
