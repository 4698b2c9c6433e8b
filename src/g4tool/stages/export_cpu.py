"""Makes and proves the XNNPACK program of one export."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.stages.proof import Given, Proof, begin, constants_of, facts_of, weights_finding

if TYPE_CHECKING:
    from g4tool.backends.executorch.xnnpack import Lowered
    from g4tool.model.text import TextModel


def make(given: Given, path: Path) -> dict[str, Any]:
    """Writes the program at `path`; returns what export.json says of it.

    A program that fails its proof does not stay.
    """
    try:
        return _make(given, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _make(given: Given, path: Path) -> dict[str, Any]:
    import torch

    from g4tool.backends.executorch import verify, xnnpack
    from g4tool.backends.executorch.plain import make_plain
    from g4tool.backends.executorch.program import export_methods

    int8 = given.stage.int8_activations
    model, options, proof = begin(given, torch.float32)
    constants = constants_of(given, model)
    make_plain(model, int8)
    with given.step("export"):
        programs = export_methods(model, options)
    if proof:
        with given.step("prove"):
            modules = {name: program.module() for name, program in programs.items()}
            allowed = verify.QUANTIZED if int8 else verify.EXACT
            proof.add("exported program", verify.in_python(modules), model.config, allowed)
            del modules
    with given.step("lower"):
        lowered = xnnpack.lower(programs, options, constants, int8)
        lowered.write(path)
    if proof:
        with given.step("prove"):
            _prove(proof, given, lowered, model, path)
    return {
        **facts_of(given, model),
        "activations": "int8" if int8 else "float32",
        "gpu": None,
        "delegates": lowered.delegates(),
        "verified": verify.to_json(proof.findings) if proof else None,
    }


def _prove(proof: Proof, given: Given, lowered: "Lowered", model: "TextModel", path: Path) -> None:
    """The stages after lowering: the lowered methods, the file read back, the weights in it."""
    from g4tool.backends.executorch import verify
    from g4tool.backends.executorch.runtime import XnnpackMethods

    # XNNPACK quantizes activations in its own kernels only: before, they are simulated.
    allowed = verify.KERNELS if given.stage.int8_activations else verify.EXACT
    proof.add("lowered", verify.in_python(lowered.modules), model.config, allowed)
    loaded = XnnpackMethods(path)
    run = verify.methods(loaded.prefill, loaded.decode)
    proof.add("model.pte read back", run, model.config, allowed)
    proof.record(weights_finding(path, model))
