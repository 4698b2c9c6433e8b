"""Makes and proves the CUDA program of one export, on the GPU that it is for."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4tool.errors import G4Error
from g4tool.stages.proof import Given, Proof, begin, constants_of, facts_of, stored_finding

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from g4tool.backends.executorch.verify import Step
    from g4tool.backends.executorch.xnnpack import Lowered
    from g4tool.model.text import TextModel
    from g4tool.pipeline.work import Work

WEIGHTS = "model.ptd"


def make(work: "Work", given: Given) -> Any:
    """The weights' and the program's files; returns what export.json says of them.

    A compiler need not give the same twice: both files are of one lowering, or both made again.
    """
    from g4tool.backends.executorch.folder import PROGRAM

    maker = Maker(given)
    if not (work.path / PROGRAM).exists():
        (work.path / WEIGHTS).unlink(missing_ok=True)
    work.file(WEIGHTS, maker.weights)
    return work.file(PROGRAM, maker.program)


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
        from g4tool.backends.executorch.folder import PROGRAM

        path.with_name(PROGRAM).unlink(missing_ok=True)
        self._lowered = self._lower()
        names = cuda.write_weights(self._lowered, path.parent)
        if len(names) != 1:
            raise G4Error(f"the lowering gave {len(names)} files of weights instead of one.")
        (path.parent / names[0]).replace(path)

    def program(self, path: Path) -> dict[str, Any]:
        """Writes the program at `path`, and proves it with the weights beside it.

        Raises G4Error where the weights are an earlier attempt's; the next one makes both.
        """
        import torch

        from g4tool.backends.executorch.cuda_runtime import check_program
        from g4tool.backends.executorch.verify import to_json

        if self._lowered is None:
            path.with_name(WEIGHTS).unlink(missing_ok=True)
            raise G4Error(f"{path} was damaged since it was written: run the same command again.")
        self._lowered.write(path)
        try:
            check_program(path)
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

    def _lower(self) -> "Lowered":
        import torch

        from g4tool.backends.executorch import cuda, verify
        from g4tool.backends.executorch.fused import make_fused
        from g4tool.backends.executorch.program import export_methods
        from g4tool.kernels.register import has_triton

        given, device = self._given, "cuda" if self._given.stage.verify else "cpu"
        model, options, self._proof = begin(given, torch.bfloat16, device)
        # Each method's weights are moved to the GPU as it is compiled, and off it afterwards.
        self._model = model.cpu()
        with given.step("export"):
            make_fused(model, has_triton(torch.device("cuda")))
            programs = export_methods(model, options)
        if self._proof and not options.sampling:
            with given.step("prove"):
                self._proof.add(
                    "exported program", _on_gpu(programs), model.config, verify.bf16(model.config)
                )
        with given.step("lower"):
            return cuda.lower(programs, options, constants_of(given, model))

    def _prove(self, path: Path) -> None:
        """The compiled code as it lies in the files, and its weights beside the model's."""
        from g4tool.backends.executorch import verify
        from g4tool.backends.executorch.cuda_runtime import CudaMethods

        assert self._proof is not None
        with self._given.step("prove"):
            loaded = CudaMethods(path, [path.with_name(WEIGHTS)])
            if not self._given.stage.sampling:
                step = verify.methods(loaded.prefill, loaded.decode)
                config = self._model.config
                self._proof.add("model.pte read back", step, config, verify.bf16(config))
            self._proof.record(stored_finding(loaded, self._model))


def _on_gpu(programs: "dict[str, ExportedProgram]") -> "Step":
    """Exported programs of a model on the CPU, run on the GPU; they themselves stay."""
    from torch.export.passes import move_to_device_pass

    from g4tool.backends.executorch import verify

    moved: dict[str, nn.Module] = {}
    held: dict[str, Tensor] = {}
    for name, program in programs.items():
        tensors = (*program.state_dict.values(), *program.constants.values())
        own = copy.deepcopy(program, {id(each): each for each in tensors})
        # The weights are on the GPU once for both methods.
        own.state_dict.update({name: held[name] for name in own.state_dict if name in held})
        moved[name] = move_to_device_pass(own, "cuda").module()
        held.update(own.state_dict)
    return verify.in_python(moved, "cuda")
