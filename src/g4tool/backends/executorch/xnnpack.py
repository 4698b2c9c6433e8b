"""Lowers both methods to XNNPACK.

Only matrix products are delegated: XNNPACK's exponentials, roots and GELU move a logit in its third
digit.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from g4tool.backends.executorch.check import (
    check_kernels,
    check_quantized,
    check_remainders,
    missing_kernels,
)
from g4tool.backends.executorch.library import (
    load_runtime,
    quiet,
    require_exporter,
    short_history,
)
from g4tool.backends.executorch.program import METHODS, ProgramOptions
from g4tool.backends.executorch.sampling import SCALARS, next_id
from g4tool.errors import UsageError


@dataclass(frozen=True)
class Lowered:
    """`manager` is the finished program; `modules` are the lowered methods as they run in Python.

    The modules share one cache, like the exported programs that they come from.
    """

    manager: Any
    modules: dict[str, nn.Module]

    def delegates(self) -> dict[str, dict[str, int]]:
        """For each method how often each backend, and each operator outside them, is called."""
        found = {}
        for plan in self._plans():
            names = [_name(operator) for operator in plan.operators]
            calls: Counter[str] = Counter()
            for chain in plan.chains:
                for instruction in chain.instructions:
                    call = instruction.instr_args
                    if hasattr(call, "delegate_index"):
                        calls[plan.delegates[call.delegate_index].id] += 1
                    elif hasattr(call, "op_index"):
                        calls[names[call.op_index]] += 1
            found[plan.name] = dict(sorted(calls.items()))
        return found

    def operators(self) -> dict[str, list[str]]:
        """The kernels that each method needs outside its delegates, as "aten::add.out"."""
        return {plan.name: [_name(each) for each in plan.operators] for plan in self._plans()}

    def write(self, path: Path) -> None:
        """The program's file."""
        with path.open("wb") as file:
            self.manager.write_to_file(file)

    def _plans(self) -> list[Any]:
        plans = self.manager.executorch_program.execution_plan
        return [plan for plan in plans if plan.name in METHODS]


def lower(
    programs: Mapping[str, ExportedProgram],
    options: ProgramOptions,
    constants: Mapping[str, int | list[int]],
    int8_activations: bool = False,
) -> Lowered:
    """Both methods for XNNPACK, over shared mutable buffers.

    `int8_activations`: the programs hold layers of g4tool.backends.executorch.dynamic.

    Raises G4Error for what the runtime would compute wrongly, or has no kernel for.
    """
    require_exporter()
    from executorch.backends.xnnpack.partition.config import gemm_configs, generic_node_configs
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )
    from executorch.exir.passes import MemoryPlanningPass

    for name, program in programs.items():
        check_remainders(name, program, options.max_seq_len)
        check_quantized(name, program)
    products = [
        gemm_configs.LinearConfig,
        gemm_configs.AddmmConfig,
        gemm_configs.MMConfig,
        generic_node_configs.BMMConfig,
    ]
    partitioners = [XnnpackPartitioner(configs=products)]
    if int8_activations:
        dynamic = ConfigPrecisionType.DYNAMIC_QUANT
        partitioners.insert(0, XnnpackPartitioner(config_precisions=dynamic, per_op_mode=True))
    with quiet(), short_history():
        edge = to_edge_transform_and_lower(
            dict(programs),
            partitioner=partitioners,
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=dict(constants),
        )
        # Finishing changes the lowered programs in place: they are no longer run afterwards.
        modules = {name: edge.exported_program(name).module() for name in programs}
        planning = MemoryPlanningPass(share_mutable_buffers=True)
        manager = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
        lowered = Lowered(manager, modules)
    kernels = load_runtime().operator_registry.operator_names
    for name, operators in lowered.operators().items():
        check_kernels(name, operators, kernels)
    return lowered


def check_sampling() -> None:
    """Raise UsageError naming the operators of sampling that the runtime has no kernel for."""
    require_exporter()
    from executorch.exir import to_edge

    inputs = (torch.zeros(1, 8), *SCALARS)
    with quiet():
        manager = to_edge(export(_Sample(), inputs, strict=True)).to_executorch()
    (plan,) = manager.executorch_program.execution_plan
    kernels = load_runtime().operator_registry.operator_names
    missing = missing_kernels((_name(each) for each in plan.operators), kernels)
    if missing:
        raise UsageError(
            f"--sampling: the runtime has no kernel for {', '.join(missing)}; leave it out, and "
            f"the tokens are chosen outside the program."
        )


class _Sample(nn.Module):
    def forward(self, logits: Tensor, *scalars: Tensor) -> Tensor:
        return next_id(logits, *scalars)


def _name(operator: Any) -> str:
    return f"{operator.name}.{operator.overload}" if operator.overload else str(operator.name)
