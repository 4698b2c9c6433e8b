"""The `g4` command: registers every command, runs one, and formats every failure once."""

import signal
import sys
from typing import Annotated, NoReturn

import typer
from typer import _click

from g4tool import __version__
from g4tool.cli import (
    bench,
    build,
    cache,
    compile_neuron,
    convert,
    download,
    evaluate,
    export_cpu,
    export_cuda,
    quantize,
    run,
    upload,
    verify,
)
from g4tool.cli import recipe as recipe_commands
from g4tool.cli.common import (
    DebugOption,
    HomeOption,
    JsonOption,
    QuietOption,
    RecipeOption,
    SetOption,
    YesOption,
    merge,
)
from g4tool.cli.output import Output, OutputError, discard_stdout, open_streams
from g4tool.errors import G4Error

HELP = """Take a Gemma 4 model from the Hub to where it runs.

A first look, with a small model that ships with the tool: g4 build tiny-31b
"""

app = typer.Typer(
    name="g4",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
COMMANDS = (
    build,
    download,
    convert,
    quantize,
    export_cpu,
    export_cuda,
    compile_neuron,
    run,
    verify,
    evaluate,
    bench,
    upload,
)
for module in COMMANDS:
    module.register(app)
app.add_typer(recipe_commands.app, name="recipe")
app.add_typer(cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"g4 {__version__}")
        raise typer.Exit


def shared(
    context: typer.Context,
    recipe: RecipeOption = None,
    set: SetOption = None,  # noqa: A002  (the option's name)
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
    yes: YesOption = False,
    home: HomeOption = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep the options given before the command's name for the command."""
    values = {"recipe": recipe, "set": set, "json": json, "quiet": quiet}
    root = context.find_root()
    root.obj = merge(root.obj, values | {"debug": debug, "yes": yes, "home": home})


for group in (app, recipe_commands.app, cache.app):
    group.callback()(shared)


_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
_GO_ON = "; what was finished is kept, run the same command to go on."


class _Terminated(BaseException):
    """SIGTERM came. No Exception, so that only clean-up code sees it on its way out."""


def main() -> NoReturn:
    """Run the command line; exit 0 when done, 1 failed, 2 wrong usage, 3 done as far as possible,
    130 interrupted, 143 terminated.

    Typer's own handling is off: its usage errors would print no JSON under --json.
    """
    arguments = sys.argv[1:]
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    out = Output(as_json="--json" in options)
    try:
        open_streams()
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)
        code = app(arguments, prog_name="g4", standalone_mode=False)
        if code == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
        _exit(out, code if isinstance(code, int) else 0)
    except typer.Abort:
        _fail(out, "stopped.", 1)
    except _click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        _exit(out, 2)
    except _click.exceptions.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" See `{context.command_path} --help`." if context else ""
        message = error.format_message().rstrip()
        stop = "" if message.endswith((".", "?", "!")) else "."
        _fail(out, message + stop + where, error.exit_code)
    except KeyboardInterrupt:
        _fail(out, f"interrupted{_GO_ON}", _INTERRUPTED)
    except _Terminated:
        _fail(out, f"terminated{_GO_ON}", _TERMINATED)
    except BrokenPipeError:
        _exit(out, 1)
    except OutputError as error:
        out.fault(str(error))
        _exit(out, 1)
    except G4Error as error:
        if "--debug" in options:
            raise
        _fail(out, str(error), error.exit_code)
    except Exception as error:
        if "--debug" in options:
            raise
        _fail(out, f"{_unexpected(error)} Run again with --debug for the traceback.", 1)
    finally:
        if signal.getsignal(signal.SIGTERM) == _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_: object) -> NoReturn:
    # A second one ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise _Terminated


def _unexpected(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"unexpected {type(error).__name__}: {text[:300]}."


def _fail(out: Output, message: str, code: int) -> NoReturn:
    out.error(message, code)
    _exit(out, code)


def _exit(out: Output, code: int) -> NoReturn:
    """End the process with `code`, or with 1 where the last of a result cannot be written."""
    try:
        out.answer("")
    except BrokenPipeError:
        discard_stdout()
        code = code or 1
    except OutputError as error:
        out.fault(str(error))
        code = code or 1
    sys.exit(code)
