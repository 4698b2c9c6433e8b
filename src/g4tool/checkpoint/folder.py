"""What lies in a checkpoint's folder: config.json, the index and its shards, the small files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4tool.checkpoint.settings import shown
from g4tool.checkpoint.tensorfile import SafetensorsFile
from g4tool.checkpoint.writer import INDEX, SINGLE
from g4tool.errors import G4Error

CONFIG = "config.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
# What the store says of a folder of its own; not the model's.
_STORE_FILES = {"manifest.json", "where.json", "view.json"}
_WEIGHTS = {*_PICKLES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".part"}
# What working in the folder leaves behind; a log even grows while the model is read.
_LITTER_NAMES = {"log.txt", "nohup.out"}
_LITTER_ENDS = (".log", "~", ".swp", ".swo")
# The longest name that file systems take.
_NAME_BYTES = 255


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object, which can be written as JSON again.

    Raises G4Error when it is missing, not JSON, or another value, and for what Python reads but
    JSON does not have: NaN, infinity, half a surrogate pair.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise G4Error(f"{path} does not exist.") from None
    except OSError as error:
        raise G4Error(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise G4Error(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise G4Error(f"{path} is not a JSON object.")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise G4Error(f"{path} has half a surrogate pair in a string, which is no text.") from None
    except ValueError:
        raise G4Error(
            f"{path} has NaN or infinity as a number, which JSON does not have."
        ) from None
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a plain checkpoint. Raises G4Error when it says that they are quantized.

    A `quantization_config` without a method says how the weights were trained, and they are plain.
    """
    if not folder.is_dir():
        raise G4Error(f"{folder} is not a folder.")
    path = folder / CONFIG
    if not os.path.lexists(path):
        if found := sorted(folder.glob("*.gguf")):
            raise G4Error(f"{folder} has a GGUF file and no {CONFIG}; give {found[0]} itself.")
        raise G4Error(f"{path} does not exist; a checkpoint's folder has one.")
    raw = read_json(path)
    section = quantization_section(raw)
    method = section.get("quant_method")
    if method is not None or section.get("format") == "g4":
        form = "a bundle of g4" if method is None else f"quant_method {method!r}"
        raise G4Error(quantized_already(path, form))
    return raw


def quantization_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of a config.json's content; empty where there is none."""
    text = raw.get("text_config")
    for table in (raw, text if isinstance(text, dict) else {}):
        section = table.get("quantization_config")
        if isinstance(section, dict) and section:
            return section
    return {}


def quantized_already(path: Path, form: str) -> str:
    """The sentence for quantized weights where plain ones are asked for."""
    return (
        f"{path}: the weights are quantized already ({form}); this is not a plain checkpoint: "
        f"`g4 run` and `g4 export-cpu --prequantized` take it if g4 reads that form, and to "
        f"quantize anew take the model it was made from."
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted; none where there is no such folder.

    Hidden ones are no model's: macOS puts a `._<name>` beside every file it copies to a foreign
    disk.
    """
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))


def has_pickles(folder: Path) -> bool:
    """Whether pickled weights lie in a folder."""
    return any(path.suffix in _PICKLES for path in _visible(folder))


def open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """The safetensors files of a folder by name, checked against the index where there is one."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        weight_map = _weight_map(index)
        if single.is_file() and SINGLE not in weight_map.values():
            raise G4Error(f"{folder} has both {SINGLE} and {INDEX}, which does not name it.")
        return _open_shards(index, weight_map)
    if single.exists():
        return {SINGLE: SafetensorsFile(single)}
    if weight_files(folder):
        raise G4Error(f"{index} does not exist, nor {SINGLE}; the download is not complete.")
    if has_pickles(folder):
        raise G4Error(
            f"{folder} has its weights in pickle files only, which g4 never loads because "
            f"loading one runs code; take the safetensors version."
        )
    raise G4Error(f"{folder} has no weights: neither {SINGLE} nor {INDEX}.")


def side_files(folder: Path) -> list[str]:
    """Names of the files that belong to the model beside its weights, sorted.

    Everything counts but weights, hidden files, logs and editors' backups, so that a template or
    processor file nobody thought of is not lost on the way. Raises G4Error when the folder cannot
    be read.
    """
    files = [p for p in _visible(folder) if p.name not in _STORE_FILES]
    kept = [p for p in files if p.suffix not in _WEIGHTS and not p.name.endswith(".index.json")]
    more = folder / "additional_chat_templates"
    templates = [p for p in _visible(more) if p.suffix == ".jinja"] if more.is_dir() else []
    return sorted(
        p.relative_to(folder).as_posix()
        for p in [*kept, *templates]
        if p.is_file() and p.name not in _LITTER_NAMES and not p.name.endswith(_LITTER_ENDS)
    )


def _visible(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise G4Error(f"{folder} cannot be read: {error.strerror}.") from None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise G4Error(f"{index}: weight_map is missing or not a table.")
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            raise G4Error(f"{index}: {name} is said to be in {shown(shard)}, not a file's name.")
    return weight_map


def _is_file_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and Path(value).name == value
        and value not in ("", ".", "..")
        and "\0" not in value
        and len(value.encode()) <= _NAME_BYTES
    )


def _open_shards(index: Path, weight_map: dict[str, str]) -> dict[str, SafetensorsFile]:
    files: dict[str, SafetensorsFile] = {}
    for name, shard in weight_map.items():
        if shard not in files:
            path = index.parent / shard
            if not path.exists():
                raise G4Error(
                    f"{path} does not exist, but {INDEX} says that {name} is in it; "
                    f"the download is not complete."
                )
            files[shard] = SafetensorsFile(path)
        if name not in files[shard].tensors:
            raise G4Error(f"{files[shard].path} has no tensor {name}, but {INDEX} says so.")
    for shard, file in files.items():
        for name in file.tensors:
            if name not in weight_map:
                raise G4Error(f"{file.path}: {INDEX} does not name the tensor {name} in it.")
            if weight_map[name] != shard:
                raise G4Error(
                    f"{file.path} has the tensor {name}, which {INDEX} says is in "
                    f"{weight_map[name]}."
                )
    return dict(sorted(files.items()))
