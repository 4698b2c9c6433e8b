"""An export's folder that is damaged, foreign or of another version is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from g4tool.backends.executorch.folder import EXPORT, PROGRAM, ExportFacts, record, to_json
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


def test_a_file_that_is_no_program_is_refused(folder: Path) -> None:
    with pytest.raises(G4Error, match=r"model\.pte cannot be loaded.*export the model again"):
        XnnpackMethods(folder / PROGRAM)
