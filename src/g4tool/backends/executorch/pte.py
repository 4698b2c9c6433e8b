"""What lies in a finished .pte and .ptd: read in place, no weight is copied."""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4tool.backends.executorch.library import quiet, require_exporter
from g4tool.errors import G4Error

_AGAIN = "export the model again."
_WEIGHTS_MAGIC = b"ETCUDAFQN3"


@dataclass(frozen=True)
class Weight:
    """One constant of compiled code: `name` in the model, `key` of its storage in the .ptd.

    `dtype` is ExecuTorch's (and torch's) scalar type number; offsets and strides in elements.
    """

    name: str
    key: str
    nbytes: int
    dtype: int
    on_device: bool
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Compiled:
    """A method that is one CUDA delegate: its code's key, its constants, and for each input of the
    code the number of the method's input that it is."""

    code: str
    weights: tuple[Weight, ...]
    inputs: tuple[int, ...]


class DataFile:
    """Named data of a .pte or a .ptd, as views of the mapped file."""

    def __init__(self, path: Path, base: int, spans: dict[str, tuple[int, int]]) -> None:
        self.path = path
        self._file = path.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        size = len(self._map)
        for key, (offset, length) in spans.items():
            if base + offset + length > size:
                raise G4Error(f"{path} is cut short: {key} ends beyond its {size} bytes; {_AGAIN}")
        self._spans = {key: (base + offset, length) for key, (offset, length) in spans.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._spans

    def read(self, key: str) -> memoryview:
        """The bytes of an entry. Raises G4Error when there is none."""
        if key not in self._spans:
            raise G4Error(f"{self.path} lacks {key}: it belongs to another program; {_AGAIN}")
        offset, length = self._spans[key]
        return memoryview(self._map)[offset : offset + length]


def read_program(path: Path) -> tuple[Any, DataFile]:
    """A .pte's program (executorch.exir.schema.Program) and its named data.

    Raises G4Error for a file that is none.
    """
    require_exporter()
    with quiet():
        from executorch.exir._serialize._flatbuffer_program import _flatbuffer_to_program
        from executorch.exir._serialize._program import _get_extended_header

    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        header = _get_extended_header(head) if len(head) == 64 else None
        if header is None or not header.is_valid() or header.program_size > size:
            raise G4Error(f"{path} is no whole ExecuTorch program; {_AGAIN}")
        file.seek(0)
        try:
            program = _flatbuffer_to_program(file.read(header.program_size))
        except Exception as error:  # the reader of flatbuffers raises whatever it trips over
            raise G4Error(f"{path} is a damaged ExecuTorch program; {_AGAIN}") from error
    spans = {}
    for entry in program.named_data or ():
        segment = program.segments[entry.segment_index]
        spans[entry.key] = (segment.offset, segment.size)
    for number, segment in enumerate(program.segments):
        spans[f"segment {number}"] = (segment.offset, segment.size)
    return program, DataFile(path, header.segment_base_offset, spans)


def read_weights(path: Path) -> DataFile:
    """A .ptd's named data. Raises G4Error for a file that is none."""
    require_exporter()
    with quiet():
        from executorch.extension.flat_tensor.serialize import serialize

    with path.open("rb") as file:
        head = file.read(64)
        header = serialize._get_extended_header(head) if len(head) == 64 else None
        if header is None or not header.is_valid():
            raise G4Error(f"{path} is no ExecuTorch weights file; {_AGAIN}")
        file.seek(0)
        table = file.read(header.flatbuffer_offset + header.flatbuffer_size)
    try:
        found = serialize._deserialize_to_flat_tensor(table)
    except Exception as error:  # as above
        raise G4Error(f"{path} is a damaged ExecuTorch weights file; {_AGAIN}") from error
    spans = {
        entry.key: (
            found.segments[entry.segment_index].offset,
            found.segments[entry.segment_index].size,
        )
        for entry in found.named_data
    }
    return DataFile(path, header.segment_base_offset, spans)


def compiled_method(path: Path, program: Any, data: DataFile, method: str) -> Compiled:
    """The CUDA code of a method. Raises G4Error where the method is not one CUDA delegate."""
    plan = next((plan for plan in program.execution_plan if plan.name == method), None)
    if plan is None:
        raise G4Error(f"{path} has no method {method}: g4 did not export it.")
    delegates = [each for each in plan.delegates if each.id == "CudaBackend"]
    if len(plan.delegates) != 1 or len(delegates) != 1:
        names = ", ".join(sorted({each.id for each in plan.delegates})) or "none"
        raise G4Error(
            f"{path}: {method} is not one piece of CUDA code (its delegates: {names}), so it runs "
            f"only in an ExecuTorch with that backend."
        )
    reference = delegates[0].processed
    if int(reference.location) == 0:  # inline
        processed = bytes(program.backend_delegate_data[reference.index].data)
    else:
        processed = bytes(data.read(f"segment {reference.index}"))
    code, weights = _decode(path, processed)
    return Compiled(code, weights, _input_order(path, plan, method))


def _decode(path: Path, processed: bytes) -> tuple[str, tuple[Weight, ...]]:
    """The compiler's own note of a method: the code's key and its constants."""
    if not processed.startswith(_WEIGHTS_MAGIC):
        raise G4Error(f"{path} was compiled by another version of executorch; {_AGAIN}")
    at = len(_WEIGHTS_MAGIC)

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        size = struct.calcsize(form)
        if at + size > len(processed):
            raise G4Error(f"{path}: the list of a method's weights is cut short; {_AGAIN}")
        values = struct.unpack_from(form, processed, at)
        at += size
        return values

    def text() -> str:
        (length,) = take("<I")
        return str(take(f"<{length}s")[0], "utf-8")

    code = text()
    (count,) = take("<I")
    weights = []
    for _ in range(count):
        name, key = text(), text()
        nbytes, dtype, device, offset, rank = take("<QiiqI")
        shape, strides = take(f"<{rank}q"), take(f"<{rank}q")
        weights.append(Weight(name, key, nbytes, dtype, device == 1, offset, shape, strides))
    return code, tuple(weights)


def _input_order(path: Path, plan: Any, method: str) -> tuple[int, ...]:
    """For each input of the delegate, which input of the method it is.

    Inputs reach it through copies to the device: a copy's last argument is its result.
    """
    origin = {value: number for number, value in enumerate(plan.inputs)}
    for instruction in _instructions(plan):
        call = instruction.instr_args
        if hasattr(call, "op_index"):
            source = next((origin[arg] for arg in call.args if arg in origin), None)
            if source is not None:
                for arg in call.args:
                    origin.setdefault(arg, source)
        elif hasattr(call, "delegate_index"):
            order = []
            for arg in call.args:
                if arg in origin and origin[arg] not in order:
                    order.append(origin[arg])
            if sorted(order) != list(range(len(plan.inputs))):
                raise G4Error(f"{path}: {method} does not hand all its inputs to its code.")
            return tuple(order)
    raise G4Error(f"{path}: {method} never calls its code.")


def _instructions(plan: Any) -> Iterator[Any]:
    for chain in plan.chains:
        yield from chain.instructions
