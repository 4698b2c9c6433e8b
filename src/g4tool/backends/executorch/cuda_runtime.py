"""Runs a CUDA program with torch alone: the compiled code inside the .pte is AOTInductor code.

Both methods get the same tensors for their constants, so they work on one cache and the weights
are on the device once. The .pte's code needs nothing but torch's C functions and CUDA.
"""

import ctypes
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g4tool.backends.executorch.folder import ExportFacts
from g4tool.backends.executorch.program import METHODS
from g4tool.backends.executorch.pte import (
    Compiled,
    DataFile,
    Weight,
    compiled_method,
    read_program,
    read_weights,
)
from g4tool.backends.executorch.symbols import absent, undefined_symbols
from g4tool.errors import G4Error

_DEVICE = torch.device("cuda")
_LIBRARIES = ("libc10", "libtorch_cpu", "libc10_cuda", "libtorch_cuda", "libtorch")


class CudaMethods:
    """Both methods of a program and its files of weights, decode as a CUDA graph with `graph`.

    Raises G4Error without a GPU, and for a program that torch cannot run.
    """

    def __init__(self, path: Path, weights: Sequence[Path], graph: bool = True) -> None:
        if not torch.cuda.is_available():
            raise G4Error(f"{path} was compiled for an NVIDIA GPU, and this machine has none.")
        self.device = _DEVICE
        program, data = read_program(path)
        methods = {name: compiled_method(path, program, data, name) for name in METHODS}
        held = _load(methods.values(), [read_weights(each) for each in weights])
        self._weights = {
            weight.name: _view(held[weight.key], weight)
            for method in methods.values()
            for weight in method.weights
        }
        self._scratch = tempfile.TemporaryDirectory(prefix="g4-code-")
        self._code = {
            name: _Code(Path(self._scratch.name), name, method, data, held)
            for name, method in methods.items()
        }
        self._graph = _Graph(self._code["decode"]) if graph else None

    def prefill(self, *inputs: Tensor) -> Tensor:
        """See g4tool.backends.executorch.program."""
        return self._code["prefill"](inputs)

    def decode(self, *inputs: Tensor) -> Tensor:
        """See g4tool.backends.executorch.program."""
        return self._graph(inputs) if self._graph else self._code["decode"](inputs)

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of a model's integer tensors that the program has not, bit for bit.

        The program holds the model under the name `model`.
        """
        packed = {name: each for name, each in tensors.items() if each.dtype in _PACKED}
        return [
            name
            for name, each in packed.items()
            if (own := self._weights.get(f"model.{name}")) is None
            or not torch.equal(own, each.to(own.device))
        ]


_PACKED = (torch.uint8, torch.int8)


class _Code:
    """One method's compiled code with its constants."""

    def __init__(
        self, scratch: Path, name: str, method: Compiled, data: DataFile, held: dict[str, Tensor]
    ) -> None:
        self._order = method.inputs
        library = scratch / f"{name}.so"
        code = data.read(method.code)
        _open_torch()
        _require_symbols(data.path, name, code)
        with library.open("wb") as file:
            file.write(code)
        try:
            runner: Any = torch._C._aoti.AOTIModelContainerRunnerCuda
            # Single-threaded: otherwise a run queries events, which no CUDA graph can record.
            self._container = runner(str(library), 1, "cuda", "", True)
        except RuntimeError as error:
            raise G4Error(
                f"{data.path}: the code of {name} cannot be loaded with torch {torch.__version__} "
                f"({str(error).splitlines()[0]}); export the model again on this machine."
            ) from error
        views = {weight.name: _view(held[weight.key], weight) for weight in method.weights}
        names = self._container.get_constant_names_to_original_fqns()
        missing = sorted(set(names.values()) - set(views))
        if missing:
            raise G4Error(f"{data.path}: {name} needs {missing[0]}, which its weights lack.")
        constants = {mangled: views[original] for mangled, original in names.items()}
        self._container.update_constant_buffer(constants, False, False, True)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        placed = [each.to(_DEVICE) for each in inputs]
        result: Tensor
        (result,) = self._container.run([placed[number] for number in self._order])
        return result


class _Graph:
    """A method of fixed shapes, recorded once as a CUDA graph and replayed.

    Code that cannot be recorded is run launch by launch, as without a graph, after one warning.
    """

    def __init__(self, code: _Code) -> None:
        self._code = code
        self._inputs: list[Tensor] = []
        self._result: Tensor | None = None
        self._graph: Any = None
        self._recordable = True

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        if self._graph is None and self._recordable:
            try:
                self._record(inputs)
            except RuntimeError as error:
                self._graph, self._recordable = None, False
                warnings.warn(
                    f"decode cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}); "
                    f"it runs without one, slower.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if self._graph is None:
            return self._code(inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        assert self._result is not None
        return self._result.clone()

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [each.to(_DEVICE).clone() for each in inputs]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Kernels are loaded at the first call, which cannot be recorded. Running a step twice
            # writes the same keys to the same slots.
            self._code(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._result = self._code(self._inputs)
        self._graph = graph


def check_program(path: Path) -> None:
    """Raise G4Error for a .pte whose methods are not each one piece of code that torch can run."""
    program, data = read_program(path)
    _open_torch()
    for name in METHODS:
        method = compiled_method(path, program, data, name)
        _require_symbols(path, name, data.read(method.code))


def check_gpu(folder: Path, facts: ExportFacts) -> None:
    """Raise G4Error where this machine's GPU is not of the kind that an export was compiled for."""
    if not torch.cuda.is_available():
        name = (facts.gpu or {}).get("name", "an NVIDIA GPU")
        raise G4Error(f"{folder} was compiled for {name}, and this machine has no NVIDIA GPU.")
    found = list(torch.cuda.get_device_capability())
    wanted = list((facts.gpu or {}).get("capability", []))
    if found != wanted:
        raise G4Error(
            f"{folder} was compiled for a GPU of capability {wanted}, this one has {found}; "
            f"export the model on this machine."
        )


def _open_torch() -> None:
    """Make torch's symbols visible to code that was linked without it."""
    folder = Path(torch.__file__).parent / "lib"
    for name in _LIBRARIES:
        library = folder / f"{name}.so"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _require_symbols(path: Path, method: str, code: memoryview) -> None:
    """Raise G4Error for code that calls functions of a runtime that torch is not."""
    try:
        needed = undefined_symbols(code)
    except ValueError as error:
        raise G4Error(f"{path}: the code of {method} is {error}; export the model again.") from None
    missing = absent(name for name in needed if name.startswith("aoti_"))
    if missing:
        raise G4Error(
            f"{path}: {method} calls {', '.join(missing)}, which torch {torch.__version__} has "
            f"not; run the program in a CUDA build of ExecuTorch, or export the model with g4."
        )


def _load(methods: Any, files: Sequence[DataFile]) -> dict[str, Tensor]:
    """Every storage that a method needs, once, on the device: key -> bytes."""
    held: dict[str, Tensor] = {}
    for method in methods:
        for weight in method.weights:
            if weight.key in held:
                continue
            file = next((file for file in files if weight.key in file), None)
            if file is None:
                raise G4Error(f"no weights file of the export has {weight.key}; it is incomplete.")
            stored = file.read(weight.key)
            if len(stored) < weight.nbytes:
                raise G4Error(
                    f"{file.path} holds {len(stored)} bytes of {weight.name} where the program "
                    f"needs {weight.nbytes}: it belongs to another program; export the model again."
                )
            data = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
            held[weight.key] = data.to(_DEVICE) if weight.on_device else data
    return held


def _view(storage: Tensor, weight: Weight) -> Tensor:
    dtype = _DTYPES[weight.dtype]
    flat = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return flat.as_strided(weight.shape, weight.strides, weight.offset)


# By torch's ScalarType number.
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}
