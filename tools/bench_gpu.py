"""What the quantizer and the runtime do on one CUDA card, beside the hqq package in the same run.

    python tools/bench_gpu.py [--layers 2] [--device cuda]

Prints Markdown: end-to-end quantizing of layers of 31B's width from page cache; one matrix against
hqq; bundles of the tiny models, CUDA against CPU, in bytes and in logits; decode and prefill of the
31B-wide layers. With `--device cpu` it runs the same steps on the CPU, at a smaller width.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.checkpoint.tiny import TINY, write_tiny
from g4tool.files import write_json
from g4tool.formats.bundle import BUNDLE
from g4tool.formats.load import load_bundle
from g4tool.model.text import TextModel
from g4tool.quantize import bundle, driver, policy
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.pack import dequantize
from g4tool.quantize.reference import solve as solve_with_hqq
from g4tool.quantize.solvers import workers
from measure_memory import config_of, write_random

OPTIONS = QuantizeOptions(rules=(Rule(r"^embed_tokens\.weight$", "int8"),))


def main() -> None:
    """Run every part and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = arguments.device
    width = 5376 if device.startswith("cuda") else 672
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor()
    print(f"torch {torch.__version__}, {name or platform.machine()}, width {width}\n")
    with tempfile.TemporaryDirectory() as folder:
        tiny_models(Path(folder), device)
        one_matrix(width, device)
        wide_layers(Path(folder), arguments.layers, width, device)


def quantize(source: Path, target: Path, device: str) -> tuple[int, float]:
    """A bundle of `source` in `target`; source bytes of matrices and seconds."""
    checkpoint = open_checkpoint(source)
    plans = policy.plan(checkpoint, OPTIONS)
    target.mkdir()
    accounts = []
    units = driver.units(plans)
    synchronize(device)
    began = time.perf_counter()
    for unit in units:
        accounts += driver.quantize_unit(checkpoint, unit, target / unit.file, device)
    synchronize(device)
    seconds = time.perf_counter() - began
    write_json(target / "config.json", bundle.bundle_config(checkpoint, OPTIONS, plans))
    write_json(target / "model.safetensors.index.json", bundle.bundle_index(units))
    about = bundle.lineage(checkpoint, accounts, source={}, recipe={}, versions={})
    write_json(target / BUNDLE, about)
    return sum(a.weights for a in accounts if a.scheme != "keep"), seconds


def tiny_models(folder: Path, device: str) -> None:
    """Bytes and logits of the tiny bundles on `device` against the CPU's."""
    print("| tiny bundle | shards equal the CPU's | fp32 logits, max difference |\n|---|---|--:|")
    for model in TINY:
        write_tiny(model, folder / model)
        quantize(folder / model, folder / f"{model}-cpu", "cpu")
        quantize(folder / model, folder / f"{model}-dev", device)
        shards = sorted((folder / f"{model}-cpu").glob("*.safetensors"))
        equal = sum(
            path.read_bytes() == (folder / f"{model}-dev" / path.name).read_bytes()
            for path in shards
        )
        ids = torch.randint(0, 4096, (2, 100), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            here = load_bundle(folder / f"{model}-cpu", torch.float32)(ids)
            there = load_bundle(folder / f"{model}-dev", torch.float32, device)(ids.to(device))
        difference = (here - there.cpu()).abs().max().item()
        print(f"| {model} | {equal} of {len(shards)} | {difference:.1e} |")


def one_matrix(width: int, device: str) -> None:
    """One up projection, groups of 32, against the hqq package."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4 * width, width, generator=generator).mul_(0.02).bfloat16().to(device)
    with workers(device) as crew:
        ours = seconds_of(lambda: crew.solve(weight, "hqq", 32), device)
    theirs = seconds_of(lambda: solve_with_hqq(weight, 32), device, repeats=2)
    sample = weight[: width // 2]
    with workers(device) as crew:
        packed = crew.solve(sample, "hqq", 32)
    error = float(packed.error.sum() / packed.energy.sum()) ** 0.5
    reference = dequantize(solve_with_hqq(sample, 32)).to(device)
    wide = sample.float()
    hqq_error = float((reference - wide).norm() / wide.norm())
    print(
        f"\n{list(weight.shape)} at group 32: g4 {ours:.3f} s, hqq {theirs:.3f} s, ratio "
        f"1/{theirs / ours:.1f}; relative error {error:.5f} against {hqq_error:.5f} "
        f"({100 * (error / hqq_error - 1):+.2f} %)\n"
    )


def wide_layers(folder: Path, layers: int, width: int, device: str) -> None:
    """End-to-end quantizing, then decode and prefill, of `layers` layers."""
    source = folder / "wide"
    source.mkdir()
    write_random(source, config_of(layers, width))
    weights, first = quantize(source, folder / "wide-first", device)
    weights, second = quantize(source, folder / "wide-int4", device)
    print(
        f"{layers} layers of width {width}, read, solved, packed, written: {weights / 1e9:.2f} G "
        f"weights in {second:.2f} s, {weights / 1e9 / second:.2f} G/s (first run {first:.2f} s)\n"
    )
    int4 = load_bundle(folder / "wide-int4", torch.bfloat16, device)
    plain = load_text_model(open_checkpoint(source), torch.bfloat16, device)
    print("| ms a layer | bf16 | int4 g32 | ratio |\n|---|--:|--:|--:|")
    for label, tokens in (("decode at 512", 1), ("prefill 512", 512)):
        times = [layer_time(model, tokens, device) / layers for model in (plain, int4)]
        ratio = times[1] / times[0]
        print(f"| {label} | {1e3 * times[0]:.3f} | {1e3 * times[1]:.3f} | {ratio:.2f} |")
    if device.startswith("cuda"):
        print(f"\npeak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


def layer_time(model: TextModel, tokens: int, device: str) -> float:
    """Median seconds of one pass of `tokens` tokens through all layers, 512 tokens in the cache."""
    model.allocate_cache(1, 1024)
    ids = torch.randint(0, 4096, (1, 512), device=device)
    start = torch.tensor(0 if tokens > 1 else 512, device=device)
    with torch.no_grad():
        model.hidden(ids, torch.tensor(0, device=device))
        result = seconds_of(lambda: model.hidden(ids[:, :tokens], start), device, repeats=10)
    model.drop_cache()
    return result


def seconds_of(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median wall seconds of `work`, after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
