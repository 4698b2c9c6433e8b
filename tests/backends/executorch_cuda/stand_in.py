"""A stand-in for ExecuTorch's CUDA backend on a machine without a GPU.

The partitioner, the encoding of the weights' list, the copies to the device, and the .pte and .ptd
are the wheel's own; only the code inside is AOTInductor's for the CPU.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from executorch.backends.aoti.aoti_partitioner import AotiPartitioner
from executorch.backends.aoti.passes.replace_view_copy_with_view import ReplaceViewCopyWithViewPass
from executorch.backends.cuda.cuda_weight_collector import (
    CudaWeightEntry,
    encode_cuda_weight_metadata,
)
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.tensor import scalar_type_enum
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.pt2_archive._package_weights import Weights

WIDTH, LENGTH, VOCAB = 8, 32, 11
_OPTIONS = {
    "aot_inductor.link_libtorch": False,
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.package_constants_on_disk_format": "pickle_weights",
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


class CudaBackend(BackendDetails):  # type: ignore[misc]
    """ExecuTorch finds a backend by the name of its class."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[Any]) -> PreprocessResult:
        """Compiles one method as the CUDA backend does, for the CPU."""
        ReplaceViewCopyWithViewPass()(edge_program.graph_module)
        names = edge_program.graph_signature.user_inputs
        inputs = tuple(
            node.meta["val"]
            for node in edge_program.graph.nodes
            if node.op == "placeholder" and node.name in names
        )
        files = torch._inductor.aot_compile(edge_program.module(), inputs, options=_OPTIONS)
        code = Path(next(f for f in files if isinstance(f, str) and f.endswith(".so"))).read_bytes()
        weights = next(found for found in files if isinstance(found, Weights))
        store = NamedDataStore()
        code_key = hashlib.sha256(code).hexdigest() + "_so_blob"
        store.add_named_data(code_key, code, 1, None)
        entries = []
        for name, (tensor, _) in weights.items():
            key = f"cuda_fqn_weight:cuda:{name}"
            storage = bytes(tensor.untyped_storage())
            store.add_named_data(key, storage, 16, "aoti_cuda_blob")
            entries.append(
                CudaWeightEntry(
                    name,
                    key,
                    len(storage),
                    int(scalar_type_enum(tensor.dtype)),
                    1,
                    tensor.storage_offset(),
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                )
            )
        return PreprocessResult(
            processed_bytes=encode_cuda_weight_metadata(code_key, entries),
            debug_handle_map={},
            data_store_output=store.get_named_data_store_output(),
        )


class Toy(nn.Module):
    """Sums what it remembers of all ids so far: two methods, one cache, one packed weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-128, 128, (VOCAB, WIDTH), generator=generator)
        self.register_buffer("qdata", codes.to(torch.int8))
        self.register_buffer("scale", torch.rand(VOCAB, 1, generator=generator))
        self.register_buffer("seen", torch.zeros(LENGTH, WIDTH))

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        # The position is used first, so that the code's inputs are in another order.
        where = start + torch.arange(tokens.shape[1])
        weight = self.qdata.float() * self.scale
        rows = weight[tokens.view(-1)] + 0.125 * where.view(-1, 1)
        self.seen.index_copy_(0, where, rows)
        past = (torch.arange(LENGTH) < start + tokens.shape[1]).float().view(1, -1)
        return past @ self.seen @ weight.t()


class Model(nn.Module):
    """The toy under the name that exported programs give their model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Toy()

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        return self.model(tokens, start)


def write_program(model: nn.Module, folder: Path) -> tuple[Path, Path]:
    """Both methods of a toy as a .pte and its .ptd in `folder`."""
    length = Dim("length", min=2, max=LENGTH)
    start = torch.tensor(3)
    programs = {
        "prefill": export(
            model, (torch.zeros(1, 4, dtype=torch.int64), start), dynamic_shapes=({1: length}, None)
        ),
        "decode": export(model, (torch.zeros(1, 1, dtype=torch.int64), start)),
    }
    return lower({name: each.run_decompositions({}) for name, each in programs.items()}, folder)


def lower(programs: dict[str, ExportedProgram], folder: Path) -> tuple[Path, Path]:
    """Decomposed methods as a .pte and its .ptd in `folder`."""
    device = CompileSpec("target_device", b"cuda:0")
    edge = to_edge_transform_and_lower(
        programs,
        partitioner={name: [AotiPartitioner("CudaBackend", [device])] for name in programs},
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        constant_methods={"max_seq_len": LENGTH},
    )
    manager = edge.to_executorch()
    path = folder / "model.pte"
    with path.open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))
    (weights,) = folder.glob("*.ptd")
    return path, weights
