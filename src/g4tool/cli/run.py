"""`g4 run`: text from a checkpoint, a view, a bundle or an exported program."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.cli.models import using_model
from g4tool.cli.output import OutputError, size
from g4tool.errors import G4Error, UsageError
from g4tool.parallel.launch import launched

if TYPE_CHECKING:
    import torch

    from g4tool.generate.channels import Piece
    from g4tool.generate.conversation import Conversation, Write
    from g4tool.generate.sampler import Sampling
    from g4tool.parallel.group import World

HELP = """Stream text from a model.

MODEL is a folder (checkpoint, bundle or exported program), a Hub id or a tiny model's name.
Without PROMPT it reads standard input, or chats on a terminal. The last line, on stderr, says what
it cost.

    g4 run build/tiny-31b "Tell me about the sea."

    g4 run google/gemma-4-E2B-it --chat

    torchrun --nproc-per-node 2 -m g4tool run google/gemma-4-31B-it "Tell me about the sea."
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "run", help=HELP)(run)


def run(
    env: Env,
    model: Annotated[str, typer.Argument(help="Hub id, folder, or a tiny model's name.")],
    prompt: Annotated[str | None, typer.Argument(help="What to say to the model.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Several turns, one line each.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Let the model think; its thoughts go to stderr.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many new tokens a turn.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest that make up p.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="On CUDA, PyTorch's own operators only.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of activations: bf16, fp16 or fp32.")] = "bf16",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one].")
    ] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the Hub.")] = "main",
) -> None:
    """Load the model, run one prompt or a chat, print one line of figures."""
    if raw and (chat or system or thinking):
        raise UsageError("--raw takes the prompt as it is: leave out --chat, --system, --thinking.")
    if env.as_json and chat:
        raise UsageError("--json gives one object for one prompt: leave out --chat.")
    interactive = chat or (prompt is None and sys.stdin.isatty() and not raw and not env.as_json)
    if launched():
        # Several processes cannot share one standard input.
        if chat or prompt is None:
            raise UsageError("under torchrun, give the prompt as an argument; there is no --chat.")
        if temperature and seed is None:
            raise UsageError("under torchrun, sampling needs --seed, the same for all ranks.")
    if prompt is None and not interactive:
        prompt = "" if sys.stdin.isatty() else _read(sys.stdin.read)
        if not prompt:
            raise UsageError("there is no prompt: give one, or pipe one in.")
    _check_text("PROMPT", prompt)
    _check_text("--system", system)

    from g4tool.generate.sampler import Sampling
    from g4tool.kernels.register import use_triton
    from g4tool.stages.environment import choose_device
    from g4tool.stages.loading import parse_dtype

    use_triton(not plain)
    if max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens is {max_new_tokens}: give at least 1.")
    sampling = Sampling(temperature, top_k, top_p, seed)
    numbers, place = parse_dtype(dtype), choose_device(device)
    with _ranks(env, place) as (place, group):
        began = time.perf_counter()
        with using_model(env, model, revision) as folder:
            conversation = _load(env, folder, numbers, place, raw, system, thinking, group)
        loaded = time.perf_counter() - began
        if interactive:
            _converse(env, conversation, prompt, sampling, max_new_tokens)
            text = ""
        else:
            assert prompt is not None
            text = conversation.say(prompt, _writer(env), sampling, max_new_tokens)
        _report(env, conversation, text, loaded, place)


@contextmanager
def _ranks(env: Env, device: str) -> "Iterator[tuple[str, World | None]]":
    """This process's device, and its group where torchrun started several; rank 0 alone prints."""
    if not launched():
        yield device, None
        return
    from g4tool.parallel.group import rank_device, world

    own = rank_device(device)
    with world(own) as group:
        if group is not None and group.rank > 0:
            env.out.quiet = True
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                yield own, group
            return
        yield own, group


def _load(
    env: Env,
    folder: Path,
    dtype: "torch.dtype",
    device: str,
    raw: bool,
    system: str | None,
    thinking: bool,
    group: "World | None",
) -> "Conversation":
    from g4tool.generate.chat import load_chat_template
    from g4tool.generate.conversation import Conversation
    from g4tool.generate.tokenizer import Tokenizer
    from g4tool.stages.loading import load_to_run
    from g4tool.stages.ranks import load_rank

    with env.out.progress() as report:
        if group is None:
            model, files = load_to_run(folder, dtype, device, report)
        else:
            model, files = load_rank(folder, dtype, device, group, report)
    template = None if raw else load_chat_template(files)
    return Conversation(model, Tokenizer(files), template, system, thinking)


def _writer(env: Env) -> "Write":
    def write(piece: "Piece") -> None:
        if piece.channel is not None:
            env.out.thought(piece.text)
        elif not env.as_json:
            env.out.answer(piece.text)

    return write


def _converse(
    env: Env,
    conversation: "Conversation",
    prompt: str | None,
    sampling: "Sampling",
    max_new_tokens: int,
) -> None:
    """Turns until the input ends; an interrupt ends the answer, a second one the chat.

    A turn that fails is told, and the chat goes on as if it had not been.
    """
    while True:
        if prompt is None:
            prompt = _next_line()
            if prompt is None:
                return
        if prompt.strip():
            try:
                conversation.say(
                    prompt.strip(), _writer(env), sampling, max_new_tokens, env.out.warn
                )
            except KeyboardInterrupt:
                env.out.note(" (interrupted)")
            except OutputError:
                raise
            except G4Error as error:
                env.out.fault(str(error))
            env.out.answer("\n")
        prompt = None


def _next_line() -> str | None:
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = _read(sys.stdin.readline)
    return None if not line or line.strip() in ("/exit", "/quit") else line


def _read(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is no {error.encoding} text ({error.reason}, byte {error.start}):"
            " convert it first."
        ) from error


def _check_text(name: str, text: str | None) -> None:
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        # Python hands on bytes that are no text as half characters, which no tokenizer takes.
        raise UsageError(f"{name} is no UTF-8 text at character {error.start}.") from error


def _report(
    env: Env, conversation: "Conversation", text: str, load_seconds: float, device: str
) -> None:
    import torch

    from g4tool.generate.figures import peak_memory

    figures = conversation.figures
    peak = peak_memory(torch.device(device))
    if env.as_json:
        env.out.result(
            {
                "text": text,
                "load_seconds": round(load_seconds, 3),
                "prefill_tokens": figures.prefill_tokens,
                "prefill_tokens_per_second": round(figures.prefill_rate, 2),
                "decode_tokens": figures.decode_tokens,
                "decode_tokens_per_second": round(figures.decode_rate, 2),
                "peak_memory_bytes": peak,
                "device": device,
            },
            "",
        )
        return
    if text and not text.endswith("\n"):
        env.out.answer("\n")
    env.out.note(
        f"load {load_seconds:.2f} s, prefill {figures.prefill_tokens} tokens at "
        f"{figures.prefill_rate:.1f} tok/s, decode {figures.decode_tokens} tokens at "
        f"{figures.decode_rate:.1f} tok/s, peak memory {size(peak)} ({device})"
    )
