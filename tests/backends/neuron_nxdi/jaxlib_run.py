"""Runs StableHLO text with jaxlib, one CPU device a rank: somebody else's parser and compiler."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Arrays = list[np.ndarray]


class Program:
    """A module's text, parsed, verified and compiled for `ranks` replicas."""

    def __init__(self, text: str, ranks: int = 1) -> None:
        self.devices = jax.devices("cpu")[:ranks]
        options = xla_client.CompileOptions()
        options.num_replicas = ranks
        options.executable_build_options.num_replicas = ranks
        options.executable_build_options.device_assignment = xla_client.DeviceAssignment.create(
            np.arange(ranks)[:, None]
        )
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            module.operation.verify()
            self.program = self.devices[0].client.compile_and_load(
                module, xla_client.DeviceList(tuple(self.devices)), options
            )

    def __call__(self, arguments: list[Arrays]) -> list[Arrays]:
        """Results of each rank, from arguments of each rank."""
        placed = [self._place(parts) for parts in zip(*arguments, strict=True)]
        results = self.program.execute_sharded(placed).disassemble_into_single_device_arrays()
        return [[np.asarray(part[rank]) for part in results] for rank in range(len(self.devices))]

    def _place(self, parts: tuple[np.ndarray, ...]) -> jax.Array:
        if len(parts) == 1:
            return jax.device_put(parts[0], self.devices[0])
        mesh = Mesh(np.array(self.devices), ("rank",))
        arrays = [
            jax.device_put(np.atleast_1d(part), device)
            for part, device in zip(parts, self.devices, strict=True)
        ]
        shape = (len(parts) * arrays[0].shape[0], *arrays[0].shape[1:])
        sharding = NamedSharding(mesh, PartitionSpec("rank"))
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
