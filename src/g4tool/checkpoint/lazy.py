"""A checkpoint under canonical names: sorted and checked at once, its values read when asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from g4tool.checkpoint import names
from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.inventory import text_tensors
from g4tool.checkpoint.tensorfile import SafetensorsFile, TensorInfo, row_blocks
from g4tool.errors import G4Error
from g4tool.model.config import TextConfig
from g4tool.progress import Progress, Report, silent

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Bounds of the towers' clipped linears; an infinite one means no bound.
_CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Checkpoint:
    """A checkpoint's tensors by canonical name; nothing is read until `read`.

    `names` are the text model's tensors in model order, `extras` the towers' keys as they are in
    the files, `dropped` the keys left out, each with its reason. `folder` is where the files lie.
    """

    def __init__(
        self, folder: Path, raw_config: dict[str, Any], files: Mapping[str, SafetensorsFile]
    ) -> None:
        """Sort and check the tensors of `files`, given by file name.

        Raises G4Error for a tensor nobody reads, a parameter nobody fills, a wrong shape or dtype.
        """
        self.folder = folder
        self.raw_config = raw_config
        self.config: TextConfig = parse_text_config(raw_config, str(folder / "config.json"))
        self._files = dict(files)
        self._file_of = {key: name for name, file in files.items() for key in file.tensors}
        prefix = names.find_prefix(self._file_of)
        if prefix is None:
            known = ", ".join(f"{p}embed_tokens.weight" for p in names.PREFIXES)
            raise G4Error(f"{folder}: no file has the embedding; looked for {known}.")
        mapped = names.map_names(self._file_of, self.config, prefix)
        self.prefix = prefix
        self.extras = mapped.extras
        self.dropped = mapped.dropped
        self._pieces = mapped.pieces
        self._infos = self._check(mapped)
        self.names = list(self._infos)

    @property
    def files(self) -> list[Path]:
        """The safetensors files."""
        return [file.path for file in self._files.values()]

    @property
    def open_files(self) -> Mapping[str, SafetensorsFile]:
        """The safetensors files as they are open, by file name."""
        return self._files

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a canonical name or an extra."""
        if name in self._infos:
            return self._infos[name]
        return self._file(name).info(name)

    def hf_name(self, name: str) -> str:
        """The key the published layout has for `name`, with this checkpoint's prefix."""
        return names.hf_name(name, self.prefix) if name in self._infos else name

    def pieces(self, name: str) -> list[tuple[str, str]]:
        """File name and key of each part of a canonical name or an extra, in order."""
        return [(self._file_of[key], key) for key in self._pieces.get(name, (name,))]

    def read(
        self, name: str, start: int = 0, stop: int | None = None, pinned: bool = False
    ) -> torch.Tensor:
        """Rows start:stop of dimension 0 of a canonical name or an extra, in fresh memory.

        `pinned`: in page-locked memory.
        """
        keys = self._pieces.get(name, (name,))
        if keys[0] == self.hf_name(name):
            return self._file(keys[0]).read(keys[0], start, stop, pinned)
        info = self._infos[name]
        stop = info.rows if stop is None else stop
        if not 0 <= start <= stop <= info.rows:
            raise ValueError(f"rows {start}:{stop} of {name}, which has {info.rows}")
        each = len(keys) // info.rows
        shape = (stop - start, *info.shape[1:])
        result = torch.empty(shape, dtype=info.dtype, pin_memory=pinned)
        parts = result.view(stop - start, each, -1, info.shape[-1])
        for index, key in enumerate(keys[start * each : stop * each]):
            parts[index // each, index % each] = self._file(key).read(key)
        return result

    def check_finite(self, report: Report = silent) -> None:
        """Stream all values; G4Error names file and tensor of the first NaN or infinity."""
        kept = [key for name in (*self.names, *self.extras) for _, key in self.pieces(name)]
        total = sum(self._file(key).info(key).nbytes for key in kept)
        done = 0
        for key in kept:
            file = self._file(key)
            check_values(file, key)
            done += file.info(key).nbytes
            report(Progress("check", done, total, "bytes", key))

    def close(self) -> None:
        """Give the files back."""
        for file in self._files.values():
            file.close()

    def _file(self, key: str) -> SafetensorsFile:
        try:
            return self._files[self._file_of[key]]
        except KeyError:
            raise G4Error(f"{self.folder} has no tensor {key}.") from None

    def _check(self, mapped: names.NameMap) -> dict[str, TensorInfo]:
        if mapped.unread:
            key = mapped.unread[0]
            raise G4Error(
                f"{self._file(key).path}: nobody reads the tensor {key}{_more(mapped.unread)}; "
                f"this config.json describes another model."
            )
        if mapped.unfilled:
            name = mapped.unfilled[0]
            raise G4Error(
                f"{self.folder}: no file has the tensor {names.hf_name(name, self.prefix)}"
                f"{_more(mapped.unfilled)}, which this config.json asks for."
            )
        shapes = text_tensors(self.config)
        return {name: self._check_tensor(name, shapes[name]) for name in shapes}

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        keys = self._pieces[name]
        fused = keys[0] == names.hf_name(name, self.prefix)
        each = shape if fused else (shape[0] * shape[1] // len(keys), *shape[2:])
        first = self._file(keys[0]).info(keys[0])
        for key in keys:
            info, path = self._file(key).info(key), self._file(key).path
            if info.shape != each:
                raise G4Error(
                    f"{path}: {key} has the shape {list(info.shape)}, but config.json asks for "
                    f"{list(each)}."
                )
            if info.dtype not in _FLOATS or info.dtype != first.dtype:
                raise G4Error(
                    f"{path}: {key} is {_dtype(info)}; a plain checkpoint's weights are bfloat16, "
                    f"float16 or float32, and one tensor's parts are alike."
                )
        return TensorInfo(name, first.dtype, shape, first.offset if fused else 0)


def check_values(file: SafetensorsFile, key: str) -> None:
    """Raise G4Error, naming file and tensor, for NaN or infinity, but where it means no bound."""
    info = file.info(key)
    if info.dtype.is_floating_point and not key.endswith(_CLIP_BOUNDS):
        for start, stop in row_blocks(info.rows, info.row_nbytes):
            _check_rows(file, key, start, stop)


def _check_rows(file: SafetensorsFile, key: str, start: int, stop: int) -> None:
    values = file.read(key, start, stop)
    if not values.numel():
        return
    if values.dtype.itemsize == 1:
        values = values.float()  # torch has no reductions for float8
    # Both bounds are NaN if any value is, and one pass needs no temporary of the block's size.
    low, high = torch.aminmax(values)
    if not (low.isfinite() and high.isfinite()):
        kind = "NaN" if low.isnan() else "an infinite value"
        raise G4Error(f"{file.path}: {key} has {kind} in rows {start} to {stop - 1}.")


def _more(items: list[str]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")
