"""`g4 bench`: speed as shares of what the machine allows."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import using_model
from g4tool.cli.output import size
from g4tool.errors import UsageError

if TYPE_CHECKING:
    import torch

HELP = """Measure prefill, decode, load and memory of a model.

Read bandwidth and matrix rate are measured in the same run, the bytes and operations that the model
needs are counted, and each speed is given as a share of what they allow.

    g4 bench build/31b-int4 --prompt 2000

    g4 bench google/gemma-4-E2B-it --against transformers
"""


class Against(StrEnum):
    """What to measure beside it."""

    TRANSFORMERS = "transformers"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "bench", help=HELP)(bench)


def bench(
    env: Env,
    model: Annotated[str, typer.Argument(help="Hub id, folder, or a tiny model's name.")],
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option(help="New tokens after it.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs that the median is taken of.")] = 3,
    against: Annotated[
        Against | None, typer.Option(help="Run this beside it, on the same folder.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="PyTorch's own operators only, no kernels of g4.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of activations: bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one].")
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "main",
) -> None:
    """Measure the model, the limits, then what it is compared with; print a table."""
    for name, value, least in (("prompt", prompt, 1), ("new", new, 2), ("repeats", repeats, 1)):
        if value < least:
            raise UsageError(f"--{name} is {value}: give at least {least}.")

    import torch

    from g4tool.evaluate import bench as measure
    from g4tool.stages.environment import choose_device
    from g4tool.stages.loading import parse_dtype

    numbers, place = parse_dtype(dtype), torch.device(choose_device(device))
    data: dict[str, Any] = {"model": model, "device": str(place), "prompt": prompt, "new": new}
    with using_model(env, model, revision) as folder:
        data |= _own(env, folder, numbers, place, prompt, new, repeats, plain)
        if against is not None:
            speed = measure.measure_transformers(str(folder), numbers, place, prompt, new, repeats)
            data["transformers"] = measure.rates(speed)
    env.out.result(data, _table(data))


def _own(
    env: Env,
    folder: Path,
    dtype: "torch.dtype",
    device: "torch.device",
    prompt: int,
    new: int,
    repeats: int,
    plain: bool,
) -> dict[str, Any]:
    from g4tool.evaluate import bench as measure
    from g4tool.generate.figures import peak_memory
    from g4tool.kernels.register import use_triton
    from g4tool.model.text import TextModel
    from g4tool.stages.loading import load_to_run

    use_triton(not plain)
    with env.out.progress() as report:
        (model, _), loaded = measure.timed(lambda: load_to_run(folder, dtype, str(device), report))
    speed = measure.measure_speed(model, prompt, new, repeats)
    figures = {"load_seconds": round(loaded, 3), "peak_memory_bytes": peak_memory(device)}
    figures |= measure.rates(speed)
    if isinstance(model, TextModel):
        # After the peak was read: the limits take arrays of their own.
        limits = measure.measure_limits(device, dtype)
        figures |= measure.shares(speed, measure.count_work(model, prompt), limits)
    return figures


def _table(data: dict[str, Any]) -> str:
    lines = [
        f"{data['model']} on {data['device']}: load {data['load_seconds']:.2f} s, "
        f"peak memory {size(data['peak_memory_bytes'])}"
    ]
    for label, share, of in (
        ("prefill", "prefill_of_matmul_rate", "matrix rate"),
        ("decode", "decode_of_read_bandwidth", "read bandwidth"),
    ):
        line = f"{label:8}{data[f'{label}_tokens_per_second']:10.1f} tok/s"
        if share in data:
            line += f"  {100 * data[share]:5.1f} % of the {of}"
        if "transformers" in data:
            rate = data["transformers"][f"{label}_tokens_per_second"]
            line += f"  (transformers {rate:.1f} tok/s)"
        lines.append(line)
    if "decode_bytes" in data:
        lines.append(
            f"a token reads {size(data['decode_bytes'])} and takes "
            f"{data['operations'] / 1e9:.2f} G operations; measured limits: "
            f"{data['read_bytes_per_second'] / 1e9:.1f} GB/s, "
            f"{data['matmul_operations_per_second'] / 1e12:.2f} T operations/s"
        )
    return "\n".join(lines)
