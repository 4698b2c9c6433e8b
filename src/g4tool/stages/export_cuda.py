"""Makes and proves the CUDA program of one export, on the GPU that it is for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.errors import G4Error
from g4tool.files import sha256
from g4tool.stages.proof import Given, Proof, begin, constants_of, facts_of

if TYPE_CHECKING:
    from g4tool.backends.executorch.xnnpack import Lowered
    from g4tool.model.text import TextModel

WEIGHTS = "model.ptd"


class Maker:
    """One lowering for two files: the weights are journaled first, the program with the proof."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._lowered: Lowered | None = None
        self._proof: Proof | None = None
        self._model: TextModel

    def weights(self, path: Path) -> None:
        """Lowers both methods and writes their weights at `path`."""
        from g4tool.backends.executorch import cuda

        self._lowered = self._lower()
        names = cuda.write_weights(self._lowered, path.parent)
        if len(names) != 1:
            raise G4Error(f"the lowering gave {len(names)} files of weights instead of one.")
        (path.parent / names[0]).replace(path)

    def program(self, path: Path) -> dict[str, Any]:
        """Writes the program at `path`, and proves it with the weights beside it.

        Where an earlier attempt finished the weights, lowers again. Raises G4Error where that gives
        other weights than it did.
        """
        import torch

        from g4tool.backends.executorch.verify import to_json

        if self._lowered is None:
            self._lower_again(path.with_name(WEIGHTS))
        assert self._lowered is not None
        self._lowered.write(path)
        try:
            if self._proof:
                self._prove(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return {
            **facts_of(self._given, self._model),
            "activations": "bfloat16",
            "gpu": {
                "name": torch.cuda.get_device_name(),
                "capability": list(torch.cuda.get_device_capability()),
            },
            "delegates": self._lowered.delegates(),
            "verified": to_json(self._proof.findings) if self._proof else None,
        }

    def _lower_again(self, finished: Path) -> None:
        again = finished.with_name(f"{WEIGHTS}.again")
        try:
            self.weights(again)
            if sha256(again) != sha256(finished):
                raise G4Error(
                    f"{finished} is of another lowering than this one: remove {finished.parent} "
                    f"and run the same command again."
                )
        finally:
            again.unlink(missing_ok=True)

    def _lower(self) -> "Lowered":
        import torch

        from g4tool.backends.executorch import cuda, verify
        from g4tool.backends.executorch.fused import make_fused
        from g4tool.backends.executorch.program import export_methods

        model, options, self._proof = begin(self._given, torch.bfloat16, "cuda")
        self._model = model
        make_fused(model)
        self._given.step("export")
        programs = export_methods(model, options)
        if self._proof and not options.sampling:
            modules = {name: program.module() for name, program in programs.items()}
            step = verify.in_python(modules, "cuda")
            self._proof.add("exported program", step, model.config, verify.BF16)
        self._given.step("lower")
        return cuda.lower(programs, options, constants_of(self._given, model))

    def _prove(self, path: Path) -> None:
        """The compiled code as it lies in the files, and its weights beside the model's."""
        from g4tool.backends.executorch import verify
        from g4tool.backends.executorch.cuda_runtime import CudaMethods

        assert self._proof is not None
        self._given.step("prove")
        loaded = CudaMethods(path, [path.with_name(WEIGHTS)])
        if not self._given.stage.sampling:
            step = verify.methods(loaded.prefill, loaded.decode)
            config = self._model.config
            self._proof.add("model.pte read back", step, config, verify.BF16)
        names = loaded.differing(dict(self._model.named_buffers()))
        note = "the packed tensors equal the bundle's"
        if names:
            note = f"{len(names)} tensors differ, such as {names[0]}"
        self._proof.record(verify.Finding("model.ptd", not names, note=note))
