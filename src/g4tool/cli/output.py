"""The one place that writes to the terminal: results to stdout, everything else to stderr."""

import codecs
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from g4tool.errors import G4Error
from g4tool.progress import Progress, Report, silent


class OutputError(G4Error):
    """Standard output is closed or takes no more: there is no use in going on."""


class Output:
    """Human text or one JSON object, as the flags say; `quiet` silences notes and progress."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet or as_json

    def result(self, data: dict[str, Any], text: str) -> None:
        """Print a command's result: `data` under --json, `text` otherwise. Raises OutputError."""
        if self.as_json:
            self.answer(_json(data) + "\n")
        elif text:
            self.answer(text + "\n")

    def answer(self, text: str) -> None:
        """Stream a part of a result. Raises OutputError."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            discard_stdout()
            raise OutputError(
                f"standard output takes no more ({error.strerror or error}): redirect it elsewhere."
            ) from error

    def note(self, text: str) -> None:
        """Tell a person something that is not the result."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def thought(self, text: str) -> None:
        """Stream what the model thinks, apart from its answer."""
        if not self.quiet:
            sys.stderr.write(text)
            sys.stderr.flush()

    def warn(self, text: str) -> None:
        """Tell a person something that matters even under --quiet."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def error(self, text: str, exit_code: int) -> None:
        """Print a failure: an object with `error` under --json, one line on stderr otherwise."""
        if self.as_json:
            try:
                self.answer(_json({"error": {"message": text, "exit_code": exit_code}}) + "\n")
                return
            except OutputError:
                # Then a person may still read it.
                pass
        self.fault(text)

    def fault(self, text: str) -> None:
        """Print what went wrong for a person, whatever the flags say."""
        print(f"g4: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def progress(self) -> Iterator[Report]:
        """A report that draws one bar a job on a terminal, and nothing anywhere else."""
        if self.quiet or not sys.stderr.isatty():
            yield silent
            return
        from rich.console import Console
        from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}% {task.fields[note]}"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            tasks: dict[str, TaskID] = {}

            def report(step: Progress) -> None:
                if step.job not in tasks:
                    tasks[step.job] = bars.add_task(step.job, total=step.total, note="")
                bars.update(tasks[step.job], completed=step.done, total=step.total, note=step.note)

            yield report


def open_streams() -> None:
    """Make the standard streams usable as they are given. Raises OutputError without a stdout.

    Characters that the terminal's encoding lacks come out as escapes; input that is no text in its
    encoding raises UnicodeDecodeError when it is read.
    """
    # `open` takes the lowest free descriptor, so each stands where the closed stream was and no
    # other file can come to stand there.
    closed = sys.stdout is None
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 (open as long as the process)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if closed:
        raise OutputError("standard output is closed: redirect it to a file or to /dev/null.")
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def discard_stdout() -> None:
    """Send what is still to be written to stdout nowhere, so that no later flush fails again."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _json(data: dict[str, Any]) -> str:
    # Only UTF-8 holds every character, and an escape of the encoding's own would be no JSON.
    utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=not utf8)


def size(count: float) -> str:
    """`count` bytes in decimal units, as disks and the Hub count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Plain aligned columns: readable in a terminal, a log and a bug report alike."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
