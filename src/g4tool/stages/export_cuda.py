"""Makes and proves the CUDA program of one export, on the GPU that it is for."""

from pathlib import Path
from typing import Any

from g4tool.errors import G4Error
from g4tool.stages.export_cpu import Given, Proof, turn, weights_origin

WEIGHTS = "model.ptd"


class Maker:
    """One lowering for two files: the weights are journaled first, the program with the proof."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self._lowered: Any = None
        self._proof: Proof | None = None
        self._model: Any = None
        self._facts: dict[str, Any] = {}

    def weights(self, path: Path) -> dict[str, Any]:
        """Lowers both methods and writes their weights at `path`."""
        from g4tool.backends.executorch import cuda

        self._lower()
        names = cuda.write_weights(self._lowered, path.parent)
        if len(names) != 1:
            raise G4Error(f"the lowering gave {len(names)} files of weights instead of one.")
        (path.parent / names[0]).replace(path)
        return {}

    def program(self, path: Path) -> dict[str, Any]:
        """Writes the program at `path` and proves it with the weights beside it."""
        if self._lowered is None:  # the weights were finished by an earlier attempt
            self.weights(path.with_name(WEIGHTS))
        self._lowered.write(path)
        try:
            if self._proof:
                self._prove(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        from g4tool.backends.executorch.verify import to_json

        verified = to_json(self._proof.findings) if self._proof else None
        return {**self._facts, "delegates": self._lowered.delegates(), "verified": verified}

    def _lower(self) -> None:
        import torch

        from g4tool.backends.executorch import cuda, verify
        from g4tool.backends.executorch.fused import make_fused
        from g4tool.backends.executorch.program import constant_methods, export_methods

        given, stage = self.given, self.given.stage
        given.step("load")
        proof = self._proof = Proof(given) if stage.verify else None
        if proof and given.source:
            model = given.load(given.source, torch.bfloat16, "cuda")
            longest = min(stage.max_seq_len, model.config.max_position_embeddings)
            proof.add("eager bf16", verify.eager(model, longest), model.config, verify.QUANTIZED)
            del model
        model = self._model = given.load(given.weights, torch.bfloat16, "cuda")
        config = model.config
        options = stage.options.within(config.max_position_embeddings)
        eos_ids = sorted(given.tokenizer.end_ids)
        if proof:
            proof.add("eager", verify.eager(model, options.max_seq_len), config, verify.QUANTIZED)
        make_fused(model)
        given.step("export")
        programs = export_methods(model, options)
        if proof and not stage.sampling:
            modules = {name: program.module() for name, program in programs.items()}
            step = verify.in_python(modules, "cuda")
            proof.add("exported program", step, config, verify.BF16)
        given.step("lower")
        constants = constant_methods(model, options, given.tokenizer.bos_id, eos_ids)
        self._lowered = cuda.lower(programs, options, constants)
        self._facts = {
            "activations": "bfloat16",
            "max_seq_len": options.max_seq_len,
            "prefill_chunk": options.prefill_chunk,
            "sliding_window": config.sliding_window,
            "vocab_size": config.vocab_size,
            "bos_id": given.tokenizer.bos_id,
            "eos_ids": eos_ids,
            "turn": turn(given),
            "source": weights_origin(given),
            "gpu": {
                "name": torch.cuda.get_device_name(),
                "capability": list(torch.cuda.get_device_capability()),
            },
        }

    def _prove(self, path: Path) -> None:
        """The compiled code as it lies in the files, and its weights beside the model's."""
        from g4tool.backends.executorch import verify
        from g4tool.backends.executorch.cuda_runtime import CudaMethods

        assert self._proof is not None
        self.given.step("prove")
        loaded = CudaMethods(path, [path.with_name(WEIGHTS)])
        if not self.given.stage.sampling:
            step = verify.methods(loaded.prefill, loaded.decode)
            config = self._model.config
            self._proof.add("model.pte read back", step, config, verify.BF16)
        names = loaded.differing(dict(self._model.named_buffers()))
        note = "the packed tensors equal the bundle's"
        if names:
            note = f"{len(names)} tensors differ, such as {names[0]}"
        self._proof.record(verify.Finding("model.ptd", not names, note=note))
