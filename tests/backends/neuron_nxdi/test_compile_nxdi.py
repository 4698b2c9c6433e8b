"""The command that runs in the SDK's Python. Fakes play the SDK: this tests the contract only."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from g4tool.backends.neuron import compile_nxdi
from g4tool.backends.neuron.interface import CompileJob, compiler
from g4tool.checkpoint.tiny import tiny_folder
from g4tool.errors import G4Error, IncompleteError, UsageError

MODULE = "g4tool.backends.neuron.compile_nxdi"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A port whose `compile` leaves the files that NxD Inference leaves; what it was given."""
    seen: dict[str, Any] = {}

    class Config:
        @classmethod
        def from_checkpoint(cls, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
            seen.update(model=folder, settings=settings)
            return settings

    class Model:
        def __init__(self, folder: str, config: dict[str, Any]) -> None:
            buckets = {"context_encoding_model": [64, 128], "token_generation_model": [128]}
            self.models = [
                types.SimpleNamespace(
                    tag=tag,
                    config=types.SimpleNamespace(neuron_config=types.SimpleNamespace(buckets=x)),
                )
                for tag, x in buckets.items()
            ]

        def compile(self, out: str) -> None:
            os.write(1, b"compiler chatter\n")
            seen["work"] = os.environ["BASE_COMPILE_WORK_DIR"]
            if seen.get("fails"):
                raise seen["fails"]
            for part in self.models:
                for number, _ in enumerate(part.config.neuron_config.buckets):
                    program = Path(seen["work"]) / part.tag / f"_tp0_bk{number}" / "graph.neff"
                    program.parent.mkdir(parents=True)
                    program.write_bytes(b"neff")
            (Path(out) / "model.pt").write_bytes(b"programs")
            (Path(out) / "neuron_config.json").write_text("{}")

    module = types.ModuleType("g4tool.backends.neuron.nxdi")
    module.__dict__.update(
        Gemma4InferenceConfig=Config,
        Gemma4NeuronConfig=dict,
        NeuronGemma4ForCausalLM=Model,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("NEURON_COMPILE_CACHE_URL", "BASE_COMPILE_WORK_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return seen


def arguments(folder: Path, config: dict[str, Any]) -> list[str]:
    path = folder / "given.json"
    path.write_text(json.dumps(config))
    out = folder / "out"
    return ["--model", "MODEL", "--config", str(path), "--out", str(out)]


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_events_are_all_of_standard_output(
    fake: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path, {"neuron_config": {"tp_degree": 2}, "hidden_size": 8})
    assert compile_nxdi.main(given) == 0
    output = capfd.readouterr()
    assert "compiler chatter" in output.err
    *buckets, done = events(output.out)
    assert [(x["event"], x["model"], x["bucket"], x["done"], x["total"]) for x in buckets] == [
        ("bucket", "context_encoding_model", 64, 1, 3),
        ("bucket", "context_encoding_model", 128, 2, 3),
        ("bucket", "token_generation_model", 128, 3, 3),
    ]
    assert done["event"] == "done"
    assert done["files"][:2] == ["model.pt", "neuron_config.json"]
    assert sum(name.endswith(".neff") for name in done["files"]) == 3
    assert "torch" in done["versions"]
    assert fake["model"] == Path("MODEL")
    assert fake["settings"] == {"tp_degree": 2}
    assert fake["work"] == f"{tmp_path / 'out' / 'work'}/"


@pytest.mark.parametrize(("ranks", "kept"), [(2, True), (1, False)])
def test_shards_that_are_there_are_kept(
    fake: dict[str, Any], tmp_path: Path, ranks: int, kept: bool
) -> None:
    weights = tmp_path / "out" / "weights"
    weights.mkdir(parents=True)
    for rank in range(ranks):
        (weights / f"tp{rank}_sharded_checkpoint.safetensors").write_bytes(b"")
    job = CompileJob(Path("MODEL"), {"tp_degree": 2}, tmp_path / "out")
    compile_nxdi.compile_model(job, lambda event: None)
    assert fake["settings"].get("skip_sharding", False) is kept
    assert fake["settings"].get("save_sharded_checkpoint", False) is kept


def test_an_error_of_ours_is_an_event_with_its_exit_code(
    fake: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake["fails"] = G4Error("a sentence.")
    assert compile_nxdi.main(arguments(tmp_path, {})) == 1
    assert events(capfd.readouterr().out) == [
        {"event": "error", "message": "a sentence.", "exit_code": 1}
    ]


def test_an_error_of_the_sdk_is_an_event_and_a_traceback(
    fake: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake["fails"] = RuntimeError("NCC_EVRF001")
    with pytest.raises(RuntimeError):
        compile_nxdi.main(arguments(tmp_path, {}))
    assert events(capfd.readouterr().out) == [
        {"event": "error", "message": "RuntimeError: NCC_EVRF001"}
    ]


def test_without_the_sdk_and_with_few_packages(tmp_path: Path) -> None:
    blocked = "pydantic", "typer", "rich", "transformers", "torchao", "yaml", "huggingface_hub"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"import runpy; runpy.run_module({MODULE!r}, run_name='__main__')"
    )
    path = tmp_path / "neuron_config.json"
    path.write_text("{}")
    model, out = tiny_folder("tiny-31b"), tmp_path / "out"
    flags = ["--model", str(model), "--config", str(path), "--out", str(out)]
    result = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False
    )
    assert result.returncode == 3, result.stderr
    (error,) = events(result.stdout)
    assert error["event"] == "error"
    assert "AWS's Neuron SDK" in error["message"]
    assert not list(out.rglob("*.neff"))


def test_the_placeholders_of_pypi_are_told_from_the_sdk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "neuronx_distributed_inference"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("WRONG PACKAGE")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IncompleteError, match=r"WRONG PACKAGE.*pip\.repos\.neuron"):
        compiler("nxdi")(CompileJob(tmp_path, {}, tmp_path / "out"), print)


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    """And so do the processes that it started: here one that would leave a file after a second."""
    late = tmp_path / "late"
    code = (
        f"import subprocess, sys; from {MODULE} import end_with_standard_input\n"
        "end_with_standard_input(); print('up', flush=True)\n"
        f"subprocess.run(['sh', '-c', 'sleep 1; touch {late}'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(timeout=30) == -signal.SIGTERM
    time.sleep(1.2)
    assert not late.exists()


def test_names_of_compilers() -> None:
    assert compiler("nxdi") is compile_nxdi.compile_model
    with pytest.raises(UsageError, match="nxdi, stablehlo"):
        compiler("xla")


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "neuron_config.json"
    path.write_text('{"neuron_config": []}')
    with pytest.raises(G4Error, match="not a JSON object"):
        compile_nxdi.settings_of(path)
