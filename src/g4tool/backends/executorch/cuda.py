"""Lowers both methods to ExecuTorch's CUDA backend: one piece of AOTInductor code a method, and one
file of weights for both."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.export import ExportedProgram

from g4tool.backends.executorch.check import check_remainders
from g4tool.backends.executorch.fused import attention
from g4tool.backends.executorch.library import quiet, require_exporter
from g4tool.backends.executorch.program import ProgramOptions
from g4tool.backends.executorch.xnnpack import Lowered
from g4tool.errors import G4Error


def lower(
    programs: Mapping[str, ExportedProgram],
    options: ProgramOptions,
    constants: Mapping[str, int | list[int]],
) -> Lowered:
    """Both methods compiled for this machine's GPU.

    The programs come from a model on CUDA whose leaves are those of fused.py. Raises G4Error for an
    operator that the backend has no kernel for, naming it.
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
        from executorch.exir.passes import MemoryPlanningPass

    for name, program in programs.items():
        check_remainders(name, program, options.max_seq_len)
    table = {torch.ops.aten.scaled_dot_product_attention.default: attention}
    plain = {name: program.run_decompositions(table) for name, program in programs.items()}
    partitioners = {
        name: [CudaPartitioner([CudaBackend.generate_method_name_compile_spec(name)])]
        for name in plain
    }
    try:
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
    return Lowered(manager, {})


def write_weights(lowered: Lowered, folder: Path) -> list[str]:
    """The program's external weights into `folder`; returns the files' names, which the program
    does not know: a runtime is given the file."""
    before = {path.name for path in folder.iterdir()}
    lowered.manager.write_tensor_data_to_file(str(folder))
    return sorted({path.name for path in folder.iterdir()} - before)
