"""`g4 export-cuda` on a machine without an NVIDIA GPU; the lowering is tested elsewhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from g4tool.backends.executorch.verify import Finding, to_json
from g4tool.cli import export_cpu
from g4tool.stages import environment
from g4tool.stages.export import ExportStage
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
    assert "prefill: 3 calls of XnnpackBackend, 2 operators outside" in ran.err
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
