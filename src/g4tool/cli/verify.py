"""`g4 verify`: prove an exported program again, where it is to run."""

from pathlib import Path
from typing import Annotated

import typer

from g4tool.cli.common import Env, command
from g4tool.errors import G4Error

HELP = """Prove an exported program against the model that it was made from.

Checks every file's hash, loads the program, and compares its logits with the eager model's on
prompts that cross the window and on decoding after each.

    g4 verify build/tiny-31b-cpu

    g4 verify build/31b-cpu --against build/31b-int4
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "verify", help=HELP)(verify)


def verify(
    env: Env,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An export's folder.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="BUNDLE", help="What it was exported from [found in the store]."),
    ] = None,
) -> None:
    """Run the stages that need no lowering, and print them."""
    from g4tool.backends.executorch.verify import to_json
    from g4tool.stages.verify import prove, weights_of

    with env.out.progress() as report:
        weights = against or weights_of(env.store, folder)
        if weights is None:
            raise G4Error(
                f"the bundle that {folder} was exported from is not in the store; name its folder "
                f"with --against."
            )
        findings = prove(folder, weights, report)
    for found in findings:
        env.out.note(found.line())
    failed = [found for found in findings if not found.passed]
    if failed:
        raise G4Error(f"{folder} failed its proof at the stage {failed[0].stage!r}.")
    env.out.result({"path": str(folder), "stages": to_json(findings)}, f"{folder}: proved")
