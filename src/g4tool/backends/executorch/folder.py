"""The folder of an exported program: model.pte, its weights, the tokenizer, and export.json."""

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from g4tool.checkpoint.folder import read_json
from g4tool.errors import G4Error
from g4tool.files import sha256

EXPORT = "export.json"
PROGRAM = "model.pte"
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_FORMAT = "g4-export"
_VERSION = 1
_AGAIN = "export the model again."

Backend = Literal["xnnpack", "cuda"]


@dataclass(frozen=True)
class ExportFacts:
    """What export.json says.

    Lengths in tokens. `turn`: what the chat template puts before and after a lone user message, for
    runners without templates; None without a template. `delegates`: calls by backend or operator
    and method. `gpu`: name and capability it was compiled for. `source`: fingerprint of the
    weights, and how they were named. `verified`: the proof's stages, None if it was not asked for.
    """

    backend: Backend
    activations: Literal["float32", "bfloat16", "int8"]
    max_seq_len: int
    prefill_chunk: int
    sliding_window: int
    vocab_size: int
    bos_id: int
    eos_ids: list[int]
    sampling: bool
    turn: dict[str, str] | None
    delegates: dict[str, dict[str, int]]
    gpu: dict[str, Any] | None
    versions: dict[str, str]
    source: dict[str, Any]
    files: dict[str, dict[str, Any]]
    verified: list[dict[str, Any]] | None = None


def to_json(facts: ExportFacts) -> dict[str, Any]:
    """The content of export.json."""
    return {"format": _FORMAT, "format_version": _VERSION, **asdict(facts)}


def is_export(folder: Path) -> bool:
    """Whether the folder says that it holds an exported program."""
    return (folder / EXPORT).is_file()


def read_facts(folder: Path) -> ExportFacts:
    """export.json. Raises G4Error for a missing or broken one, and for another version's."""
    path = folder / EXPORT
    raw = read_json(path)
    kind = (raw.pop("format", None), raw.pop("format_version", None))
    if kind != (_FORMAT, _VERSION):
        raise G4Error(
            f"{path}: the format is {kind}, this g4 reads {(_FORMAT, _VERSION)}; {_AGAIN}"
        )
    try:
        facts = ExportFacts(**raw)
    except TypeError as error:
        raise G4Error(f"{path} does not fit this version of g4 ({error}); {_AGAIN}") from None
    for key in ("max_seq_len", "prefill_chunk", "vocab_size", "bos_id"):
        if type(getattr(facts, key)) is not int:
            raise G4Error(f"{path}: {key} is no whole number; {_AGAIN}")
    return facts


def check_files(folder: Path, facts: ExportFacts, whole: bool = True) -> None:
    """Raise G4Error for a file of the export that is missing, or differs from what was written.

    Without `whole`, of a file of gigabytes only the size, its beginning and its end are looked at:
    what a broken copy leaves behind, in a time that does not grow with the model.
    """
    for name, record in facts.files.items():
        path = folder / name
        if not path.is_file():
            raise G4Error(f"{path} is missing; {_AGAIN}")
        same = path.stat().st_size == record["size"]
        if same and (whole or record["size"] <= _SMALL):
            same = sha256(path) == record["sha256"]
        elif same and "ends" in record:
            same = _ends(path) == record["ends"]
        if not same:
            raise G4Error(f"{path} is damaged: it is not what the export wrote; {_AGAIN}")


def record(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and hashes of files, as export.json lists them; `ends` is the hash of a large file's
    first and last MiB."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        path = folder / name
        found[name] = {"size": path.stat().st_size, "sha256": sha256(path)}
        if found[name]["size"] > _SMALL:
            found[name]["ends"] = _ends(path)
    return found


_SMALL = 2**26
_END = 2**20


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(_END)
        file.seek(-_END, os.SEEK_END)
        return hashlib.sha256(first + file.read()).hexdigest()
