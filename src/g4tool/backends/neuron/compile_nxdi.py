"""Compiles a checkpoint with NxD Inference; what `g4 compile-neuron` runs in the SDK's own Python.

Run: python -m g4tool.backends.neuron.compile_nxdi --model DIR --config neuron_config.json --out DIR

Standard output is one JSON object a line and nothing else; what the SDK prints goes to standard
error. A bucket that was compiled before is taken from the compiler's cache under OUT, so a run that
was stopped goes on where it was. Needs torch, safetensors and the SDK, and no other package.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any

from g4tool.backends.neuron.interface import CompileJob, EventReport
from g4tool.checkpoint.folder import read_json
from g4tool.errors import G4Error

WORK = "work"
CACHE = "compile-cache"
_PACKAGES = (
    "torch",
    "torch-neuronx",
    "neuronx-cc",
    "neuronx-distributed",
    "neuronx-distributed-inference",
)
# Seconds between two looks for finished programs.
_INTERVAL = 2.0


def compile_model(job: CompileJob, report: EventReport) -> None:
    """Writes model.pt (the programs) and neuron_config.json to job.out, with NxD Inference.

    Shards that lie in job.out/weights already are left alone. Raises IncompleteError without the
    SDK, G4Error for settings or a model that the port does not run.
    """
    from g4tool.backends.neuron.nxdi import (
        Gemma4InferenceConfig,
        Gemma4NeuronConfig,
        NeuronGemma4ForCausalLM,
    )

    settings = dict(job.settings)
    if _has_shards(job.out, int(settings.get("tp_degree", 1))):
        settings.update(save_sharded_checkpoint=True, skip_sharding=True)
    job.out.mkdir(parents=True, exist_ok=True)
    # The SDK takes these from the environment only.
    os.environ["BASE_COMPILE_WORK_DIR"] = f"{job.out / WORK}/"
    os.environ.setdefault("NEURON_COMPILE_CACHE_URL", str(job.out / CACHE))
    if settings.get("target"):
        os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", str(settings["target"]))
    config = Gemma4InferenceConfig.from_checkpoint(job.model, Gemma4NeuronConfig(**settings))
    model = NeuronGemma4ForCausalLM(str(job.model), config)
    buckets = [
        (part.tag, number, bucket)
        for part in model.models
        for number, bucket in enumerate(part.config.neuron_config.buckets)
    ]
    # As NxD Inference does, but before the first look for finished programs.
    shutil.rmtree(job.out / WORK, ignore_errors=True)
    with _watched(job.out / WORK, buckets, report):
        model.compile(str(job.out))
    report({"event": "done", "files": _made(job.out), "versions": _versions()})


def settings_of(path: Path) -> dict[str, Any]:
    """NxD Inference's settings in a neuron_config.json: under `neuron_config`, or the whole of it.

    Raises G4Error for a file that is not a JSON object.
    """
    content = read_json(path)
    inner = content.get("neuron_config", content)
    if not isinstance(inner, dict):
        raise G4Error(f"{path}: neuron_config is not a JSON object.")
    return inner


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: exit code 0, or an error's, which is then reported as an event too."""
    parser = argparse.ArgumentParser(prog="python -m g4tool.backends.neuron.compile_nxdi")
    for flag in ("--model", "--config", "--out"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--watched", action="store_true", help="end when standard input closes")
    given = parser.parse_args(arguments)
    if given.watched:
        end_with_standard_input()
    with _events() as report:
        try:
            job = CompileJob(given.model, settings_of(given.config), given.out)
            compile_model(job, report)
        except G4Error as error:
            report({"event": "error", "message": str(error), "exit_code": error.exit_code})
            return error.exit_code
        except Exception as error:
            # The SDK's own failure: its traceback goes to the log, its last word to the caller.
            report({"event": "error", "message": f"{type(error).__name__}: {error}"})
            raise
    return 0


def end_with_standard_input() -> None:
    """End this process and all that it started, its process group, once standard input closes.

    Whoever started it may be killed, and compilers that go on alone would be in the next run's way.
    """

    def wait() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGTERM)

    Thread(target=wait, daemon=True).start()


@contextmanager
def _events() -> Iterator[EventReport]:
    """Keeps standard output for events; file descriptor 1 is standard error's meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w") as lines:

            def report(event: Mapping[str, Any]) -> None:
                print(json.dumps(event), file=lines, flush=True)

            yield report
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _watched(
    folder: Path, buckets: Sequence[tuple[str, int, Any]], report: EventReport
) -> Iterator[None]:
    """Reports each bucket when its program appears in NxD's working folder."""
    waiting = list(buckets)
    finished = Flag()

    def look() -> None:
        for tag, number, bucket in list(waiting):
            if any((folder / tag / f"_tp0_bk{number}").glob("*.neff")):
                waiting.remove((tag, number, bucket))
                done = len(buckets) - len(waiting)
                report(
                    {
                        "event": "bucket",
                        "model": tag,
                        "bucket": bucket,
                        "done": done,
                        "total": len(buckets),
                    }
                )

    def watch() -> None:
        while not finished.wait(_INTERVAL):
            look()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        look()


def _has_shards(out: Path, degree: int) -> bool:
    names = (f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(degree))
    return all((out / "weights" / name).is_file() for name in names)


def _made(out: Path) -> list[str]:
    programs = [
        out / "model.pt",
        out / "neuron_config.json",
        *sorted(out.glob(f"{WORK}/**/*.neff")),
    ]
    return [path.relative_to(out).as_posix() for path in programs if path.is_file()]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
