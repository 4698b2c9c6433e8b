"""`g4 export-cpu`: an ExecuTorch program for XNNPACK."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4tool.cli.common import Env, Flag, command
from g4tool.cli.models import check_output, confirm_download, ensure, put
from g4tool.errors import UsageError

if TYPE_CHECKING:
    from g4tool.pipeline.artifact import Artifact
    from g4tool.recipe.model import Recipe
    from g4tool.stages.export import Backend

HELP = """Export a model as an ExecuTorch program for the CPU.

One file, model.pte, with two methods over one key-value cache, and the tokenizer beside it; runs
with `g4 run DIR`, with any ExecuTorch 1.5 runtime that has XNNPACK, and with the C++ runner.

    g4 export-cpu --tiny-test

    g4 export-cpu --model google/gemma-4-E2B-it --max-seq-len 8192 --output build/e2b-cpu
"""

TinyTest = Annotated[
    bool, typer.Option("--tiny-test", help="Export and prove tiny-31b: is everything installed?")
]
Model = Annotated[str | None, typer.Option(help="Hub id, folder or tiny model [the recipe's].")]
Prequantized = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A bundle's folder, instead of --model.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
MaxSeqLen = Annotated[
    int | None, typer.Option(help="Tokens the cache holds, prompt and answer [4096].")
]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Most tokens of a prompt that a call takes [1024, or all].")
]
Sampling = Annotated[
    bool | None,
    typer.Option("--sampling/--no-sampling", help="Choose the next token inside the program."),
]
Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Prove the program stage by stage [yes for tiny models].",
    ),
]
OutputDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Put the program into this folder too.")
]

TINY_TEST = {"max_seq_len": 256, "prefill_chunk": 128}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "export-cpu", help=HELP)(export_cpu)


def export_cpu(
    env: Env,
    tiny_test: TinyTest = False,
    model: Model = None,
    prequantized: Prequantized = None,
    revision: Revision = None,
    max_seq_len: MaxSeqLen = None,
    prefill_chunk: PrefillChunk = None,
    int8_activations: Annotated[
        bool | None,
        typer.Option(
            "--int8-activations/--exact",
            help="XNNPACK's int8 kernels: several times faster, not exact.",
        ),
    ] = None,
    sampling: Sampling = None,
    verify: Verify = None,
    output: OutputDir = None,
) -> None:
    """Ensure the export stage and print its proof."""
    lengths: dict[str, Flag] = {"max_seq_len": max_seq_len, "prefill_chunk": prefill_chunk}
    flags = {
        **source_flags("export-cpu", tiny_test, model, prequantized, lengths),
        "revision": revision,
        "export-cpu.int8_activations": int8_activations,
        "export-cpu.sampling": sampling,
    }
    recipe = env.recipe(None, flags, section="export-cpu")
    artifact = made(env, recipe, "xnnpack", prequantized, verify, output)
    with env.store.using(artifact):
        folder = put(env, artifact, output)
    show_proof(env, artifact)
    env.out.result(
        {"identity": artifact.identity, "path": str(folder), **artifact.manifest["facts"]},
        str(folder),
    )


def made(
    env: Env,
    recipe: "Recipe",
    backend: "Backend",
    prequantized: Path | None,
    verify: bool | None,
    output: Path | None,
) -> "Artifact":
    """The export that the recipe asks for, of its own model or of a bundle's folder."""
    from g4tool.stages.build import build
    from g4tool.stages.export import bundle_stage

    built = None
    if prequantized is not None:
        stage = bundle_stage(recipe, backend, prequantized)
    else:
        built = build(recipe)
        found = built.export_cuda if backend == "cuda" else built.export_cpu
        assert found is not None, "the section is there, and what it needs"
        stage = found
    if verify is not None:
        stage = replace(stage, verify=verify)
    check_output(env, stage, output)
    if built is not None:
        confirm_download(env, built.source)
    return ensure(env, stage)


def source_flags(
    section: str,
    tiny_test: bool,
    model: str | None,
    prequantized: Path | None,
    lengths: dict[str, Flag],
) -> dict[str, Flag]:
    """Recipe keys of the flags that say what to export. Raises UsageError for contradictions."""
    if tiny_test + (model is not None) + (prequantized is not None) > 1:
        raise UsageError("--tiny-test, --model and --prequantized each name a model: give one.")
    if prequantized is not None and not prequantized.is_dir():
        raise UsageError(f"--prequantized {prequantized}: there is no such folder.")
    flags: dict[str, Flag] = {"model": "tiny-31b" if tiny_test else model}
    if tiny_test:
        longest = lengths["max_seq_len"] or TINY_TEST["max_seq_len"]
        assert isinstance(longest, int)
        chunk = lengths["prefill_chunk"] or min(TINY_TEST["prefill_chunk"], longest)
        lengths = {"max_seq_len": longest, "prefill_chunk": chunk}
    return flags | {f"{section}.{key}": value for key, value in lengths.items()}


def show_proof(env: Env, artifact: "Artifact") -> None:
    """The proof's stages and what is delegated, on stderr."""
    from g4tool.backends.executorch.verify import Finding

    facts = artifact.manifest["facts"]
    for found in facts["verified"] or ():
        env.out.note(Finding(**found).line())
    for method, calls in facts["delegates"].items():
        inside = [f"{calls[name]} calls of {name}" for name in calls if "::" not in name]
        outside = [f"{calls[name]} {name}" for name in calls if "::" in name]
        env.out.note(f"{method}: {', '.join(inside) or 'no delegate'}")
        env.out.note(f"  outside: {', '.join(outside) or 'nothing'}")
