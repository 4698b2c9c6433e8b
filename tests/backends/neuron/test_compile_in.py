"""The process that runs the SDK may fail, lie, or not end: shell scripts stand for it."""

import time
from pathlib import Path

import pytest

from g4tool.backends.neuron import compile as compiling
from g4tool.backends.neuron.compile import compile_in
from g4tool.errors import G4Error
from g4tool.progress import Progress, Report, silent

_DONE = """echo '{"event": "done", "versions": {"neuronx-cc": "2.23"}}'"""
# Its --out is the scratch folder, which is where it is told to work.
_MAKES = {
    "programs": 'touch "$out/model.pt" "$out/neuron_config.json"',
    "neff": 'mkdir -p "$out/work/a"; echo x > "$out/work/a/graph.neff"',
}


def _python(folder: Path, *lines: str) -> Path:
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", f'out="{folder}/scratch"', *lines, ""]))
    path.chmod(0o755)
    return path


def _compile(folder: Path, python: Path, report: Report = silent) -> dict[str, object]:
    (folder / "weights").mkdir(exist_ok=True)
    scratch, config = folder / "scratch", folder / "asked.json"
    return compile_in(python, folder, scratch, config, report, folder / "weights")


@pytest.mark.parametrize("missing", sorted(_MAKES))
def test_done_without_all_results_is_not_compiled(missing: str, tmp_path: Path) -> None:
    """Nor do results count that an earlier run has left."""
    whole = _python(tmp_path, *_MAKES.values(), _DONE)
    made = _compile(tmp_path, whole)
    assert made["versions"] == {"neuronx-cc": "2.23"}
    # The SHA-256 of "x\n".
    assert made["neffs"] == {
        "work/a/graph.neff": "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac"
    }
    others = [line for name, line in _MAKES.items() if name != missing]
    lazy = _python(tmp_path, 'rm -r "$out/work"', *others, _DONE)
    with pytest.raises(G4Error, match="did not compile the model: it ended with exit code 0"):
        _compile(tmp_path, lazy)


def test_output_that_is_no_text_goes_to_the_log(tmp_path: Path) -> None:
    python = _python(tmp_path, r"printf '\377\376 here\n'", "echo there >&2", "exit 4")
    with pytest.raises(G4Error, match="exit code 4"):
        _compile(tmp_path, python)
    log = (tmp_path / "scratch" / "compile.log").read_text()
    assert " here\n" in log
    assert "there\n" in log


def test_what_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption, while a compiler that heeds no signal runs."""
    monkeypatch.setattr(compiling, "_PATIENCE", 0.2)
    event = '{"event": "bucket", "model": "m", "bucket": 1, "done": 1, "total": 2}'
    loop = 'while :; do echo >> "$out/beats"; sleep 0.05; done'
    python = _python(tmp_path, "trap '' TERM", f"echo '{event}'", loop)

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _compile(tmp_path, python, interrupt)
    beats = (tmp_path / "scratch" / "beats").stat().st_size
    time.sleep(0.5)
    assert (tmp_path / "scratch" / "beats").stat().st_size == beats
