"""Lowers both methods to ExecuTorch's CUDA backend: one piece of AOTInductor code a method, and one
file of weights for both."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._inductor.config
from torch.export import ExportedProgram

from g4tool.backends.executorch.check import check_remainders
from g4tool.backends.executorch.fused import attention
from g4tool.backends.executorch.library import quiet, require_exporter, short_history
from g4tool.backends.executorch.program import ProgramOptions
from g4tool.backends.executorch.xnnpack import Lowered
from g4tool.errors import G4Error


def lower(
    programs: Mapping[str, ExportedProgram],
    options: ProgramOptions,
    constants: Mapping[str, int | list[int]],
) -> Lowered:
    """Both methods compiled for this machine's GPU.

    The programs come from a model on the CPU whose leaves are those of fused.py; a method's weights
    are on the GPU while it is compiled. Raises G4Error for an operator that the backend has no
    kernel for, naming it.
    """
    require_exporter()
    with quiet():
        from executorch.backends.cuda.cuda_backend import CudaBackend
        from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
        from executorch.exir import (
            EdgeCompileConfig,
            ExecutorchBackendConfig,
            to_edge_transform_and_lower,
        )
        from executorch.exir.backend.compile_spec_schema import CompileSpec
        from executorch.exir.passes import MemoryPlanningPass

    for name, program in programs.items():
        check_remainders(name, program, options.max_seq_len)
    with short_history():
        plain = {name: decomposed(program) for name, program in programs.items()}
    # Otherwise every method is compiled on copies of all weights.
    saving = CompileSpec("low_memory_mode", b"ON")
    partitioners = {
        name: [CudaPartitioner([CudaBackend.generate_method_name_compile_spec(name), saving])]
        for name in plain
    }
    try:
        # Kernels of the same code and name would be one file to the linker, and their symbols lost.
        named = torch._inductor.config.patch({"triton.unique_user_kernel_names": True})
        with _products_of_scores(plain), short_history(), named:
            edge = to_edge_transform_and_lower(
                plain,
                partitioner=partitioners,
                compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
                constant_methods=dict(constants),
            )
        manager = edge.to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass())
        )
    except RuntimeError as error:
        if "missing fallback kernels" in str(error):
            lines = [line.strip(" -") for line in str(error).splitlines() if line.startswith("  -")]
            raise G4Error(
                f"ExecuTorch's CUDA backend has no kernel for {', '.join(lines)}."
            ) from error
        raise
    lowered = Lowered(manager, {})
    check_outside(lowered.operators())
    return lowered


def decomposed(program: ExportedProgram) -> ExportedProgram:
    """The program with attention in plain products."""
    table = {torch.ops.aten.scaled_dot_product_attention.default: attention}
    plain: ExportedProgram = program.run_decompositions(table)
    return plain


def check_outside(operators: Mapping[str, list[str]]) -> None:
    """Raise G4Error for operators outside the compiled code that are no copies to and from it.

    `operators`: by method, as `Lowered.operators` gives them.
    """
    for name, found in operators.items():
        others = sorted({*found} - _COPIES)
        if others:
            raise G4Error(
                f"{name}: the CUDA backend left {', '.join(others)} outside its code, where a "
                f"runtime would run them on the CPU."
            )


_COPIES = {"et_copy::_h2d_copy.out", "et_copy::_d2h_copy.out"}


@contextmanager
def _products_of_scores(programs: Mapping[str, ExportedProgram]) -> Iterator[None]:
    """In a 16-bit model the only fp32 products are attention scores, of values that TF32 holds
    exactly: tensor cores make them without an error."""
    before = torch.get_float32_matmul_precision()
    if all(each.state_dict[_NORM].dtype != torch.float32 for each in programs.values()):
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_NORM = "model.norm.weight"


def write_weights(lowered: Lowered, folder: Path) -> list[str]:
    """The program's external weights into `folder`; returns the files' names, which the program
    does not know: a runtime is given the file."""
    before = {path.name for path in folder.iterdir()}
    lowered.manager.write_tensor_data_to_file(str(folder))
    return sorted({path.name for path in folder.iterdir()} - before)
