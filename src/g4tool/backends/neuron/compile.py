"""Runs the compilation in the SDK's own Python, and tells how far it is.

The folder it works in survives a kill: NxD Inference's compile cache in it keeps each finished
program, so that the next run goes on at the first unfinished bucket.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from g4tool.errors import G4Error
from g4tool.files import sha256
from g4tool.progress import Progress, Report

_SCRATCH = "compile"
_LOG = "compile.log"
_RESULTS = ("model.pt", "neuron_config.json")
_MODULE = "g4tool.backends.neuron.compile_nxdi"
# Seconds that compilers are given to end by themselves.
_PATIENCE = 10


def scratch_folder(files: Path) -> Path:
    """Where the compiler of the artifact that is being made in `files` works: beside it."""
    return files.parent / _SCRATCH


def compile_in(
    python: Path, model: Path, scratch: Path, config: Path, report: Report, weights: Path
) -> dict[str, Any]:
    """Compile the checkpoint in `model` into `scratch`, as `config` asks, over shards in `weights`.

    Returns {"versions", "neffs": {name: sha256}}; scratch then has model.pt, the programs, the
    SDK's neuron_config.json, and in compile.log all output. Raises G4Error with the SDK's last word
    and the log's place, also where it says that it is done and has not left these and NEFFs.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    link = scratch / "weights"
    link.unlink(missing_ok=True)
    link.symlink_to(weights)
    # What an earlier run left is not this one's result.
    for name in _RESULTS:
        (scratch / name).unlink(missing_ok=True)
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
            encoding="utf-8",
            errors="replace",
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
            _stop(process)
            raise
        code = process.wait()
    neffs = {path.relative_to(scratch).as_posix(): path for path in scratch.glob("work/**/*.neff")}
    made = neffs and all((scratch / name).is_file() for name in _RESULTS)
    if code or last.get("event") != "done" or not made:
        why = last.get("message") or f"it ended with exit code {code} and no result"
        raise G4Error(
            f"the Neuron SDK did not compile the model: {why.rstrip('.')}. Its log is {log}; what "
            "is compiled is kept, run the same command again to go on."
        )
    return {
        "versions": dict(last["versions"]),
        "neffs": {name: sha256(neffs[name]) for name in sorted(neffs)},
    }


def _stop(process: subprocess.Popen[str]) -> None:
    """End the process and all that it started."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


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
