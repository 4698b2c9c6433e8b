"""Measures the peak memory of quantizing layers of 31B's width, 2 against 6 of them.

    python tools/measure_memory.py [--layers 2 6] [--width 5376] [--formats F,F ...] [--folder DIR]

For each number of layers it writes a random checkpoint (1.0 GB a layer at full width) into a
temporary folder, quantizes it into each list of formats, in a process of its own, and prints the
highest RssAnon seen and the maximum resident set. Linux only.
"""

import argparse
import multiprocessing
import resource
import tempfile
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.names import hf_name
from g4tool.checkpoint.writer import write_checkpoint
from g4tool.files import write_json
from g4tool.model.config import TextConfig
from g4tool.model.variants import VARIANTS

_POLL_SECONDS = 0.01


def config_of(layers: int, width: int) -> TextConfig:
    """31B with fewer layers, all sizes in the ratio of `width` to 31B's, and a small vocabulary."""
    full = VARIANTS["31b"]
    heads = max(4, full.num_heads * width // full.hidden_size)
    kept = tuple(
        replace(
            layer,
            intermediate_size=layer.intermediate_size * width // full.hidden_size,
            num_kv_heads=max(1, layer.num_kv_heads * heads // full.num_heads),
        )
        for layer in full.layers[6 - layers % 6 : 6 - layers % 6 + layers]
    )
    return replace(full, hidden_size=width, num_heads=heads, layers=kept, vocab_size=4096)


def write_random(folder: Path, config: TextConfig) -> None:
    """A checkpoint of normal weights in the published layout."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1 << 22, generator=generator).mul_(0.02).bfloat16()
    shapes = {hf_name(name, "model."): shape for name, shape in text_tensors(config).items()}

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        rest = shapes[name][1:]
        count = (stop - start) * (rest[0] if rest else 1)
        repeats = -(-count // len(pool))
        return pool.repeat(repeats)[:count].reshape(stop - start, *rest)

    write_json(folder / "config.json", to_hf_config(config))
    write_checkpoint(folder, {n: (torch.bfloat16, s) for n, s in shapes.items()}, read)


def peak_of(folder: Path, formats: str) -> tuple[int, int]:
    """Highest RssAnon and maximum resident set in bytes of a process that quantizes `folder`."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(folder, formats, theirs)
    )
    process.start()
    theirs.close()
    anonymous, resident = ours.recv()
    process.join()
    return anonymous, resident


def _work(folder: Path, formats: str, pipe: Connection) -> None:
    from g4tool.checkpoint.reader import open_checkpoint
    from g4tool.pipeline.hashes import FileHashes
    from g4tool.pipeline.work import Work
    from g4tool.progress import silent
    from g4tool.quantize.options import QuantizeOptions
    from g4tool.quantize.policy import plan
    from g4tool.stages.bundles import Bundles

    highest = [0]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            highest[0] = max(highest[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpoint, options = open_checkpoint(folder), QuantizeOptions()
    with tempfile.TemporaryDirectory(dir=folder) as out:
        Bundles(
            work=Work("quantize", Path(out), (), FileHashes(Path(out) / "hashes"), silent),
            checkpoint=checkpoint,
            options=options,
            plans=plan(checkpoint, options),
            formats=tuple(formats.split(",")),
            device="cpu",
            source={},
            recipe={},
            versions={},
        ).write()
    finished.set()
    watcher.join()
    pipe.send((highest[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this is not Linux")


def main() -> None:
    """Print one line for each number of layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--width", type=int, default=5376)
    parser.add_argument("--formats", nargs="+", default=["torchao"], help="comma-separated lists")
    parser.add_argument("--folder", type=Path, help="where the temporary checkpoints go")
    arguments = parser.parse_args()
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            write_random(Path(folder), config_of(layers, arguments.width))
            for formats in arguments.formats:
                anonymous, resident = peak_of(Path(folder), formats)
                print(
                    f"{layers} layers, {formats}: RssAnon {anonymous / 2**20:.0f} MiB, "
                    f"maximum resident set {resident / 2**20:.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
