"""From files to files: quantizing a checkpoint's layers, and loading it and its bundle.

    python tools/bench_files.py [--layers 8] [--width 5376] [--device cuda] [--folder DIR]

Prints Markdown. The checkpoint has random layers of 31B's shape and lies in the page cache (in
/dev/shm with `--folder /dev/shm`). Quantizing ends when every file is flushed and hashed, as in
`g4 quantize`; beside it what each part takes alone, in one thread. Loading stands beside reading
the same bytes into one pinned buffer and copying them to the device, block by block.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.load import load_text_model
from g4tool.checkpoint.reader import open_checkpoint
from g4tool.files import sha256, write_json
from g4tool.formats.bundle import BUNDLE
from g4tool.formats.load import load_bundle
from g4tool.pipeline.fingerprint import Json
from g4tool.pipeline.hashes import FileHashes
from g4tool.pipeline.work import Work
from g4tool.progress import silent
from g4tool.quantize import account, bundle, driver, policy
from g4tool.quantize.options import QuantizeOptions, Rule
from g4tool.quantize.solvers import workers
from measure_memory import config_of, write_random

OPTIONS = QuantizeOptions(rules=(Rule(r"^embed_tokens\.weight$", "int8"),))
BLOCK = 1 << 26


def main() -> None:
    """Run both parts and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=5376)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--at-once", type=int, nargs="*", help="files made at once, run by run")
    parser.add_argument("--folder", type=Path, help="where the temporary files go")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}\n")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source = Path(folder, "source")
        source.mkdir()
        write_random(source, config_of(arguments.layers, arguments.width))
        checkpoint = open_checkpoint(source)
        began = time.perf_counter()
        with workers(arguments.device) as crew:
            crew.solve(torch.ones(32, 128, dtype=torch.bfloat16), "hqq", 32)
        print(f"the first solve, with compiling: {time.perf_counter() - began:.2f} s")
        for at_once in arguments.at_once or [driver.units_at_once(arguments.device)] * 3:
            made = quantizing(checkpoint, Path(folder), arguments.device, at_once)
        parts(checkpoint, made, Path(folder), arguments.device)
        finish_bundle(checkpoint, made)
        loading(source, made, arguments.device)


def quantizing(checkpoint: Checkpoint, folder: Path, device: str, at_once: int) -> Path:
    """Quantize into `folder` anew, print the rate, give the bundle's folder."""
    units = driver.units(policy.plan(checkpoint, OPTIONS))
    for old in sorted((folder / "partial").rglob("*"), reverse=True):
        old.rmdir() if old.is_dir() else old.unlink()
    work = Work("quantize", folder / "partial", (), FileHashes(folder / "hashes"), silent)

    def shard(unit: driver.Unit, path: Path) -> Json:
        return account.to_json(driver.quantize_unit(checkpoint, unit, path, device))

    began = time.perf_counter()
    work.together([partial(work.file, u.file, partial(shard, u)) for u in units], at_once)
    seconds = time.perf_counter() - began
    weights = sum(checkpoint.info(name).nbytes // 2 for name in checkpoint.names)
    print(
        f"{len(units)} files, {at_once} at once, {weights / 1e9:.2f} G weights in {seconds:.2f} s: "
        f"{weights / 1e9 / seconds:.2f} G weights/s"
    )
    return work.path


def parts(checkpoint: Checkpoint, made: Path, folder: Path, device: str) -> None:
    """What reading, solving, writing and hashing one layer take alone, in one thread."""
    unit = driver.units(policy.plan(checkpoint, OPTIONS))[-1]
    plans = [item for item in unit.tensors if item.scheme != "keep"]
    weights = sum(checkpoint.info(item.source).nbytes // 2 for item in plans)
    where = torch.device(device)
    file = made / unit.file
    content = file.read_bytes()

    def read() -> None:
        for item in plans:
            for _ in driver.blocks(checkpoint, item, where):
                pass

    blocks = [(item, rows) for item in plans for _, rows in driver.blocks(checkpoint, item, where)]

    def solve() -> None:
        with workers(device) as crew:
            for item, rows in blocks:
                crew.solve(rows, item.solver or "", item.group_size or 0)

    print(f"\nOne layer, {weights / 1e9:.2f} G weights, one thread:\n")
    print("| part | s | G weights/s |\n|---|--:|--:|")
    steps: dict[str, Callable[[], object]] = {
        "read, copy to the device, check": read,
        "solve, copy back": solve,
        "write": lambda: (folder / "copy").write_bytes(content),
        "hash": lambda: sha256(file),
        "all": lambda: driver.quantize_unit(checkpoint, unit, folder / "copy", device),
    }
    for label, step in steps.items():
        step()
        took = seconds(step)
        print(f"| {label} | {took:.3f} | {weights / 1e9 / took:.2f} |")


def finish_bundle(checkpoint: Checkpoint, made: Path) -> None:
    """Write the small files beside the shards."""
    plans = policy.plan(checkpoint, OPTIONS)
    write_json(made / "config.json", bundle.bundle_config(checkpoint, OPTIONS, plans))
    write_json(made / "model.safetensors.index.json", bundle.bundle_index(driver.units(plans)))
    about = bundle.lineage(checkpoint, [], source={}, recipe={}, versions={})
    write_json(made / BUNDLE, about)


def loading(source: Path, made: Path, device: str) -> None:
    """Seconds to load the checkpoint and the bundle, beside reading and copying their bytes."""
    print("\n| load | GB | read and copy | g4 | ratio |\n|---|--:|--:|--:|--:|")
    jobs: dict[str, tuple[Path, Callable[[], object]]] = {
        "checkpoint": (
            source,
            lambda: load_text_model(open_checkpoint(source), torch.bfloat16, device),
        ),
        "bundle": (made, lambda: load_bundle(made, torch.bfloat16, device)),
    }
    for label, (folder, load) in jobs.items():
        files = sorted(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        plain = min(seconds(partial(read_and_copy, files, device)) for _ in range(3))
        ours = min(seconds(load) for _ in range(3))
        print(f"| {label} | {size / 1e9:.2f} | {plain:.2f} | {ours:.2f} | {ours / plain:.2f} |")


def read_and_copy(files: list[Path], device: str) -> list[torch.Tensor]:
    """The files' bytes on the device, by way of one pinned buffer."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=device == "cuda")
    held = []
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while got := stream.readinto(buffer.numpy().data):
                held.append(buffer[:got].to(device, copy=True))
    return held


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of `work`, with everything it gave freed afterwards."""
    began = time.perf_counter()
    kept = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    del kept
    return took


if __name__ == "__main__":
    main()
