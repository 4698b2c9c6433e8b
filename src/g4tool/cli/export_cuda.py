"""`g4 export-cuda`: an ExecuTorch program for NVIDIA GPUs."""

import typer

from g4tool.cli.common import Env, Flag, command
from g4tool.cli.export_cpu import (
    MaxSeqLen,
    Model,
    OutputDir,
    PrefillChunk,
    Prequantized,
    Revision,
    Sampling,
    TinyTest,
    Verify,
    made,
    show_proof,
    source_flags,
)
from g4tool.cli.models import put
from g4tool.errors import IncompleteError

HELP = """Export a model as an ExecuTorch program for CUDA.

model.pte holds the compiled code of two methods over one key-value cache, model.ptd the weights,
int4 as int4. The code is compiled on the GPU that it is for; where there is none, everything before
that is done, with a program for the CPU, and the command exits with 3.

    g4 export-cuda --tiny-test

    g4 export-cuda --prequantized build/31b-int4 --output build/31b-cuda
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    command(app, "export-cuda", help=HELP)(export_cuda)


def export_cuda(
    env: Env,
    tiny_test: TinyTest = False,
    model: Model = None,
    prequantized: Prequantized = None,
    revision: Revision = None,
    max_seq_len: MaxSeqLen = None,
    prefill_chunk: PrefillChunk = None,
    sampling: Sampling = None,
    verify: Verify = None,
    output: OutputDir = None,
) -> None:
    """Ensure the export, or without a GPU its twin for the CPU."""
    from g4tool.recipe.model import ExportCpu
    from g4tool.stages.environment import choose_device
    from g4tool.stages.export import NO_GPU

    lengths: dict[str, Flag] = {"max_seq_len": max_seq_len, "prefill_chunk": prefill_chunk}
    flags = {
        **source_flags("export-cuda", tiny_test, model, prequantized, lengths),
        "revision": revision,
        "export-cuda.sampling": sampling,
    }
    recipe = env.recipe(None, flags, section="export-cuda")
    if choose_device(None) != "cpu":
        artifact = made(env, recipe, "cuda", prequantized, verify, output)
        show_proof(env, artifact)
        with env.store.using(artifact):
            folder = put(env, artifact, output)
        facts = {"identity": artifact.identity, **artifact.manifest["facts"]}
        env.out.result({**facts, "path": str(folder)}, str(folder))
        return
    wanted = recipe.export_cuda
    assert wanted is not None, "the section is there"
    twin = ExportCpu(max_seq_len=wanted.max_seq_len, prefill_chunk=wanted.prefill_chunk)
    recipe = recipe.model_copy(update={"export_cpu": twin, "export_cuda": None})
    artifact = made(env, recipe, "xnnpack", prequantized, verify, None)
    show_proof(env, artifact)
    proved = ", proved" if artifact.manifest["facts"]["verified"] else ""
    env.out.note(f"the same methods for the CPU{proved}: {artifact.path}")
    if env.as_json:
        facts = {"identity": artifact.identity, **artifact.manifest["facts"]}
        env.out.result({**facts, "path": None, "incomplete": ["export-cuda"]}, "")
        raise typer.Exit(IncompleteError.exit_code)
    raise IncompleteError(f"export-cuda: {NO_GPU}")
