"""How fast a model runs, as shares of what this machine's memory and arithmetic allow.

The limits are measured in the same run: one pass over a large array, and one large matrix product.
What decoding must read and multiply is counted from the model's own tensors.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from g4tool.errors import UsageError
from g4tool.generate.figures import Figures, clock
from g4tool.generate.loop import LanguageModel, Session
from g4tool.model.text import TextModel

T = TypeVar("T")

_TABLES = ("embed_tokens", "embed_tokens_per_layer")
# Far larger than any cache, far smaller than any memory.
_READ_BYTES = {"cpu": 2**29, "cuda": 2**32}
_SQUARE = {"cpu": 2048, "cuda": 8192}
_REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """What the machine does at most: bytes read a second, operations a second in the dtype."""

    read: float
    matmul: float


@dataclass(frozen=True)
class Work:
    """What one pass must do: bytes read at decode, and operations a token (2 a multiply-add)."""

    decode_bytes: int
    operations: int


@dataclass(frozen=True)
class Speed:
    """Tokens a second, medians of all repeats."""

    prefill: float
    decode: float


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """The limits of `device` as torch reaches them."""
    size = _READ_BYTES[device.type]
    # Random values: zeros can be quicker.
    values = torch.rand(size // 4, device=device)
    read = size / seconds(partial(torch.sum, values), device)
    del values
    side = _SQUARE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Limits(read, 2 * side**3 / seconds(lambda: left @ right, device))


def seconds(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median wall seconds of `work`, done on the device too, after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        began = clock(device)
        work()
        times.append(clock(device) - began)
    return statistics.median(times)


def count_work(model: TextModel, context: int) -> Work:
    """What one token costs with `context` tokens before it.

    Every weight is read once, of experts only the chosen ones, of embedding tables one row unless
    the table is also the output head; and the keys and values of the tokens that are seen.
    """
    config = model.config
    read = operations = 0
    for name, tensor in _weights(model):
        owner = name.split(".")[0]
        share = 1.0
        if owner in _TABLES and not (owner == "embed_tokens" and config.tie_word_embeddings):
            share = 1 / tensor.shape[0]
        if ".experts." in name and config.moe is not None:
            share = config.moe.top_k / config.moe.num_experts
        read += round(share * tensor.nbytes)
        if tensor.dim() >= 2 and not name.endswith((".scale", ".zero", ".scale_zero")):
            packed = 2 if tensor.dtype == torch.uint8 else 1
            operations += round(2 * share * packed * tensor.numel())
    for layer in config.layers:
        seen = min(context, config.sliding_window) if layer.attention == "sliding" else context
        held = 2 * seen * layer.num_kv_heads * layer.head_dim
        read += held * model.norm.weight.element_size()
        operations += 4 * seen * config.num_heads * layer.head_dim
    return Work(read, operations)


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if ".cache." not in name:
            yield name, buffer


def measure_speed(model: LanguageModel, prompt: int, new: int, repeats: int) -> Speed:
    """Prefill of `prompt` random tokens, then `new` tokens greedily, once to warm up.

    Raises UsageError where the model has no room for them.
    """
    room = model.config.max_position_embeddings
    if prompt + new > room:
        raise UsageError(f"the model has room for {room} tokens, not for {prompt} and {new} more.")
    random = torch.Generator().manual_seed(0)
    session = Session(model, prompt + new)
    runs = []
    for _ in range(repeats + 1):
        ids = torch.randint(0, model.config.vocab_size, (prompt,), generator=random).tolist()
        session.figures = Figures()
        for _step in session.generate([ids], max_new_tokens=new):
            pass
        runs.append(session.figures)
    session.close()
    return Speed(
        statistics.median(run.prefill_rate for run in runs[1:]),
        statistics.median(run.decode_rate for run in runs[1:]),
    )


def measure_transformers(
    folder: str, dtype: torch.dtype, device: torch.device, prompt: int, new: int, repeats: int
) -> Speed:
    """The same of `transformers`' own model of a checkpoint's folder, with its dynamic cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    random = torch.Generator().manual_seed(0)
    prefills, decodes = [], []
    with torch.no_grad():
        for _ in range(repeats + 1):
            vocab = model.config.get_text_config().vocab_size
            ids = torch.randint(0, vocab, (1, prompt), generator=random).to(device)
            began = clock(device)
            out = model(ids, use_cache=True, logits_to_keep=1)
            middle = clock(device)
            for _step in range(new - 1):
                ids = out.logits[:, -1:].argmax(-1)
                out = model(ids, past_key_values=out.past_key_values, use_cache=True)
                ids.tolist()
            prefills.append(prompt / (middle - began))
            decodes.append((new - 1) / (clock(device) - middle))
    return Speed(statistics.median(prefills[1:]), statistics.median(decodes[1:]))


def rates(speed: Speed) -> dict[str, float]:
    """The speeds, for a table or JSON."""
    return {
        "prefill_tokens_per_second": round(speed.prefill, 2),
        "decode_tokens_per_second": round(speed.decode, 2),
    }


def shares(speed: Speed, work: Work, limits: Limits) -> dict[str, float]:
    """What the speeds are of the limits, and both; an exported program's work is not known."""
    return {
        "prefill_of_matmul_rate": round(speed.prefill * work.operations / limits.matmul, 4),
        "decode_of_read_bandwidth": round(speed.decode * work.decode_bytes / limits.read, 4),
        **asdict(work),
        "read_bytes_per_second": round(limits.read),
        "matmul_operations_per_second": round(limits.matmul),
    }


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its wall seconds."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began
