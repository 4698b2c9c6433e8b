"""CUDA exports on a GPU: proved on the tiny models, measured on layers of a large model's shape.

python tools/bench_export.py tiny                the tiny models, their own compiled code
python tools/bench_export.py export --layers 6   31B's width with random int4 weights, to --folder
python tools/bench_export.py measure             the speed of what lies in --folder
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
from g4tool.backends.executorch.cuda_runtime import CudaMethods, check_program
from g4tool.backends.executorch.folder import EXPORT, ExportFacts, read_facts, record, to_json
from g4tool.backends.executorch.fused import make_fused
from g4tool.backends.executorch.program import ProgramOptions, constant_methods, export_methods
from g4tool.backends.executorch.verify import Step
from g4tool.evaluate.corpus import shipped_texts
from g4tool.generate.tokenizer import Tokenizer
from g4tool.kernels.register import use_triton
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS
from random_models import random_model

NEW = 128
TINY = ("tiny-31b", "tiny-e2b", "tiny-26b-a4b")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_export(
    model: TextModel, options: ProgramOptions, folder: Path, triton: bool
) -> tuple[ExportFacts, float]:
    """The program of a model on the CPU into `folder`; and the seconds it took."""
    config = model.config
    began = time.perf_counter()
    make_fused(model, triton)
    programs = export_methods(model, options)
    print(f"   exported after {time.perf_counter() - began:.0f} s", flush=True)
    lowered = cuda.lower(programs, options, constant_methods(model, options, 2, [1, 106]))
    lowered.write(folder / "model.pte")
    names = ["model.pte", *cuda.write_weights(lowered, folder)]
    check_program(folder / "model.pte")
    seconds = time.perf_counter() - began
    facts = ExportFacts(
        backend="cuda",
        activations="float32" if model.norm.weight.dtype == torch.float32 else "bfloat16",
        max_seq_len=options.max_seq_len,
        prefill_chunk=options.prefill_chunk,
        sliding_window=config.sliding_window,
        vocab_size=config.vocab_size,
        bos_id=2,
        eos_ids=[1, 106],
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


def load(folder: Path, graph: bool = True) -> CudaMethods:
    """The program in `folder`."""
    return CudaMethods(folder / "model.pte", list(folder.glob("*.ptd")), graph)


def tiny(name: str, folder: Path, dtype: torch.dtype, triton: bool) -> None:
    """Export one tiny model, and compare its own code with eager int4 in the same dtype, which
    rounds at the same places: both with kernels in Triton, or both without.

    What rounding may do is measured on the eager model: its logits in `dtype` beside fp32.
    """
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
    exact, eager = (load_folder(bundle, each, "cuda")[0] for each in (torch.float32, dtype))
    assert isinstance(exact, TextModel)
    assert isinstance(eager, TextModel)
    window, allowed = eager.config.sliding_window, verify.bf16(eager.config)
    prompts = texts(Tokenizer(bundle), 4 * window + verify.DECODED, eager.config.vocab_size)
    walks = [each for ids in prompts for each in verify.walks(ids, window, 512, 256)]
    use_triton(triton)
    own = verify.eager(eager, 512)
    before = [verify.trace(own, walk) for walk in walks]
    sequences = [[*ids[: 2 * window], *greedy(own, ids[: 2 * window])] for ids in prompts]
    forced = [replay(own, each, 2 * window) for each in sequences]
    use_triton(False)
    own = verify.eager(exact, 512)
    truth = [verify.trace(own, walk) for walk in walks]
    forced_truth = [replay(own, each, 2 * window) for each in sequences]

    facts, seconds = write_export(eager.cpu(), ProgramOptions(512, 256), folder, triton)
    label = f"{name} {str(dtype).removeprefix('torch.')} {'triton' if triton else 'plain'}"
    print(f"{label}: exported in {seconds:.1f} s; {facts.delegates['decode']}", flush=True)
    print(f"   {verify.compare('eager beside fp32', truth, before, allowed).line()}")
    for graph in (False, True):
        program = load(folder, graph)
        step = verify.methods(program.prefill, program.decode)
        found = [verify.trace(step, walk) for walk in walks]
        print(f"   {verify.compare('program beside eager', before, found, allowed).line()}")
        print(f"   {verify.compare('program beside fp32', truth, found, allowed).line()}")
        same = [first_other(each, greedy(step, each[:-NEW])) for each in sequences]
        print(f"   {label} graph {graph}: greedy identical for {same} of {NEW} tokens")
        replayed = [replay(step, each, 2 * window) for each in sequences]
        print(f"   {verify.compare('replayed', forced, replayed, allowed).line()}")
        print(f"   {verify.compare('replayed, fp32', forced_truth, replayed, allowed).line()}")
    check_sharing(folder, prompts[0])


def check_sharing(folder: Path, ids: list[int]) -> None:
    """Print what a decode gives without the cache that a prefill filled."""
    last = (torch.tensor([[ids[40]]]), torch.tensor(40))
    own, other = load(folder), load(folder)
    own.prefill(torch.tensor([ids[:40]]), torch.tensor(0))
    apart = (own.decode(*last) - other.decode(*last)).abs().max()
    print(f"   decode without the prefill's cache differs by {apart:.2f}", flush=True)


def texts(tokenizer: Tokenizer, count: int, vocab: int) -> list[list[int]]:
    """Prompts of `count` ids: held-out text, and one of random ids."""
    found = []
    for text in shipped_texts()[:3]:
        found.append([tokenizer.bos_id, *tokenizer.encode(text.content[: 16 * count], bos=False)])
    random = torch.Generator().manual_seed(0)
    found.append([2, *torch.randint(300, vocab, (count,), generator=random).tolist()])
    return [ids[:count] for ids in found]


@torch.no_grad()
def greedy(step: Step, ids: list[int]) -> list[int]:
    """NEW greedy tokens after a prompt."""
    logits = step(torch.tensor([ids]), 0)
    found = [int(logits.argmax())]
    for position in range(len(ids), len(ids) + NEW - 1):
        logits = step(torch.tensor([found[-1:]]), position)
        found.append(int(logits.argmax()))
    return found


@torch.no_grad()
def replay(step: Step, ids: list[int], prompt: int) -> torch.Tensor:
    """Logits fp32 [NEW, vocab] that gave each token after a prompt, whatever they would choose."""
    found = [step(torch.tensor([ids[:prompt]]), 0)]
    found += [step(torch.tensor([ids[at : at + 1]]), at) for at in range(prompt, len(ids) - 1)]
    return torch.cat(found).float().cpu()


def first_other(sequence: list[int], found: list[int]) -> int:
    """How many tokens of `found` are those at the sequence's end."""
    pairs = enumerate(zip(sequence[-NEW:], found, strict=True))
    return next((at for at, (a, b) in pairs if a != b), NEW)


def export_large(variant: str, layers: int, folder: Path, triton: bool) -> None:
    """Time and memory of exporting so many layers of a variant's shape."""
    whole = VARIANTS[variant]
    model = random_model(replace(whole, layers=whole.layers[-layers:]), device="cpu")
    weights = sum(part.nbytes for part in model.state_dict().values())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    facts, seconds = write_export(model, ProgramOptions(4096, 1024), folder, triton)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gpu = torch.cuda.max_memory_allocated() / 2**30
    size = sum(each["size"] for each in facts.files.values())
    print(
        f"{variant} width, {layers} layers, {weights / 1e9:.2f} GB of weights: exported in "
        f"{seconds:.0f} s, host peak {host:.1f} GiB ({before:.1f} with the model loaded), GPU peak "
        f"{gpu:.2f} GiB, files {size / 1e9:.2f} GB",
        flush=True,
    )


def measure(folder: Path) -> None:
    """Speed of the program in `folder`, alone on the GPU."""
    began = time.perf_counter()
    methods = load(folder)
    methods.decode(torch.tensor([[5]]), torch.tensor(0))
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() / 2**30
    print(f"{folder.name}: load to first token {time.perf_counter() - began:.1f} s, {held:.2f} GiB")
    ids = torch.randint(300, 4000, (1, 1000), device="cuda")
    vocab = read_facts(folder).vocab_size
    for label, call, count in (
        ("prefill 1000", lambda: methods.prefill(ids, torch.tensor(0)), 1000),
        ("decode at 500", lambda: methods.decode(ids[:, :1], torch.tensor(500)), 1),
    ):
        assert call().shape == (1, vocab)  # type: ignore[no-untyped-call]
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        median = sorted(times)[10]
        print(f"   {label}: {median * 1e3:.2f} ms, {count / median:.1f} tok/s", flush=True)


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("tiny", "export", "measure"))
    parser.add_argument("--models", nargs="*", default=TINY)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--triton", action="store_true", help="with g4's own kernels inside")
    parser.add_argument("--variant", choices=VARIANTS, default="31b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("build/bench-export"))
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.folder)
        return
    if arguments.what == "export":
        arguments.folder.mkdir(parents=True, exist_ok=True)
        export_large(arguments.variant, arguments.layers, arguments.folder, arguments.triton)
        return
    # The proof is about right answers: a few candidates a product will do.
    if hasattr(torch._inductor.config.test_configs, "max_mm_configs"):
        torch._inductor.config.test_configs.max_mm_configs = 2
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            tiny(name, Path(folder), DTYPES[arguments.dtype], arguments.triton)


if __name__ == "__main__":
    main()
