"""`g4 quantize`: the main road, from a checkpoint to an int4 bundle."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, Flag, command
from g4tool.cli.models import check_output, confirm_download, ensure, put
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.artifact import Artifact

HELP = """Quantize a model into an int4 bundle.

One decoder layer at a time: interrupt it, and the next run goes on at the last finished layer.

Ends with an account of every weight: its scheme, size and error.

    g4 quantize --layerwise int4-hqq --model google/gemma-4-31B-it

    g4 quantize int4-hqq --model tiny-31b --group-size 64

    g4 quantize --model tiny-31b --format torchao --format compressed-tensors

    g4 quantize --model tiny-31b --target-bpw 5.6
"""


class SchemeName(StrEnum):
    """Ways to store a weight."""

    int4_hqq = "int4-hqq"
    int4_rtn = "int4-rtn"
    int4_sym = "int4-sym"
    int8 = "int8"
    keep = "keep"


class FormatName(StrEnum):
    """Ways to lay a bundle out in files."""

    torchao = "torchao"
    executorch = "executorch"
    compressed_tensors = "compressed-tensors"


class SolverName(StrEnum):
    """Ways to find a group's scale and zero point."""

    hqq = "hqq"
    rtn = "rtn"
    reference = "reference"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "quantize", help=HELP)(quantize)


def quantize(
    env: Env,
    scheme: Annotated[SchemeName | None, typer.Argument(help="[the recipe's]")] = None,
    layerwise: Annotated[
        bool | None,
        typer.Option(
            "--layerwise/--no-layerwise",
            help="One file and one step to resume from a layer, or one file for all.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder or tiny model [the recipe's].")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Weights a scale: 32, 64 or 128.")] = None,
    solver: Annotated[SolverName | None, typer.Option(help="[the scheme's own]")] = None,
    formats: Annotated[
        list[FormatName] | None,
        typer.Option("--format", help="Layout to write; give it again for more [the recipe's]."),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option(metavar="BITS", help="Choose bits by measured KL, this many a weight."),
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The same for a size, such as 18.5GB.")
    ] = None,
    save_recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the chosen rules go [NAME-GOAL.yaml]."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [cuda where there is one].")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the bundle into this folder too.")
    ] = None,
) -> None:
    """Ensure the quantize stage and print the account."""
    from g4tool.stages.build import build
    from g4tool.stages.environment import choose_device

    flags: dict[str, Flag] = {
        "model": model,
        "revision": revision,
        "quantize.scheme": scheme.value if scheme else None,
        "quantize.layerwise": layerwise,
        "quantize.group_size": group_size,
        "quantize.solver": solver.value if solver else None,
        "quantize.formats": [name.value for name in formats] if formats else None,
    }
    recipe = env.recipe(None, flags, section="quantize")
    if target_bpw is not None or target_size is not None:
        from g4tool.cli.assign import assigned, parse_size

        if target_bpw is not None and target_size is not None:
            raise UsageError("--target-bpw and --target-size are two goals: give one.")
        if scheme or group_size or solver:
            raise UsageError("a target chooses schemes and groups itself: leave them out.")
        nbytes = parse_size(target_size) if target_size is not None else None
        place = choose_device(device)
        recipe = assigned(env, recipe, target_bpw, nbytes, save_recipe, place)
    elif save_recipe:
        raise UsageError("--save-recipe goes with --target-bpw or --target-size.")
    chosen = build(recipe, device)
    assert chosen.quantize is not None, "the section is there"
    check_output(env, chosen.quantize, output)
    confirm_download(env, chosen.source)
    artifact = ensure(env, chosen.quantize)
    with env.store.using(artifact):
        folder = put(env, artifact, output)
    show_account(env, artifact)
    own = env.recipe(None, flags | {"quantize.scheme": None}, section="quantize").quantize
    if scheme and own and own.scheme != scheme.value:
        _show_exceptions(env, artifact, scheme.value)
    env.out.result(
        {"identity": artifact.identity, "path": str(folder), **artifact.manifest["facts"]},
        str(folder),
    )


def _show_exceptions(env: Env, artifact: "Artifact", scheme: str) -> None:
    """Say that the recipe's rules won over the scheme the user gave, and where."""
    found = [
        tensor
        for tensor in artifact.manifest["facts"]["tensors"]
        if tensor["reason"].startswith("rule ") and tensor["scheme"] != scheme
    ]
    if found:
        schemes = " and ".join(sorted({tensor["scheme"] for tensor in found}))
        env.out.note(
            f"The recipe's rules store {len(found)} tensors as {schemes} instead of {scheme}, "
            f"such as {found[0]['name']}."
        )


def show_account(env: Env, artifact: "Artifact") -> None:
    """Every weight's scheme, size and error, in groups, on stderr; then the other formats."""
    from g4tool.quantize.account import from_json, lines

    facts = artifact.manifest["facts"]
    others = [
        f"{name}: {layout['nbytes'] / 1e6:,.1f} MB, {layout['bits_per_weight']:.2f} bits a weight,"
        f" in the folder {layout['folder']}"
        for name, layout in facts["formats"].items()
        if layout["folder"]
    ]
    for line in (*lines(from_json(facts["tensors"])), *others, *facts["notes"]):
        env.out.note(line)
