"""Whole models on a CUDA device, for bench_kernels.py: decode, prefill, memory, transformers."""

import copy
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from g4tool.evaluate.bench import Limits, count_work, measure_speed
from g4tool.generate import cuda_graph
from g4tool.generate.figures import clock
from g4tool.generate.sampler import GREEDY, choose
from g4tool.kernels.register import use_triton
from g4tool.kernels.triton_arithmetic import TokenArithmetic, TritonArithmetic
from g4tool.model.arithmetic import PLAIN, Arithmetic, use
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS
from random_models import random_model

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHORT, LONG = 512, 32768
PROMPTS = (2000, 8000)
SMALL_CARD = 24 * 2**30


def replay_seconds(replay: Callable[[], None], repeats: int = 15) -> float:
    """Median seconds of a call by the device's own clock, after two to warm up."""
    times: list[float] = []
    for _ in range(repeats + 2):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times[2:])


def relative(got: Tensor, want: Tensor) -> float:
    """Relative error; NaN stays NaN."""
    return float((got.float() - want.float()).norm() / want.float().norm())


@torch.no_grad()
def whole_model(name: str, group: int, limits: Limits) -> None:
    """Agreement with the plain model, decode at two lengths, prefill, memory."""
    _free()
    print(f"\n{name} g{group}", flush=True)
    agreement(name, group)
    _free()
    model = random_model(VARIANTS[name], group)
    held = torch.cuda.memory_allocated()
    print(f"{held / 1e9:.2f} GB of weights", flush=True)
    assert cuda_graph.prepare(model)
    for context in (SHORT, LONG):
        seconds = decode_seconds(model, context)
        read = count_work(model, context).decode_bytes
        print(
            f"decode at {context}: {1 / seconds:.1f} tok/s, {1e3 * seconds:.3f} ms, "
            f"{100 * read / seconds / limits.read:.1f} % of reading {read / 1e9:.2f} GB",
            flush=True,
        )
    for prompt in PROMPTS:
        speed = measure_speed(model, prompt, 33, 2)
        # Each token sees half of the prompt on the average.
        work = count_work(model, prompt // 2)
        print(
            f"prompt {prompt}: prefill {speed.prefill:.0f} tok/s, "
            f"{100 * speed.prefill * work.operations / limits.matmul:.1f} % of the matrix rate; "
            f"decode through the loop {speed.decode:.1f} tok/s",
            flush=True,
        )
    memory(model, held, name)


def agreement(name: str, group: int) -> None:
    """The first layers on a prompt past the window and one token, against plain PyTorch in fp32.

    Only a few: a deep model of random weights makes a small difference large.
    """
    config = VARIANTS[name]
    count = 1 + next(n for n, layer in enumerate(config.layers) if layer.attention == "full")
    config = replace(config, layers=config.layers[:count])
    model = random_model(config, group)
    wide = copy.deepcopy(model).float()
    ids = torch.randint(0, config.vocab_size, (1, 1101), device=CUDA)
    start, position = (torch.tensor(at, device=CUDA) for at in (0, 1100))

    def run(model: TextModel, one: Arithmetic, many: Arithmetic) -> list[Tensor]:
        model.allocate_cache(1, 1200)
        use(model, many)
        prompt = model.hidden(ids[:, :1100], start)
        use(model, one)
        return [prompt, *(model.hidden(ids[:, 1100:], position) for _ in range(3))]

    use_triton(False)
    want, plain = run(wide, PLAIN, PLAIN), run(model, PLAIN, PLAIN)
    use_triton(True)
    made = [run(model, TokenArithmetic(BF16), TritonArithmetic()) for _ in range(2)]
    print(
        f"{count} layers, error against fp32 of the kernels (of plain PyTorch in bf16): prompt "
        f"{relative(made[0][0], want[0]):.1e} ({relative(plain[0], want[0]):.1e}), token "
        f"{relative(made[0][1], want[1]):.1e} ({relative(plain[1], want[1]):.1e}); repeats equal: "
        f"{all(torch.equal(a, b) for a, b in zip(*made, strict=True))}",
        flush=True,
    )
    del wide
    use(model, PLAIN)
    replays_agree(model)


def replays_agree(model: TextModel) -> None:
    """Ids of recorded steps against the same kernels launched one by one."""
    position = torch.zeros((), dtype=torch.int64, device=CUDA)
    ids = torch.full((1, 1), 7, device=CUDA)
    model.allocate_cache(1, 64)
    use(model, TokenArithmetic(BF16))
    want = []
    for _ in range(48):
        ids = choose(model.logits(model.hidden(ids, position))[:, 0], GREEDY, None)[:, None]
        want.append(int(ids))
        position += 1
    use(model, PLAIN)
    recorded = cuda_graph.record(model, GREEDY, 0)
    recorded.begin(torch.tensor([7], device=CUDA), 0, GREEDY)
    got = []
    for _ in want:
        recorded.launch()
        got += recorded.take(more=False)
    print(f"recorded steps give the same {len(want)} ids: {got == want}, {len(set(got))} different")
    model.drop_cache()


def decode_seconds(model: TextModel, context: int) -> float:
    """Seconds of a recorded step with `context` random keys and values before it."""
    model.allocate_cache(1, context + 64)
    for name, buffer in model.named_buffers():
        if ".cache." in name:
            buffer.normal_()
    recorded = cuda_graph.record(model, GREEDY, context)

    def step() -> None:
        recorded.position.fill_(context)
        recorded.graph.replay()

    seconds = replay_seconds(step)
    model.drop_cache()
    return seconds


def memory(model: TextModel, held: int, name: str) -> None:
    """The peak of 4096 tokens above weights and cache, and whether a 24 GiB limit holds them."""
    _free()
    torch.cuda.reset_peak_memory_stats()
    model.allocate_cache(1, 4096)
    cache = torch.cuda.memory_allocated() - held
    model.drop_cache()
    measure_speed(model, 4096 - 17, 17, 1)
    peak = torch.cuda.max_memory_allocated()
    print(
        f"4096 tokens: peak {peak / 2**30:.2f} GiB, {(peak - held - cache) / 2**30:.2f} above "
        f"weights and cache",
        flush=True,
    )
    if held > SMALL_CARD * 0.95:
        return
    _free()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(SMALL_CARD / total)
    try:
        measure_speed(model, 4096 - 17, 17, 1)
        print(f"{name} runs 4096 tokens within 24 GiB", flush=True)
    except torch.cuda.OutOfMemoryError as error:
        print(f"{name} does not run 4096 tokens within 24 GiB: {error}", flush=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@torch.no_grad()
def against_transformers(name: str) -> None:
    """Prefill of transformers' own model in bf16, with random weights of the same shapes."""
    from transformers import AutoModelForCausalLM
    from transformers.models.gemma4 import Gemma4TextConfig

    from g4tool.checkpoint.config import to_hf_config

    _free()
    raw = to_hf_config(VARIANTS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**raw), dtype=BF16)
    print(f"\ntransformers {name} in bf16", flush=True)
    fill(model)
    for prompt in PROMPTS:
        ids = torch.randint(0, raw["vocab_size"], (1, prompt), device=CUDA)
        times = []
        for _ in range(3):
            began = clock(CUDA)
            model(ids, use_cache=True, logits_to_keep=1)
            times.append(clock(CUDA) - began)
        print(f"prompt {prompt}: prefill {prompt / statistics.median(times[1:]):.0f} tok/s")


def fill(model: torch.nn.Module) -> None:
    """Moves a model from the meta device and gives it random weights; buffers are made again."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.randn(parameter.shape, device=CUDA, dtype=BF16)
            value.mul_(parameter.shape[-1] ** -0.5)
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    model.tie_weights()  # type: ignore[operator]
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                made = torch.rand(buffer.shape, device=CUDA).to(buffer.dtype)
                module.register_buffer(name, made, persistent=False)
    model.eval()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
