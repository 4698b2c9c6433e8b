"""The one place that writes to the terminal: results to stdout, everything else to stderr."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from g4tool.progress import Progress, Report, silent


class Output:
    """Human text or one JSON object, as the flags say; `quiet` silences notes and progress."""

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet or as_json

    def result(self, data: dict[str, Any], text: str) -> None:
        """Print a command's result: `data` under --json, `text` otherwise."""
        if self.as_json:
            print(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False))
        elif text:
            print(text)
        sys.stdout.flush()

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
            print(json.dumps({"error": {"message": text, "exit_code": exit_code}}, indent=2))
            sys.stdout.flush()
        else:
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
