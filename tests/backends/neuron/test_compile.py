"""The command against a stand-in for the SDK: a contract test, nothing is compiled.

The stand-in takes the place of the process that runs NxD Inference. It keeps to the protocol of
g4tool.backends.neuron.compile_nxdi: events on standard output, programs kept bucket by bucket.
"""

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from g4tool.checkpoint.tiny import tiny_folder
from g4tool.formats.weights import open_weights
from g4tool.parallel.shards import join_shards
from g4tool.stages.ranks import plan_of
from tests.backends.neuron.sdk_stand_in import REAL, install, python_with
from tests.formats.bundles import make_bundle

_COMPILER = """
import json, os, signal, sys, threading, time
from pathlib import Path
def end_with_g4():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end_with_g4, daemon=True).start()
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = Path(given["--out"])
asked = json.loads(Path(given["--config"]).read_text())["neuron_config"]
assert (Path(given["--model"]) / "config.json").is_file()
names = [f"tp{r}_sharded_checkpoint.safetensors" for r in range(asked["tp_degree"])]
shards = [out / "weights" / name for name in names]
assert all(path.is_file() for path in shards)
tasks = [(m, n, b) for m in ("context_encoding_model", "token_generation_model")
         for n, b in enumerate(asked["context_encoding_buckets"])]
stop = int(os.environ.get("STAND_IN_STOPS_AFTER", "-1"))
print("the SDK talks", flush=True)
for done, (model, number, bucket) in enumerate(tasks, start=1):
    neff = out / "work" / model / f"_tp0_bk{number}" / "graph.neff"
    if not neff.is_file():
        neff.parent.mkdir(parents=True, exist_ok=True)
        # One write: g4 writes this process's standard output into the same log meanwhile.
        sys.stderr.write(f"compiling {model} {bucket}\\n")
        neff.write_text(f"not a NEFF: {model} {bucket}")
        time.sleep(0.3)
    event = {"event": "bucket", "model": model, "bucket": bucket, "done": done, "total": len(tasks)}
    print(json.dumps(event), flush=True)
    if done == stop:
        print(json.dumps({"event": "error", "message": "NCC_TEST: out of luck"}), flush=True)
        sys.exit(1)
(out / "model.pt").write_text("not a program")
(out / "neuron_config.json").write_text(json.dumps({"neuron_config": asked, "by": "stand-in"}))
print(json.dumps({"event": "done", "files": ["model.pt"], "versions": {"neuronx-cc": "2.23"}}))
"""


@pytest.fixture
def neuron_python(tmp_path: Path) -> Path:
    """A Python with stand-ins for the SDK, in which g4's compiling module is one too."""
    folder = tmp_path / "sdk"
    folder.mkdir()
    install(folder, REAL)
    (folder / "stand_in.py").write_text(_COMPILER)
    path = python_with(folder)
    script = path.read_text().replace(
        "exec ",
        'if [ "$2" = g4tool.backends.neuron.compile_nxdi ]; then shift 2; '
        f'exec "{sys.executable}" "{folder}/stand_in.py" "$@"; fi\nexec ',
    )
    path.write_text(script)
    return path


_COMMAND = ["compile-neuron", "--model", "tiny-e2b", "--tp", "2", "--seq-len", "256"]
_PARTIAL = "artifacts/compile-neuron/*.partial"


def _g4(home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-m", "g4tool", "--home", str(home), *_COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)


def _facts(ran: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `--plan-only` says; its artifact is there as long as the tests."""
    ran = _g4(tmp_path_factory.mktemp("undisturbed"), "--plan-only", "--json")
    assert ran.returncode == 0, ran.stdout
    return _facts(ran)


def test_with_an_sdk(tmp_path: Path, neuron_python: Path) -> None:
    home = tmp_path / "home"
    failed = _g4(home, "--neuron-python", str(neuron_python), STAND_IN_STOPS_AFTER="3")
    assert failed.returncode == 1
    assert "did not compile the model: NCC_TEST: out of luck" in failed.stderr
    assert not list(home.glob("artifacts/compile-neuron/*/manifest.json"))

    ran = _g4(home, "--neuron-python", str(neuron_python), "--json")
    assert ran.returncode == 0, ran.stdout
    facts = _facts(ran)
    folder = Path(facts["path"])
    assert facts["compiled"] is True
    assert facts["sdk"]["versions"] == {"neuronx-cc": "2.23"}
    assert len(facts["sdk"]["neffs"]) == 4
    made = "not a NEFF: token_generation_model 256"
    name = "work/token_generation_model/_tp0_bk1/graph.neff"
    assert facts["sdk"]["neffs"][name] == sha256(made.encode()).hexdigest()
    assert (folder / "model.pt").read_text() == "not a program"
    assert json.loads((folder / "neuron_config.json").read_text())["by"] == "stand-in"
    log = (folder / "compile.log").read_text()
    # Three programs before the failure and one after it: none was made twice.
    assert log.count("compiling ") == 4
    assert "the SDK talks" in log
    environment = json.loads((folder / "manifest.json").read_text())["environment"]
    assert environment == REAL
    assert "cached" in _g4(home, "--neuron-python", str(neuron_python)).stderr


def test_killed_while_compiling(tmp_path: Path, neuron_python: Path) -> None:
    """The next run goes on at the first program that is missing."""
    home = tmp_path / "home"
    command = [sys.executable, "-m", "g4tool", "--home", str(home), *_COMMAND]
    command += ["--neuron-python", str(neuron_python)]
    ran = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while ran.poll() is None and not list(home.glob(f"{_PARTIAL}/compile/work/*/*/graph.neff")):
        time.sleep(0.002)
    ran.kill()
    assert ran.wait() == -signal.SIGKILL
    assert list(home.glob(f"{_PARTIAL}/compile/compile.log"))
    assert not list(home.glob("artifacts/compile-neuron/*/manifest.json"))
    again = _g4(home, "--neuron-python", str(neuron_python), "--json")
    assert again.returncode == 0, again.stdout
    facts = _facts(again)
    assert facts["compiled"] is True
    assert len(facts["sdk"]["neffs"]) == 4
    # Each of four programs once, by either run.
    assert (Path(facts["path"]) / "compile.log").read_text().count("compiling ") == 4


def test_without_an_sdk(tmp_path: Path, undisturbed: Any) -> None:
    home = Path(undisturbed["path"]).parents[2]
    ran = _g4(home, "--output", str(tmp_path / "out"))
    assert ran.returncode == 3
    assert "AWS's Neuron SDK is not in" in ran.stderr
    assert ran.stderr.rstrip().endswith("No NEFF was made.")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["facts"]["compiled"] is False
    files = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")
    }
    assert files == {
        "manifest.json",
        "neuron_config.json",
        "plan.json",
        "compile.sh",
        "weights/tp0_sharded_checkpoint.safetensors",
        "weights/tp1_sharded_checkpoint.safetensors",
    }
    for name, record in manifest["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert record == {"size": len(content), "sha256": sha256(content).hexdigest()}
    subprocess.run(["sh", "-n", tmp_path / "out" / "compile.sh"], check=True)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    for rank in range(2):
        shard = load_file(tmp_path / "out" / f"weights/tp{rank}_sharded_checkpoint.safetensors")
        for weight in plan["weights"].values():
            shape = list(shard[weight["parameter"]].shape)
            assert sorted(shape) == sorted(weight["rank_shape"])
    assert [p["bucket"] for p in plan["programs"]] == [128, 256, 128, 256]


def test_a_bundle(tmp_path: Path) -> None:
    """Packed shards, cut between groups where plan.json says so; there is nothing to compile."""
    bundle, out = tmp_path / "bundle", tmp_path / "out"
    make_bundle(tiny_folder("tiny-31b"), bundle)
    ran = _g4(
        tmp_path / "home", "--model", str(bundle), "--tp", "16", "--json", "--output", str(out)
    )
    assert ran.returncode == 3
    facts = _facts(ran)
    assert facts["compiled"] is False
    assert "name the checkpoint that the bundle was made from" in facts["incomplete"]
    assert {"NXDI_QUANTIZED", "NXDI_KV_HEADS"} <= {each["code"] for each in facts["findings"]}
    content = json.loads((out / "plan.json").read_text())
    assert content["programs"] == []
    notes = {name: each["note"] for name, each in content["weights"].items() if "note" in each}
    assert any("whole on every rank" in note for note in notes.values())
    weights = open_weights(bundle)
    plan = plan_of(weights, 16)
    assert notes == plan.notes()
    # In the ranks' order: tp10 comes after tp2.
    files = [out / f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(16)]
    assert {path.name for path in out.iterdir()} == {"manifest.json", "plan.json", "weights"}
    for name in plan.splits:
        for part, whole in join_shards(files, plan, name).items():
            assert torch.equal(whole, weights.read(name, part, 0, whole.shape[0])), (name, part)
    weights.close()


def test_stablehlo(tmp_path: Path) -> None:
    """A text for each program of plan.json's lengths, whose arguments are the shards' shapes."""
    out = tmp_path / "out"
    flags = ["--model", "tiny-31b", "--seq-len", "128", "--plan-only", "--stablehlo"]
    ran = _g4(tmp_path / "home", *flags, "--json", "--output", str(out))
    assert ran.returncode == 0, ran.stdout
    assert _facts(ran)["compiled"] is False
    assert "FutureWarning" not in ran.stderr
    texts = {path.name: path.read_text() for path in (out / "stablehlo").glob("*.mlir")}
    assert set(texts) == {"context_encoding_model_128.mlir", "token_generation_model_1.mlir"}
    assert all(text.startswith("// For inspection") for text in texts.values())
    described = json.loads((out / "stablehlo" / "graphs.json").read_text())["graphs"]
    assert set(described) == set(texts)
    weights = json.loads((out / "plan.json").read_text())["weights"]
    for graph in described.values():
        found = {x["name"]: x["shape"] for x in graph["arguments"] if x["kind"] == "weight"}
        assert found == {name: weight["rank_shape"] for name, weight in weights.items()}


def test_plan_only_is_done_and_never_compiled(undisturbed: Any) -> None:
    assert undisturbed["compiled"] is False
    assert undisturbed["sdk"] is None
    assert "incomplete" not in undisturbed


def test_killed_while_sharding(tmp_path: Path, undisturbed: Any) -> None:
    """Killed while the first shard is written, the next run ends with the same bytes."""
    whole = Path(undisturbed["path"])
    home = tmp_path / "b"
    command = [sys.executable, "-m", "g4tool", "--home", str(home), *_COMMAND, "--plan-only"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if list(home.glob("artifacts/compile-neuron/*.partial/**/tp0_sharded*")):
            process.send_signal(signal.SIGKILL)
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL
    again = Path(_facts(_g4(home, "--plan-only", "--json"))["path"])
    assert {p.name for p in again.rglob("*")} == {p.name for p in whole.rglob("*")}
    for path in whole.rglob("*"):
        if path.is_file():
            assert (again / path.relative_to(whole)).read_bytes() == path.read_bytes(), path.name
