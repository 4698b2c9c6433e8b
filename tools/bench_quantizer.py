"""Compares the 4 bit solver with the hqq package: error as stored, and time. Prints Markdown.

    python tools/bench_quantizer.py [--seeds 5] [--rows 512] [--device cuda]

Ours is measured as stored (scale and zero in bf16), hqq with its own fp32 scale and zero. On a CPU
one thread and its CPU time; on a CUDA device the median time until the result is there, and whether
ours has the bytes of the CPU's. Wants the extra `hqq`.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor

from g4tool.kernels.int4 import dequantize_int4
from g4tool.quantize import als
from g4tool.quantize.pack import Packed, dequantize
from g4tool.quantize.solvers import workers

COLUMNS = 5376
TIMED_ROWS = 2688
TIMED_ROWS_CUDA = 21504
GROUPS = (32, 64, 128)
# The driver's block on a CPU at this width.
BLOCK_ROWS = 24


def weights(kind: str, rows: int, seed: int) -> Tensor:
    """bf16 [rows, COLUMNS] of one of the DISTRIBUTIONS, spread like a model's weights."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, COLUMNS)
    normal = torch.randn(shape, generator=generator)
    return (0.02 * DISTRIBUTIONS[kind](normal, generator)).bfloat16()


def _student_t4(normal: Tensor, generator: torch.Generator) -> Tensor:
    squares = torch.zeros_like(normal)
    for _ in range(4):
        squares += torch.randn(normal.shape, generator=generator).square()
    return normal / (squares / 4).sqrt()


def _laplace(normal: Tensor, generator: torch.Generator) -> Tensor:
    uniform = torch.rand(normal.shape, generator=generator) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


def _outliers(normal: Tensor, generator: torch.Generator) -> Tensor:
    chosen = torch.rand(normal.shape, generator=generator) < 0.001
    return torch.where(chosen, normal * 20, normal)


DISTRIBUTIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "gaussian": lambda normal, _: normal,
    "student-t(4)": _student_t4,
    "laplace": _laplace,
    "gaussian, 0.1 % x 20": _outliers,
}


def ours(weight: Tensor, group: int) -> tuple[Tensor, float]:
    """The weight that the stored values mean, and the solver's CPU seconds."""
    start = time.process_time()
    parts = [als.solve(rows, group) for rows in torch.split(weight, BLOCK_ROWS)]
    seconds = time.process_time() - start
    return torch.cat([dequantize(part) for part in parts]), seconds


def theirs(weight: Tensor, group: int) -> tuple[Tensor, float]:
    """The same of the hqq package."""
    start = time.process_time()
    codes, facts = hqq_quantize(weight, group)
    seconds = time.process_time() - start
    values = (codes.float() - facts["zero"]) * facts["scale"]
    return values.reshape(weight.shape), seconds


def hqq_quantize(weight: Tensor, group: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes, and the facts with scale and zero, as the hqq package gives them."""
    from hqq.core.quantize import Quantizer

    result: tuple[Tensor, dict[str, Tensor]] = Quantizer.quantize(
        weight.float(),
        nbits=4,
        group_size=group,
        axis=1,
        bitpack=False,
        device=str(weight.device),
    )
    return result


def same_bytes(one: Packed, other: Packed) -> bool:
    """Whether codes, scales and zeros are equal."""
    assert one.zero is not None
    assert other.zero is not None
    pairs = (one.qdata, other.qdata), (one.scale, other.scale), (one.zero, other.zero)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def on_cuda(rows: int) -> None:
    """The tables for a CUDA device."""
    from g4tool.quantize import triton_als

    print(f"Bytes of {rows} x {COLUMNS} against the CPU's, and the error against hqq's:\n")
    print("| weights | group | equal | hqq | g4 | g4 against hqq |\n|---|--:|---|--:|--:|--:|")
    for kind in DISTRIBUTIONS:
        weight = weights(kind, rows, 0)
        for group in GROUPS:
            with workers("cpu") as crew:
                expected = crew.solve(weight, "hqq", group)
            result = triton_als.solve(weight.cuda(), group)
            assert result.zero is not None
            mine = dequantize_int4(result.qdata, result.scale, result.zero, torch.float32)
            hqq = relative_error(theirs(weight.cuda(), group)[0].cpu(), weight)
            g4 = relative_error(mine.cpu(), weight)
            equal = "yes" if same_bytes(result, expected) else "NO"
            change = 100 * (g4 / hqq - 1)
            print(f"| {kind} | {group} | {equal} | {hqq:.5f} | {g4:.5f} | {change:+.2f} % |")

    print(f"\nMilliseconds for {TIMED_ROWS_CUDA} x {COLUMNS} on the device:\n")
    print("| group | hqq | g4 in PyTorch | g4 kernel | kernel against hqq | G weights/s |")
    print("|--:|--:|--:|--:|--:|--:|")
    weight = weights("gaussian", TIMED_ROWS_CUDA // 8, 0).cuda().repeat(8, 1)
    for group in GROUPS:
        hqq = milliseconds(partial(hqq_quantize, weight, group))
        plain = milliseconds(partial(als.solve, weight[: len(weight) // 4], group)) * 4
        kernel = milliseconds(partial(triton_als.solve, weight, group), 20)
        print(
            f"| {group} | {hqq:.2f} | {plain:.2f} | {kernel:.3f} | 1/{hqq / kernel:.1f} | "
            f"{weight.numel() / kernel / 1e6:.0f} |"
        )


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of `work` on the CUDA device, after a run to warm up."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


def relative_error(values: Tensor, weight: Tensor) -> float:
    """Frobenius norm of the difference over that of the weight."""
    wanted = weight.double()
    return float((values.double() - wanted).norm() / wanted.norm())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512, help="rows of the weights of table 1")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, hqq {version('hqq')}.\n")
        on_cuda(arguments.rows)
        return
    torch.set_num_threads(1)

    print(
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread; "
        f"Python {platform.python_version()}, torch {torch.__version__}, hqq {version('hqq')}.\n"
    )
    print(f"Relative error of {arguments.rows} x {COLUMNS}, mean of {arguments.seeds} seeds:\n")
    print("| weights | group | hqq | g4 | g4 against hqq |\n|---|--:|--:|--:|--:|")
    for kind in DISTRIBUTIONS:
        for group in GROUPS:
            pairs = []
            for seed in range(arguments.seeds):
                weight = weights(kind, arguments.rows, seed)
                pairs.append(
                    [relative_error(run(weight, group)[0], weight) for run in (theirs, ours)]
                )
            hqq, g4 = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
            print(f"| {kind} | {group} | {hqq:.5f} | {g4:.5f} | {100 * (g4 / hqq - 1):+.2f} % |")

    print(f"\nCPU seconds for {TIMED_ROWS} x {COLUMNS} gaussian, best of three:\n")
    print("| group | hqq | g4 | ratio |\n|--:|--:|--:|--:|")
    weight = weights("gaussian", TIMED_ROWS, 0)
    for group in GROUPS:
        hqq, g4 = (min(run(weight, group)[1] for _ in range(3)) for run in (theirs, ours))
        print(f"| {group} | {hqq:.2f} | {g4:.2f} | 1/{hqq / g4:.1f} |")


if __name__ == "__main__":
    main()
