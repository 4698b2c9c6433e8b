"""The CUDA kernels: right at all shapes of the five variants, and how fast whole models run.

    python tools/bench_kernels.py [--only products,models] [--models 31b,e2b]

Prints lines of Markdown tables. Weights are random, of the published shapes. A part that fails says
so and the rest goes on. Needs a CUDA device and Triton.
"""

import argparse
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from g4tool.evaluate.bench import Limits, count_work, measure_limits, measure_speed
from g4tool.kernels import triton_int4, triton_int8, triton_tiles
from g4tool.kernels.int4 import dequantize_int4
from g4tool.kernels.int8 import dequantize_int8
from g4tool.kernels.register import use_triton
from g4tool.model.config import TextConfig
from g4tool.model.variants import VARIANTS
from random_models import random_int4, random_model

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHORT, LONG = 512, 32768
COPIES = 6  # of a weight in turn, so that no cache holds them


def main() -> None:
    """Run the parts that were asked for."""
    use_triton()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="products,models")
    parser.add_argument("--models", default="31b,26b-a4b,e2b")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    limits = measure_limits(CUDA, BF16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {limits}\n", flush=True)
    parts: list[tuple[str, Callable[[], None]]] = [
        ("products", partial(products, limits)),
    ]
    for name in arguments.models.split(","):
        for group in (32, 128) if name == "31b" else (32,):
            parts.append(("models", partial(whole_model, name, group, limits)))
    for part, run in parts:
        if part in only:
            try:
                run()
            except Exception:
                traceback.print_exc()
                print(flush=True)


def shapes(config: TextConfig) -> Iterator[tuple[int, int]]:
    """[N, K] of every matrix of a variant."""
    dim = config.hidden_size
    for layer in config.layers:
        width = config.num_heads * layer.head_dim
        inner = layer.intermediate_size
        yield from ((width, dim), (layer.num_kv_heads * layer.head_dim, dim), (dim, width))
        yield from ((inner, dim), (dim, inner))
    if config.per_layer_dim:
        yield from ((config.per_layer_dim, dim), (dim, config.per_layer_dim))
    if config.moe:
        yield from ((2 * config.moe.intermediate_size, dim), (dim, config.moe.intermediate_size))


def relative(got: Tensor, want: Tensor) -> float:
    """Relative error; NaN stays NaN."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Median seconds of one of the calls, which are recorded as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay_seconds(graph.replay, repeats) / len(calls)


def replay_seconds(replay: Callable[[], None], repeats: int = 7) -> float:
    """Median seconds of a call by the device's own clock, after one to warm up."""
    times: list[float] = []
    for _ in range(repeats + 1):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times[1:])


def products(limits: Limits) -> None:
    """Every kernel for products against fp32, then its share of the read bandwidth."""
    print("| int4 product | group | error | whole weight equal | repeats agree | us | of reading |")
    print("|---|--:|--:|---|---|--:|--:|")
    for count, columns in sorted({s for config in VARIANTS.values() for s in shapes(config)}):
        for group in (32, 128):
            if columns % group:
                continue
            weights = [random_int4(count, columns, group=group) for _ in range(COPIES)]
            plain = dequantize_int4(*weights[0], torch.float32)
            x = torch.randn(1, columns, device=CUDA).to(BF16)
            packed = triton_int4.pack_rows(x)
            parts = triton_int4.vector_parts(packed, weights[:1])
            same = all(
                torch.equal(triton_int4.vector_parts(packed, weights[:1]), parts) for _ in range(5)
            )
            whole = triton_tiles.int4_dequantize(*weights[0], BF16).equal(plain.to(BF16))
            error = relative(parts.sum(0), (x.float() @ plain.T)[0])
            seconds = graph_seconds(
                [partial(triton_int4.vector_parts, packed, [weight]) for weight in weights]
            )
            read = sum(t.nbytes for t in weights[0]) / seconds / limits.read
            print(
                f"| {count}x{columns} | {group} | {error:.1e} | {whole} | {same} | "
                f"{1e6 * seconds:.1f} | {100 * read:.0f} % |",
                flush=True,
            )
    _int8_head()
    _experts()


def _int8_head() -> None:
    for dim in (1536, 5376):
        qdata = torch.randint(-127, 128, (262144, dim), dtype=torch.int8, device=CUDA)
        scale = torch.rand(262144, 1, device=CUDA).to(BF16)
        x = torch.randn(1, dim, device=CUDA).to(BF16)
        want = x.float() @ dequantize_int8(qdata, scale, torch.float32).T
        error = relative(triton_int8.int8_vector(x, qdata, scale), want)
        seconds = graph_seconds([partial(triton_int8.int8_vector, x, qdata, scale)] * 3)
        print(
            f"int8 head 262144x{dim}: error {error:.1e}, {1e6 * seconds:.0f} us, "
            f"{qdata.nbytes / seconds / 1e9:.0f} GB/s",
            flush=True,
        )


def _experts() -> None:
    for count, columns in ((1408, 2816), (2816, 704)):
        weight = random_int4(128, count, columns, group=32)
        plain = dequantize_int4(*weight, torch.float32)
        index = torch.randperm(128, device=CUDA)[:8].view(1, 8)
        x = torch.randn(1, 8, columns, device=CUDA).to(BF16)
        want = (plain[index] @ x.float()[..., None])[..., 0]
        error = relative(triton_int4.int4_chosen(x, index, *weight), want)
        seconds = graph_seconds([partial(triton_int4.int4_chosen, x, index, *weight)] * 4)
        ends = torch.randint(0, 4000, (128,), device=CUDA).sort().values.int()
        rows = torch.randn(4000, columns, device=CUDA).to(BF16)
        expert = torch.bucketize(torch.arange(4000, device=CUDA), ends, right=True).clamp(max=127)
        got = triton_tiles.int4_grouped(rows, ends, *weight)
        checked = torch.randint(0, int(ends[-1]), (64,), device=CUDA)
        want = (plain[expert[checked]] @ rows[checked].float()[..., None])[..., 0]
        every = graph_seconds([partial(triton_tiles.int4_grouped, rows, ends, *weight)] * 2)
        print(
            f"experts {count}x{columns}: chosen error {error:.1e}, {1e6 * seconds:.0f} us; grouped "
            f"error {relative(got[checked], want):.1e}, rows of none "
            f"{'zero' if not got[int(ends[-1]) :].any() else 'NOT ZERO'}, 4000 rows "
            f"{1e6 * every:.0f} us, {8e-12 * 1000 * count * columns / every:.0f} TFLOP/s",
            flush=True,
        )


def whole_model(name: str, group: int, limits: Limits) -> None:
    """Decode at two lengths, prefill at two, and peak memory, through the ordinary loop."""
    model = random_model(VARIANTS[name], group)
    held = torch.cuda.memory_allocated()
    print(f"\n{name} g{group}: {held / 1e9:.2f} GB of weights", flush=True)
    for prompt in (SHORT, 2000, 8000, LONG):
        torch.cuda.reset_peak_memory_stats()
        speed = measure_speed(model, prompt, 17, 2)
        work = count_work(model, prompt)
        peak = torch.cuda.max_memory_allocated()
        print(
            f"prompt {prompt}: prefill {speed.prefill:.0f} tok/s, "
            f"{100 * speed.prefill * work.operations / limits.matmul:.1f} % of the matrix rate; "
            f"decode {speed.decode:.1f} tok/s, "
            f"{100 * speed.decode * work.decode_bytes / limits.read:.1f} % of the read rate; "
            f"{(peak - held) / 2**30:.2f} GiB above the weights",
            flush=True,
        )


if __name__ == "__main__":
    main()
