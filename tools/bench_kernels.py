"""The CUDA kernels: right at all shapes of the five variants, and how fast whole models run.

    python tools/bench_kernels.py [--only limits,products,attention,models] [--models 31b,e2b]

Prints lines of Markdown tables. Weights are random, of the published shapes. A part that fails says
so and the rest goes on. Needs a CUDA device and Triton.
"""

import argparse
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from g4tool.evaluate.bench import Limits, count_work, measure_limits, measure_speed
from g4tool.generate import cuda_graph
from g4tool.generate.loop import Session
from g4tool.generate.sampler import GREEDY
from g4tool.kernels import triton_attention, triton_int4, triton_int8, triton_tiles
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear, dequantize_int4
from g4tool.kernels.int8 import Int8Embedding, dequantize_int8
from g4tool.kernels.register import use_triton
from g4tool.model.attention import attend
from g4tool.model.config import TextConfig
from g4tool.model.embedding import Embedding
from g4tool.model.moe import ExpertLinear
from g4tool.model.text import TextModel
from g4tool.model.variants import VARIANTS

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
SHORT, LONG = 512, 32768
COPIES = 6  # of a weight in turn, so that no cache holds them

Weight = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    """Run the parts that were asked for."""
    use_triton()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="limits,products,attention,models")
    parser.add_argument("--models", default="31b,26b-a4b,e2b")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    limits = measure_limits(CUDA, BF16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {limits}\n", flush=True)
    parts: list[tuple[str, Callable[[], None]]] = [
        ("products", partial(products, limits)),
        ("attention", attention),
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


def int4(*shape: int, group: int) -> Weight:
    """A random weight [..., N, K]."""
    *lead, count, columns = shape
    qdata = torch.randint(0, 256, (*lead, count, columns // 2), dtype=torch.uint8, device=CUDA)
    per_group = (*lead, columns // group, count)
    # Of the spread that trained matrices have, so that activations stay in range.
    scale = (torch.rand(per_group, device=CUDA) + 0.5) * 0.2 * columns**-0.5
    zero = torch.randn(per_group, device=CUDA) + 7.5
    return qdata, scale.to(BF16), zero.to(BF16)


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
            weights = [int4(count, columns, group=group) for _ in range(COPIES)]
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
        weight = int4(128, count, columns, group=32)
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


def random_model(config: TextConfig, group: int) -> TextModel:
    """A model on the device whose matrices are random int4 leaves; the output head is int8."""
    with torch.device("meta"):
        model = TextModel(config).to(BF16)
    for path, module in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        twin: nn.Module
        if isinstance(module, nn.Linear) and "router" not in path:
            own = group if module.in_features % group == 0 else 32
            twin = Int4Linear(*int4(*module.weight.shape, group=own))
        elif isinstance(module, ExpertLinear):
            twin = Int4ExpertLinear(*int4(*module.weight.shape, group=32))
        elif isinstance(module, Embedding):
            rows, dim = module.weight.shape
            codes = torch.randint(-127, 128, (rows, dim), dtype=torch.int8, device=CUDA)
            twin = Int8Embedding(
                codes, torch.full((rows, 1), 0.01 * dim**-0.5, device=CUDA).to(BF16)
            )
        else:
            continue
        setattr(model.get_submodule(owner), name, twin)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.rand(parameter.shape, device=CUDA) * 0.5 + 0.75
            if parameter.dim() > 1:
                value = torch.randn(parameter.shape, device=CUDA) * parameter.shape[-1] ** -0.5
            setattr(module, name, nn.Parameter(value.to(BF16), requires_grad=False))
        if "layer_scalar" in module._buffers:
            module._buffers["layer_scalar"] = torch.ones(1, device=CUDA, dtype=BF16)
    return model.eval()


@torch.no_grad()
def whole_model(name: str, group: int, limits: Limits) -> None:
    """Agreement with the plain model, decode at two lengths, prefill, memory."""
    torch.cuda.reset_peak_memory_stats()
    model = random_model(VARIANTS[name], group)
    held = torch.cuda.memory_allocated()
    print(f"\n{name} g{group}: {held / 1e9:.2f} GB of weights", flush=True)
    _agreement(model)
    for context in (SHORT, LONG):
        session = Session(model, context + 64, graph=True)
        recorded = cuda_graph.record(model, GREEDY, context)

        def step(recorded: cuda_graph.Recorded = recorded, context: int = context) -> None:
            recorded.position.fill_(context)
            recorded.graph.replay()

        seconds = replay_seconds(step)
        read = count_work(model, context).decode_bytes
        print(
            f"decode at {context}: {1 / seconds:.1f} tok/s, {1e3 * seconds:.2f} ms, "
            f"{100 * read / seconds / limits.read:.1f} % of reading {read / 1e9:.2f} GB",
            flush=True,
        )
        session.close()
    for prompt in (2000, 8000):
        speed = measure_speed(model, prompt, 17, 2, graph=True)
        work = count_work(model, 0)
        print(
            f"prompt {prompt}: prefill {speed.prefill:.0f} tok/s, "
            f"{100 * speed.prefill * work.operations / limits.matmul:.1f} % of the matrix rate; "
            f"decode through the loop {speed.decode:.1f} tok/s",
            flush=True,
        )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    measure_speed(model, 4096 - 17, 17, 1, graph=True)
    peak = torch.cuda.max_memory_allocated()
    print(f"peak at 4k: {peak / 2**30:.2f} GiB, {(peak - held) / 2**30:.2f} above the weights")
    share = 24 * 2**30 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        measure_speed(model, 4096 - 17, 17, 1, graph=True)
        print("runs at 4k within 24 GiB", flush=True)
    except torch.cuda.OutOfMemoryError as error:
        print(f"does not run within 24 GiB: {error}", flush=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _agreement(model: TextModel) -> None:
    """The recorded step against `TextModel.hidden`, after a prompt past the window."""
    from g4tool.generate.cuda_step import decode_hidden

    ids = torch.randint(0, 262144, (1, 1100), device=CUDA)
    model.allocate_cache(1, 1200)
    model.hidden(ids[:, :1099], torch.tensor(0, device=CUDA))
    position = torch.tensor(1099, device=CUDA)
    want = model.hidden(ids[:, 1099:], position)
    got = [decode_hidden(model, ids[:, 1099:], position) for _ in range(3)]
    same = all(torch.equal(g, got[0]) for g in got)
    print(f"one step: error {relative(got[0], want):.1e}, repeats agree: {same}", flush=True)
    model.drop_cache()


if __name__ == "__main__":
    main()
