"""Runs the compilation in the SDK's own Python, and tells how far it is.

The folder it works in survives a kill: NxD Inference's compile cache in it keeps each finished
program, so that the next run goes on at the first unfinished bucket.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4tool.errors import G4Error
from g4tool.files import sha256
from g4tool.progress import Progress, Report

_SCRATCH = "compile"
_LOG = "compile.log"
_MODULE = "g4tool.backends.neuron.compile_nxdi"


def scratch_folder(files: Path) -> Path:
    """Where the compiler of the artifact that is being made in `files` works: beside it."""
    return files.parent / _SCRATCH


def compile_in(
    python: Path, model: Path, scratch: Path, config: Path, report: Report, weights: Path
) -> dict[str, Any]:
    """Compile the checkpoint in `model` into `scratch`, as `config` asks, over shards in `weights`.

    Returns {"versions", "neffs": {name: sha256}}; the programs are then in scratch/model.pt and
    all output in scratch/compile.log. Raises G4Error with the SDK's last word and the log's place.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    link = scratch / "weights"
    link.unlink(missing_ok=True)
    link.symlink_to(weights)
    command = [str(python), "-m", _MODULE, "--model", str(model.resolve())]
    command += ["--config", str(config), "--out", str(scratch), "--watched"]
    log = scratch / _LOG
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command,
            # Closed when this process ends, however it ends, which stops the compilers too.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(),
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            last: Mapping[str, Any] = {}
            for line in process.stdout:
                event = _event(line)
                if event is None:
                    errors.write(line)
                    errors.flush()
                    continue
                last = event
                if event["event"] == "bucket":
                    note = f"{event['model']} {event['bucket']}"
                    report(Progress("compile", event["done"], event["total"], "programs", note))
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        code = process.wait()
    if code or last.get("event") != "done" or not (scratch / "model.pt").is_file():
        why = last.get("message") or f"it ended with exit code {code} and no result"
        raise G4Error(
            f"the Neuron SDK did not compile the model: {why}. Its log is {log}; what is compiled "
            "is kept, run the same command again to go on."
        )
    neffs = {path.relative_to(scratch).as_posix(): path for path in scratch.glob("work/**/*.neff")}
    return {
        "versions": dict(last["versions"]),
        "neffs": {name: sha256(neffs[name]) for name in sorted(neffs)},
    }


def _environment() -> dict[str, str]:
    """With this package importable there, whatever that Python has."""
    import g4tool

    source = str(Path(g4tool.__file__).parent.parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{before}" if before else source}


def _event(line: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value else None
