"""An export's folder that is damaged, foreign or of another version is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from g4tool.backends.executorch import folder as exported
from g4tool.backends.executorch.folder import (
    EXPORT,
    PROGRAM,
    ExportFacts,
    check_files,
    read_facts,
    record,
    to_json,
)
from g4tool.backends.executorch.runtime import XnnpackMethods, open_export
from g4tool.errors import G4Error

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of an export, its program no program."""
    (tmp_path / PROGRAM).write_bytes(CONTENT)
    facts = ExportFacts(
        backend="xnnpack",
        activations="float32",
        max_seq_len=64,
        prefill_chunk=16,
        sliding_window=8,
        vocab_size=100,
        bos_id=2,
        eos_ids=[1],
        sampling=False,
        turn=None,
        delegates={},
        gpu=None,
        versions={},
        source={},
        files=record(tmp_path, [PROGRAM]),
    )
    (tmp_path / EXPORT).write_text(json.dumps(to_json(facts)))
    return tmp_path


def _truncate(folder: Path) -> None:
    (folder / PROGRAM).write_bytes(CONTENT[:5000])


def _change(folder: Path) -> None:
    (folder / PROGRAM).write_bytes(CONTENT[:-1] + b"\0")


def _edit(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / EXPORT).read_text())
        (folder / EXPORT).write_text(json.dumps(raw | changes))

    return edit


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_truncate, "model.pte is damaged"),
        (_change, "model.pte is damaged"),
        (lambda folder: (folder / PROGRAM).unlink(), "model.pte is missing"),
        (lambda folder: (folder / EXPORT).write_text("{"), "export.json"),
        (_edit(format="other"), "this g4 reads"),
        (_edit(format_version=2), "this g4 reads"),
        (_edit(max_seq_len="64"), "max_seq_len is no whole number"),
        (_edit(unheard_of=1), "does not fit this version of g4"),
    ],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], object], says: str) -> None:
    harm(folder)
    with pytest.raises(G4Error, match=says):
        open_export(folder)


@pytest.mark.parametrize(
    ("at", "seen"), [(0, True), (len(CONTENT) - 1, True), (len(CONTENT) // 2, False)]
)
def test_large_files_are_hashed_whole_only_when_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int, seen: bool
) -> None:
    monkeypatch.setattr(exported, "_SMALL", 1000)
    monkeypatch.setattr(exported, "_END", 100)
    facts = replace(read_facts(folder), files=record(folder, [PROGRAM]))
    check_files(folder, facts, whole=False)
    changed = bytearray(CONTENT)
    changed[at] ^= 1
    (folder / PROGRAM).write_bytes(changed)
    with pytest.raises(G4Error, match=r"model\.pte is damaged"):
        check_files(folder, facts)
    if seen:
        with pytest.raises(G4Error, match=r"model\.pte is damaged"):
            check_files(folder, facts, whole=False)
    else:
        check_files(folder, facts, whole=False)
    # An export of before the ends were noted is checked by its sizes.
    older = {PROGRAM: {key: facts.files[PROGRAM][key] for key in ("size", "sha256")}}
    check_files(folder, replace(facts, files=older), whole=False)
    (folder / PROGRAM).write_bytes(CONTENT[:-1])
    with pytest.raises(G4Error, match=r"model\.pte is damaged"):
        check_files(folder, replace(facts, files=older), whole=False)


def test_a_file_that_is_no_program_is_refused(folder: Path) -> None:
    with pytest.raises(G4Error, match=r"model\.pte cannot be loaded.*export the model again"):
        XnnpackMethods(folder / PROGRAM)
