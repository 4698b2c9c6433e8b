"""Parses the header of a GGUF file: its metadata, and where each tensor lies; no values.

The gguf package's own reader maps the file (what that does to the resident set, tensorfile.py
says) and keeps objects for every entry of the vocabulary, some two million for a Gemma. Which
types of values there are, and how large their blocks, is still asked of that package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (little-endian; magic, version,
counts, key-value pairs, an entry for each tensor; then the values, aligned).
"""

import hashlib
import importlib
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from g4tool.checkpoint.settings import shown
from g4tool.errors import G4Error

Metadata = dict[str, Any]
"""Values by key: int, float, bool, str, or a list of one of them."""

ALIGNMENT = 32
_VERSIONS = (2, 3)
# More than any model has; a larger number is a broken file.
_MOST_ENTRIES = 1 << 20
_MOST_DIMENSIONS = 4
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
# Struct codes of the scalar types, by their numbers in the format.
_SCALARS = {
    **dict(enumerate("BbHhIif?")),
    **dict(enumerate("Qqd", start=10)),
}


@dataclass(frozen=True)
class GgufTensor:
    """An entry of the header. `shape` is outermost first; `kind` the gguf package's type number.

    `offset` counts bytes from the start of the file.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What the header says. `sha256` is that of all bytes before the values."""

    metadata: Metadata
    tensors: dict[str, GgufTensor]
    sha256: str
    size: int


def gguf_package() -> Any:
    """The gguf package. Raises G4Error where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise G4Error(
            "GGUF files need the gguf package: install it with pip install 'g4tool[gguf]'."
        ) from None


def read_header(path: Path, texts: bool = False) -> GgufHeader:
    """The header of the file at `path`. Lists of texts, the vocabulary, are empty unless `texts`.

    Raises G4Error, naming the file and where possible the key or tensor, when it is missing, no
    GGUF file, cut short, one of several, or holds values of a type that the gguf package does not
    decode.
    """
    try:
        with path.open("rb") as file:
            return _Parser(path, file, texts).header()
    except FileNotFoundError:
        raise G4Error(f"{path} does not exist.") from None
    except OSError as error:
        raise G4Error(f"{path} cannot be read: {error.strerror}.") from None


class _Parser:
    def __init__(self, path: Path, file: BinaryIO, texts: bool) -> None:
        self._path = path
        self._texts = texts
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._left = self._size
        self._sizes: dict[int, tuple[int, int]] = {}

    def header(self) -> GgufHeader:
        tensors, pairs = self._counts()
        metadata: Metadata = {}
        for _ in range(pairs):
            key = self._name("a metadata key")
            if key in metadata:
                raise G4Error(f"{self._path}: the metadata key {key} is there twice.")
            metadata[key] = self._value(self._number("I"), key)
        count = metadata.get("split.count", 1)
        if count != 1:
            raise G4Error(
                f"{self._path} is one of {count} files that make one model; join them first with "
                f"llama.cpp's llama-gguf-split --merge."
            )
        entries = [self._entry() for _ in range(tensors)]
        align = metadata.get("general.alignment", ALIGNMENT)
        if type(align) is not int or align < 1:
            raise G4Error(f"{self._path}: general.alignment is {align!r}, not a number of bytes.")
        end = self._size - self._left
        start = -(-end // align) * align
        found: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            tensor = GgufTensor(name, kind, shape, start + offset, self._nbytes(name, kind, shape))
            if tensor.offset + tensor.nbytes > self._size:
                raise G4Error(
                    f"{self._path} is truncated: {name} ends at byte "
                    f"{tensor.offset + tensor.nbytes}, the file has {self._size}."
                )
            if name in found:
                raise G4Error(f"{self._path}: the tensor {name} is there twice.")
            found[name] = tensor
        self._check_apart(found.values())
        self._file.seek(0)
        return GgufHeader(
            metadata, found, hashlib.sha256(self._file.read(end)).hexdigest(), self._size
        )

    def _check_apart(self, tensors: Iterable[GgufTensor]) -> None:
        """No byte belongs to two tensors."""
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset < end:
                raise G4Error(f"{self._path}: {tensor.name} overlaps the tensor before it.")
            end = tensor.offset + tensor.nbytes

    def _counts(self) -> tuple[int, int]:
        if self._take(4, "its beginning") != b"GGUF":
            raise G4Error(f"{self._path} is not a GGUF file: it does not begin with GGUF.")
        version = self._number("I")
        if version not in _VERSIONS:
            raise G4Error(
                f"{self._path} is of GGUF version {version}; g4 reads little-endian files of the "
                f"versions 2 and 3."
            )
        tensors, pairs = self._number("Q"), self._number("Q")
        if max(tensors, pairs) > _MOST_ENTRIES:
            raise G4Error(
                f"{self._path}: the header says {tensors} tensors and {pairs} metadata keys, more "
                f"than any model has; the file is broken."
            )
        return tensors, pairs

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind in _SCALARS:
            value = self._number(_SCALARS[kind], key)
            # As 1e-6 comes back from single precision, where the shortest number is meant.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        if kind != _ARRAY:
            raise G4Error(f"{self._path}: {key} is of the type {kind}, which GGUF does not have.")
        kind, count = self._number("I", key), self._number("Q", key)
        if kind == _STRING:
            # Every string has 8 bytes of length, so a count beyond that is a broken one.
            self._check(8 * count, key)
            if self._texts:
                return [self._text(key) for _ in range(count)]
            for _ in range(count):
                self._take(self._number("Q", key), key)
            return []
        if kind not in _SCALARS:
            raise G4Error(
                f"{self._path}: {key} is a list of the type {kind}, which g4 cannot read."
            )
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self._take(count * _width(code), key)))

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._name("a tensor's name")
        dimensions = self._number("I", name)
        if dimensions > _MOST_DIMENSIONS:
            raise G4Error(f"{self._path}: {name} has {dimensions} dimensions; GGUF has up to 4.")
        shape = tuple(self._number("Q", name) for _ in range(dimensions))[::-1]
        return name, self._number("I", name), shape, self._number("Q", name)

    def _nbytes(self, name: str, kind: int, shape: tuple[int, ...]) -> int:
        block, size = self._block(name, kind)
        if not shape or shape[-1] % block:
            raise G4Error(
                f"{self._path}: {name} has the shape {list(shape)}, whose rows are no blocks of "
                f"{block} values."
            )
        return math.prod(shape) // block * size

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        """Values and bytes of a block of the type."""
        if kind not in self._sizes:
            gguf = gguf_package()
            try:
                known = gguf.GGMLQuantizationType(kind)
                block, size = gguf.GGML_QUANT_SIZES[known]
                gguf.quants.dequantize(np.zeros((1, size), np.uint8), known)
            except (KeyError, NotImplementedError, ValueError):
                raise G4Error(
                    f"{self._path}: {name} holds values of the type {kind}, which the gguf "
                    f"package does not decode; take a file of another quantization."
                ) from None
            self._sizes[kind] = (block, size)
        return self._sizes[kind]

    def _name(self, what: str) -> str:
        name = self._text(what)
        if not name.isprintable():
            raise G4Error(f"{self._path}: {what} is {shown(name)}, which is no name.")
        return name

    def _text(self, what: str) -> str:
        content = self._take(self._number("Q", what), what)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise G4Error(f"{self._path}: {what} is not UTF-8 text.") from None

    def _number(self, code: str, what: str = "the header") -> Any:
        return struct.unpack(f"<{code}", self._take(_width(code), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        self._check(count, what)
        self._left -= count
        return self._file.read(count)

    def _check(self, count: int, what: str) -> None:
        if count > self._left:
            raise G4Error(
                f"{self._path} is truncated: {what} needs {count} bytes, {self._left} are left."
            )


def _width(code: str) -> int:
    return struct.calcsize(f"<{code}")
