"""`g4 compile-neuron`: a model for Trainium and Inferentia, by way of NxD Inference."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, Flag, command
from g4tool.cli.models import check_output, confirm_download, ensure, put
from g4tool.cli.output import size
from g4tool.errors import IncompleteError, UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.artifact import Artifact

HELP = """Make NxD Inference artifacts for Trainium and Inferentia.

Anywhere: checks the model against the compiler's published rules, and writes the plan, each rank's
weights, neuron_config.json and compile.sh. Where AWS's Neuron SDK is installed, it also compiles;
elsewhere it says what is missing and ends with exit code 3.

    g4 compile-neuron --tp 4 --model google/gemma-4-31B-it

    g4 compile-neuron --tp 2 --model tiny-31b --target inf2 --plan-only

    g4 compile-neuron --tp 4 --neuron-python /opt/neuron/bin/python

    g4 compile-neuron --tp 4 --model tiny-31b --plan-only --stablehlo

An int4 bundle's folder as MODEL gives its plan and packed shards, cut between groups; NxD Inference
cannot compile them.
"""


class TargetName(StrEnum):
    """Chips that Neuron compiles for."""

    inf2 = "inf2"
    trn1 = "trn1"
    trn2 = "trn2"
    trn3 = "trn3"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "compile-neuron", help=HELP)(compile_neuron)


def compile_neuron(
    env: Env,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks [the recipe's].")] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder or tiny model [the recipe's].")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows at a time [1].")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a row, answer and all [2048].")
    ] = None,
    target: Annotated[TargetName | None, typer.Option(help="[trn2]")] = None,
    lnc: Annotated[
        int | None, typer.Option(help="Physical cores a logical core, 1 or 2 [the chip's].")
    ] = None,
    serving: Annotated[
        bool | None,
        typer.Option(
            "--serving/--no-serving",
            help="For vLLM's Neuron plugin: prompts join one at a time, sampling on the device.",
        ),
    ] = None,
    stablehlo: Annotated[
        bool,
        typer.Option("--stablehlo", help="Each program as StableHLO text too, for inspection."),
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Plan and weights only; do not look for the SDK.")
    ] = False,
    neuron_python: Annotated[
        Path | None, typer.Option(metavar="P", help="The Python that has the Neuron SDK [this].")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the artifact into this folder too.")
    ] = None,
) -> None:
    """Ensure the stage, as far as this machine can, and print what it decided."""
    from g4tool.stages.build import build
    from g4tool.stages.neuron import check_early, with_graphs

    if plan_only and neuron_python:
        raise UsageError("--plan-only asks no SDK: leave out --neuron-python.")
    flags: dict[str, Flag] = {
        "model": model,
        "revision": revision,
        "compile-neuron.tp": tp,
        "compile-neuron.batch": batch,
        "compile-neuron.seq_len": seq_len,
        "compile-neuron.target": target.value if target else None,
        "compile-neuron.lnc": lnc,
        "compile-neuron.serving": serving,
    }
    recipe = env.recipe(None, flags, section="compile-neuron")
    python = None if plan_only else neuron_python or Path(sys.executable)
    chosen = build(recipe, neuron_python=python)
    stage, missing = chosen.neuron, chosen.missing.get("compile-neuron")
    assert stage is not None, "the section is there"
    assert recipe.compile_neuron is not None, "and made the stage"
    if stablehlo:
        stage = with_graphs(stage)
    check_early(chosen.source, recipe.compile_neuron)
    check_output(env, stage, output)
    confirm_download(env, chosen.source)
    artifact = ensure(env, stage)
    with env.store.using(artifact):
        folder = put(env, artifact, output)
    show_plan(env, artifact)
    result = {"identity": artifact.identity, "path": str(folder), **artifact.manifest["facts"]}
    if missing and env.as_json:
        # The object says it: an error's would be a second one.
        env.out.result({**result, "incomplete": missing}, "")
        raise typer.Exit(IncompleteError.exit_code)
    env.out.result(result, str(folder))
    if missing:
        raise IncompleteError(missing)


def show_plan(env: Env, artifact: "Artifact") -> None:
    """Memory of a rank and every finding, on stderr."""
    facts = artifact.manifest["facts"]
    memory = facts["memory"]
    env.out.note(
        f"a rank holds {size(memory['weights_per_rank'])} of weights and "
        f"{size(memory['caches_per_rank'])} of caches, of {size(memory['core'])}; "
        + ("compiled" if facts["compiled"] else "not compiled")
    )
    for finding in facts["findings"]:
        env.out.note(
            f"{finding['level']}: {finding['code']} ({finding['where']}): {finding['message']}"
        )
