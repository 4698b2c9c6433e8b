"""A checkpoint quantized in memory: the model its bundle would load as, without a file written.

The solvers, the stored layout and the modules are the bundle's own, so that every number equals
that of the bundle.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from g4tool.checkpoint.lazy import Checkpoint
from g4tool.checkpoint.tensorfile import row_blocks
from g4tool.evaluate.leaves import put, twin
from g4tool.formats.torchao import Kind, Stored, part_specs
from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding, Int8ExpertLinear, Int8Linear
from g4tool.model.embedding import Embedding
from g4tool.model.text import TextModel
from g4tool.progress import Progress, Report, silent
from g4tool.quantize.account import TensorAccount
from g4tool.quantize.policy import TensorPlan
from g4tool.quantize.solvers import Packed, Workers, relative_error, workers

_READ_BYTES = 1 << 26


def quantized(
    model: TextModel,
    checkpoint: Checkpoint,
    plans: Iterable[TensorPlan],
    report: Report = silent,
    job: str = "quantize",
) -> tuple[TextModel, list[TensorAccount]]:
    """`model`, loaded from `checkpoint`, with its matrices as the plans say; and the account.

    What is kept is shared with `model`. The plans are for the tied head: an untied one needs a
    model of another shape. Towers are left out, of the account too.
    """
    result = twin(model)
    device = model.norm.weight.device
    text = [item for item in plans if item.name in checkpoint.names]
    accounts = []
    with workers(device) as crew:
        for done, item in enumerate(text, start=1):
            error = 0.0
            if item.scheme != "keep":
                path = item.name.removesuffix(".weight")
                module, error = solve(checkpoint, item, crew, model.get_submodule(path))
                put(result, path, module.to(device))
            accounts.append(account(item, error))
            report(Progress(job, done, len(text), "tensors", item.name))
    return result, accounts


def solve(
    checkpoint: Checkpoint, item: TensorPlan, crew: Workers, module: nn.Module
) -> tuple[nn.Module, float]:
    """The quantized twin of the matrix `module`, and its relative error as stored."""
    assert item.solver is not None
    assert item.group_size is not None
    experts = len(item.shape) == 3
    whole = experts or item.solver == "reference"
    info = checkpoint.info(item.source)
    limit = info.row_nbytes if experts else info.nbytes if whole else _READ_BYTES
    parts = []
    for start, stop in row_blocks(info.rows, info.row_nbytes, limit):
        block = checkpoint.read(item.source, start, stop)
        parts.append(crew.solve(block[0] if experts else block, item.solver, item.group_size))
    error = relative_error(
        [value for part in parts for value in part.error.tolist()],
        [value for part in parts for value in part.energy.tolist()],
    )
    return _module(parts, experts, module), error


def account(item: TensorPlan, error: float) -> TensorAccount:
    """What a bundle's account would say of the tensor."""
    return TensorAccount(
        name=item.name,
        hf_name=item.hf_name,
        scheme=item.scheme,
        group_size=item.group_size,
        solver=item.solver,
        shape=item.shape,
        nbytes=stored_bytes(item),
        rel_error=error,
        reason=item.reason,
    )


def stored_bytes(item: TensorPlan) -> int:
    """Bytes of the tensor in a bundle, with scales and zeros."""
    kinds: dict[str, Kind] = {"keep": "plain", "int8": "int8"}
    kind = kinds.get(item.scheme, "int4")
    dtype = item.dtype if kind == "plain" else torch.bfloat16
    specs = part_specs(Stored(item.hf_name, kind, item.shape, dtype, item.group_size))
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())


def _module(parts: list[Packed], experts: bool, module: nn.Module) -> nn.Module:
    def joined(values: list[Tensor], across: int) -> Tensor:
        return torch.stack(values) if experts else torch.cat(values, across)

    qdata = joined([part.qdata for part in parts], 0)
    zeros = [part.zero for part in parts if part.zero is not None]
    if zeros:
        # 4 bit scales lie group by row: rows are their second dimension.
        scale = joined([part.scale for part in parts], 1)
        kind = Int4ExpertLinear if experts else Int4Linear
        return kind(qdata, scale, joined(zeros, 1))
    scale = joined([part.scale for part in parts], 0)
    if experts:
        return Int8ExpertLinear(qdata, scale)
    if isinstance(module, Embedding):
        return Int8Embedding(qdata, scale.to(module.weight.dtype))
    return Int8Linear(qdata, scale)
