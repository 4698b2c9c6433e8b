"""The CUDA kernels: right at all shapes of the five variants, and how fast whole models run.

    python tools/bench_kernels.py [--only products,attention,models,transformers] [--models 31b,e2b]

Prints lines of Markdown tables. Weights are random, of the published shapes. A part that fails says
so and the rest goes on. Needs a CUDA device and Triton.
"""

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench_models import LONG, SHORT, against_transformers, relative, replay_seconds, whole_model
from g4tool.evaluate.bench import Limits, measure_limits
from g4tool.kernels import triton_attention, triton_int4, triton_int8, triton_tiles
from g4tool.kernels.int4 import dequantize_int4
from g4tool.kernels.int8 import dequantize_int8
from g4tool.model.config import TextConfig
from g4tool.model.variants import VARIANTS
from random_models import random_int4

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
COPIES = 6  # of a weight in turn, so that no cache holds them


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="models,transformers,products,attention")
    parser.add_argument("--models", default="31b,26b-a4b,e2b")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    limits = measure_limits(CUDA, BF16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {limits}\n", flush=True)
    parts: list[tuple[str, Callable[[], None]]] = []
    for name in arguments.models.split(","):
        for group in (32, 128) if name == "31b" else (32,):
            parts.append(("models", partial(whole_model, name, group, limits)))
    parts.append(("transformers", partial(against_transformers, "31b")))
    parts += [("attention", attention), ("products", partial(products, limits))]
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


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Plain attention in fp32: [1, heads, S, D]."""
    keys, values = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (keys, values))
    weights = torch.softmax(q @ keys.transpose(2, 3) + mask, -1)
    return weights @ values


def attention() -> None:
    """Both attention kernels against torch in fp32, and their rates."""
    print("\n| attention | error | us | GB/s or TFLOP/s |\n|---|--:|--:|--:|")
    for name, heads, kv_heads, size, slots in (
        ("31b sliding", 32, 16, 256, 1024),
        ("31b full", 32, 4, 512, LONG),
        ("e2b sliding", 8, 1, 256, 512),
        ("e2b full", 8, 1, 512, 4096),
    ):
        q = torch.randn(heads, size, device=CUDA).to(BF16) * size**-0.5
        held = torch.randn(2, 1, kv_heads, slots, size, device=CUDA).to(BF16)
        cache = (held[0], held[1])
        for present in (min(slots, SHORT), slots):
            position = torch.tensor(present - 1, device=CUDA)
            got = triton_attention.decode_attention(q, *cache, position)
            keys, values = (c[:, :, :present].float() for c in cache)
            zeros = torch.zeros(1, 1, 1, present, device=CUDA)
            want = attend(q.float()[None, :, None], keys, values, zeros)[0, :, 0]
            seconds = graph_seconds(
                [partial(triton_attention.decode_attention, q, *cache, position)] * 4
            )
            read = 4 * kv_heads * present * size
            print(
                f"| {name}, one token of {present} | {relative(got, want):.1e} | "
                f"{1e6 * seconds:.1f} | {read / seconds / 1e9:.0f} |",
                flush=True,
            )
        tokens = min(slots, 2048)
        q = (torch.randn(1, tokens, heads, size, device=CUDA) * size**-0.5).to(BF16).transpose(1, 2)
        keys, values = (c[:, :, :tokens].contiguous() for c in cache)
        mask = torch.full((tokens, tokens), -float("inf"), device=CUDA).triu(1)[None, None].to(BF16)
        got = triton_attention.chunk_attention(q, keys, values, mask)
        want = attend(q.float(), keys.float(), values.float(), mask.float())
        seconds = graph_seconds(
            [partial(triton_attention.chunk_attention, q, keys, values, mask)] * 2
        )
        done = 2 * heads * tokens * tokens * size
        print(
            f"| {name}, a chunk of {tokens} | {relative(got, want):.1e} | {1e6 * seconds:.0f} | "
            f"{done / seconds / 1e12:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
