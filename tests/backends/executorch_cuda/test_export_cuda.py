"""`g4 export-cuda` on a machine without an NVIDIA GPU; the lowering is tested elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4tool.backends.executorch.folder import PROGRAM
from g4tool.backends.executorch.verify import Finding, to_json
from g4tool.cli import export_cpu
from g4tool.errors import G4Error
from g4tool.pipeline.hashes import FileHashes
from g4tool.pipeline.work import Work
from g4tool.progress import silent
from g4tool.stages import environment, export_cuda
from g4tool.stages.export import ExportStage
from g4tool.stages.export_cuda import WEIGHTS, Maker, make
from g4tool.stages.proof import Given
from tests.cli.conftest import G4, g4, home  # noqa: F401  (fixtures)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ExportStage]:
    """The stages that the command asks for, each as if it were made."""
    asked: list[ExportStage] = []
    facts: dict[str, Any] = {
        "verified": to_json([Finding("model.pte read back", True, 1e-5, 1e-6, 0.0, 1.0)]),
        "delegates": {"prefill": {"XnnpackBackend": 3, "aten::gelu.out": 2}},
    }

    def ensure(env: object, stage: ExportStage) -> object:
        asked.append(stage)
        return SimpleNamespace(identity="0" * 64, path=tmp_path, manifest={"facts": facts})

    monkeypatch.setattr(export_cpu, "ensure", ensure)
    monkeypatch.setattr(environment, "choose_device", lambda wanted: "cpu")
    return asked


def test_everything_before_the_lowering_is_done_and_said(
    g4: G4,  # noqa: F811
    made: list[ExportStage],
    tmp_path: Path,
) -> None:
    ran = g4("export-cuda", "--tiny-test", "--output", str(tmp_path / "out"))
    assert ran.code == 3
    (stage,) = made
    assert (stage.backend, stage.verify) == ("xnnpack", True)
    assert (stage.max_seq_len, stage.prefill_chunk) == (256, 128)
    assert "model.pte read back" in ran.err
    assert "prefill: 3 calls of XnnpackBackend\n  outside: 2 aten::gelu.out\n" in ran.err
    assert "lowering to CUDA needs an NVIDIA GPU" in ran.err
    assert ran.out == ""
    # Nothing has the CUDA program's name.
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.pt?"))


def test_as_json(g4: G4, made: list[ExportStage]) -> None:  # noqa: F811
    ran = g4("export-cuda", "--tiny-test", "--max-seq-len", "512", "--json")
    assert ran.code == 3
    assert made[0].max_seq_len == 512
    assert (ran.json["path"], ran.json["incomplete"]) == (None, ["export-cuda"])
    assert ran.json["delegates"]["prefill"]["XnnpackBackend"] == 3


def test_verify_can_be_left_out(g4: G4, made: list[ExportStage]) -> None:  # noqa: F811
    assert g4("export-cuda", "--tiny-test", "--no-verify").code == 3
    assert not made[0].verify


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tiny-test", "--model", "tiny-e2b"), "each name a model: give one"),
        (("--prequantized", "no/such/folder"), "no/such/folder: there is no such folder"),
    ],
)
def test_contradictions(
    g4: G4,  # noqa: F811
    made: list[ExportStage],
    flags: tuple[str, ...],
    says: str,
) -> None:
    ran = g4("export-cuda", *flags)
    assert ran.code == 2
    assert says in ran.err
    assert not made


class Lowered:
    """Stands for a lowering; each gives other bytes."""

    count = 0

    def __init__(self) -> None:
        Lowered.count += 1
        self.content = f"lowering {Lowered.count}".encode()

    def write(self, path: Path) -> None:
        path.write_bytes(self.content)

    def delegates(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where lowering is a matter of a moment."""
    from g4tool.backends.executorch import cuda, cuda_runtime

    def write_weights(lowered: Lowered, folder: Path) -> list[str]:
        (folder / "blob.ptd").write_bytes(lowered.content)
        return ["blob.ptd"]

    monkeypatch.setattr(cuda, "write_weights", write_weights)
    monkeypatch.setattr(cuda_runtime, "check_program", lambda path: None)
    monkeypatch.setattr(Maker, "_lower", lambda self: Lowered())
    monkeypatch.setattr(Maker, "_model", None, raising=False)
    monkeypatch.setattr(export_cuda, "facts_of", lambda given, model: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize("lost", ["nothing", WEIGHTS, PROGRAM])
def test_both_files_are_always_of_one_lowering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """An attempt that ended between them, or a file damaged since, makes both again."""

    def attempt() -> None:
        hashes = FileHashes(tmp_path / "hashes")
        work = Work("export-cuda", tmp_path / "partial", (), hashes, silent)
        make(work, Given(None, tmp_path, None))  # type: ignore[arg-type]

    def interrupted(self: Maker, path: Path) -> None:
        raise KeyboardInterrupt

    files = [tmp_path / "partial" / "files" / name for name in (WEIGHTS, PROGRAM)]
    with monkeypatch.context() as context:
        context.setattr(Maker, "program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            attempt()
    first = files[0].read_bytes()
    attempt()
    assert files[0].read_bytes() == files[1].read_bytes() != first
    if lost == "nothing":
        return
    before = files[0].read_bytes()
    files[lost == PROGRAM].write_bytes(b"damaged")
    if lost == PROGRAM:
        with pytest.raises(G4Error, match="damaged since it was written: run the same command"):
            attempt()
    attempt()
    assert files[0].read_bytes() == files[1].read_bytes() != before
