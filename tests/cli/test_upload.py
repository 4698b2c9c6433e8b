"""g4 upload, from a recipe to a repository and back: the same text, nothing lost or leaked."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from g4tool.backends.executorch.folder import ExportFacts, to_json
from g4tool.checkpoint.tiny import tiny_folder, write_tiny
from tests.cli.conftest import G4
from tests.hub.conftest import empty_hub, sleeps  # noqa: F401 (fixtures)
from tests.hub.server import TOKEN, Fault, Hub, Repo

REPO = "someone/Tiny-HQQ-INT4"
PROMPT = "Tell me about the sea and the ships that sail on it."
RUN = (PROMPT, "--dtype", "fp32", "--max-new-tokens", "12", "--json")


@pytest.fixture
def hub(
    empty_hub: Hub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Hub:
    """A Hub to publish on, and a cache of its own to download to."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return empty_hub


def _upload(g4: G4, *arguments: str, recipe: str = "tiny-31b") -> dict[str, object]:
    ran = g4("upload", REPO, *arguments, "--recipe", recipe, "--json")
    assert ran.code == 0, ran.out
    assert TOKEN not in ran.out + ran.err
    found: dict[str, object] = ran.json
    return found


@pytest.mark.parametrize("model", ["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def test_there_and_back_it_says_the_same(g4: G4, hub: Hub, tmp_path: Path, model: str) -> None:
    bundle = g4("build", model).out.strip()
    made = g4("run", bundle, *RUN).json["text"]
    done = _upload(g4, recipe=model)
    assert done["commit"] == hub.repos[REPO].commit
    assert done["sent"] == sorted(hub.repos[REPO].files)
    home = ("--home", str(tmp_path / "home"))
    got = g4("download", REPO, "--json", *home)
    assert got.code == 0, got.out
    assert {Path(f).name for f in got.json["files"]} >= {"g4.json", "config.json", "README.md"}
    assert g4("run", REPO, *RUN, *home).json["text"] == made


def test_a_second_upload_sends_nothing(g4: G4, hub: Hub) -> None:
    first = _upload(g4)
    hub.requests.clear()
    again = _upload(g4)
    assert (again["commit"], again["sent"], again["removed"]) == (first["commit"], [], [])
    assert hub.asked("PUT |/commit/") == 0


def test_a_cut_upload_is_gone_on_with(g4: G4, hub: Hub) -> None:
    hub.faults = [Fault("^PUT ", times=99, skip=2)]
    ran = g4("upload", REPO, "--recipe", "tiny-31b")
    assert ran.code == 1
    assert "run this again" in ran.err
    assert TOKEN not in ran.err
    assert set(hub.repos[REPO].files) == {".gitattributes"}
    hub.faults, arrived = [], len(hub.objects)
    assert arrived >= 1
    hub.requests.clear()
    _upload(g4)
    assert hub.asked("^PUT ") == 8 - arrived  # seven shards and the tokenizer


def test_a_dry_run_shows_and_asks_nobody(g4: G4, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    g4("build", "tiny-31b")
    ran = g4("upload", REPO, "--recipe", "tiny-31b", "--dry-run")
    assert ran.code == 0, ran.err
    for word in ("model-00007-of-00007.safetensors", "g4.json", f"for {REPO}", "## Lineage"):
        assert word in ran.out
    assert "names no base model" in ran.err
    assert hub.requests == []
    shown = _upload(g4, "--dry-run")
    assert shown["files"]["README.md"] == len(str(shown["card"]).encode())  # type: ignore[index]
    missing = g4(
        "upload", REPO, "--recipe", "tiny-31b", "--dry-run", "--set", "quantize.solver=rtn"
    )
    assert missing.code == 1
    assert "quantize is not made yet" in missing.err


def test_a_checkpoint_with_everything_beside_it(g4: G4, hub: Hub, tmp_path: Path) -> None:
    source = tmp_path / "gemma"
    write_tiny("tiny-e2b", source)
    card = "---\nlicense: gemma\nlicense_link: https://example.org/terms\n---\nThe base's card.\n"
    beside = {
        "README.md": card,
        "LICENSE": "terms",
        "NOTICE": "notice",
        "processor_config.json": "{}",
        "preprocessor_config.json": "{}",
        "additional_chat_templates/tool.jinja": "{{ x }}",
    }
    (source / "additional_chat_templates").mkdir()
    for name, text in beside.items():
        (source / name).write_text(text)
    more = ("--set", f"model={source}", "--set", "upload.base_model=google/gemma-4-E2B-it")
    _upload(g4, *more, recipe="tiny-e2b")
    files = hub.repos[REPO].files
    for name, text in beside.items():
        if name != "README.md":
            assert files[name].decode() == text
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert files[name] == (source / name).read_bytes()
    front = ModelCard(files["README.md"].decode()).data.to_dict()
    assert front["license"] == "gemma"
    assert front["license_link"] == "https://example.org/terms"
    assert front["base_model"] == "google/gemma-4-E2B-it"
    assert b"The base's card" not in files["README.md"]
    # The index names what lies in the shards, no more and no less.
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    assert set(index.values()) == {name for name in files if name.endswith(".safetensors")}
    for name, shard in index.items():
        assert f'"{name}"'.encode() in files[shard]
    # Nothing is said of where it was made.
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]


def test_a_config_that_names_somebodys_folder_is_not_published(
    g4: G4, hub: Hub, tmp_path: Path
) -> None:
    source = tmp_path / "gemma"
    write_tiny("tiny-31b", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/bob/model"}))
    ran = g4("upload", REPO, "--recipe", "tiny-31b", "--set", f"model={source}")
    assert ran.code == 1
    assert "config.json holds a path of somebody's home folder" in ran.err
    assert hub.asked("POST |PUT ") == 0


def test_an_exported_program_goes_into_a_folder(g4: G4, hub: Hub, tmp_path: Path) -> None:
    program = tmp_path / "sea-program"
    program.mkdir()
    (program / "model.pte").write_bytes(b"program")
    facts = ExportFacts(
        "xnnpack", "float32", 512, 128, 32, 4096, 2, [1], False, None, {}, None, {}, {}, {}
    )
    (program / "export.json").write_text(json.dumps(to_json(facts)))
    _upload(g4, str(program))
    files = hub.repos[REPO].files
    assert files["sea-program/model.pte"] == b"program"
    assert "up to 512 tokens, exported without a proof:" in files["README.md"].decode()
    shutil.rmtree(program)
    ran = g4("upload", REPO, str(program), "--recipe", "tiny-31b")
    assert ran.code == 2
    assert "no folder of an exported program" in ran.err
    ran = g4("upload", REPO, "export-cpu", "--recipe", "tiny-31b")
    assert ran.code == 2
    assert "export-cpu: the recipe has no such section" in ran.err
    ran = g4("upload", REPO, "compressed-tensors", "--recipe", "tiny-31b")
    assert ran.code == 2
    assert "the bundle has no layout compressed-tensors, only torchao: add it to" in ran.err
    ran = g4("upload", REPO, "--layout", "compressed-tensors", "--recipe", "tiny-31b")
    assert ran.code == 2
    assert "upload publishes compressed-tensors, which quantize.formats does not have" in ran.err


FORMATS = ("--set", "quantize.formats=[torchao, executorch, compressed-tensors]")


def test_every_layout_in_its_folder(g4: G4, hub: Hub) -> None:
    _upload(g4, "compressed-tensors", "executorch", *FORMATS)
    files = hub.repos[REPO].files
    for folder in ("", "compressed-tensors/"):
        index = json.loads(files[f"{folder}model.safetensors.index.json"])
        assert {f"{folder}{name}" for name in index["weight_map"].values()} <= set(files)
    for folder in ("", "compressed-tensors/", "executorch/"):
        for name in ("config.json", "g4.json", "tokenizer.json", "chat_template.jinja"):
            assert f"{folder}{name}" in files
    assert len([name for name in files if name.startswith("executorch/model")]) == 1
    text = files["README.md"].decode()
    assert "vllm serve ./compressed-tensors" in text
    assert "--prequantized executorch" in text


def test_another_layout_at_the_root(g4: G4, hub: Hub, tmp_path: Path) -> None:
    _upload(g4, "--layout", "compressed-tensors", *FORMATS)
    files = hub.repos[REPO].files
    method = json.loads(files["config.json"])["quantization_config"]["quant_method"]
    assert method == "compressed-tensors"
    assert not any("/" in name for name in files)
    assert f"vllm serve {REPO}" in files["README.md"].decode()
    bundle = Path(g4("build", "tiny-31b", *FORMATS).out.strip())
    made = g4("run", str(bundle / "compressed-tensors"), *RUN)
    got = g4("run", REPO, *RUN, "--home", str(tmp_path / "home"))
    assert got.json["text"] == made.json["text"]


def test_what_is_there_is_not_replaced_unasked(g4: G4, hub: Hub) -> None:
    _upload(g4)
    held = hub.repos[REPO].files
    group = ("--recipe", "tiny-31b", "--set", "quantize.group_size=64")
    ran = g4("upload", REPO, *group)
    assert ran.code == 2
    assert f"{REPO} holds another bundle, which this one replaces. Add --yes" in ran.err
    ran = g4("upload", REPO, "--private", "--recipe", "tiny-31b")
    assert ran.code == 2
    assert f"{REPO} is there already and public" in ran.err
    assert hub.repos[REPO].files is held
    assert g4("upload", REPO, *group, "--yes").code == 0
    assert hub.repos[REPO].files["g4.json"] != held["g4.json"]
    hub.repos[REPO].files = {"model.gguf": b"GGUF"}
    ran = g4("upload", REPO, "--recipe", "tiny-31b", "--yes")
    assert ran.code == 1
    assert "holds files that g4 did not publish, such as model.gguf" in ran.err


def test_refusals(g4: G4, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "upload.repo: this key is needed" in g4("upload", "--recipe", "tiny-31b").err
    assert "upload.repo: 'mine' is not of the form" in g4("upload", "mine").err
    eval_file = tmp_path / "eval.json"
    eval_file.write_text("{")
    ran = g4("upload", REPO, "--recipe", "tiny-31b", "--eval", str(eval_file))
    assert ran.code == 2
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    ran = g4("upload", "gasoonjia/Gemma4-31B-HQQ-INT4")
    assert ran.code == 1
    assert "publishing needs a login on the Hub" in ran.err
    assert hub.requests == []


def test_build_publishes_only_when_asked(g4: G4, hub: Hub, tmp_path: Path) -> None:
    asked = ("--set", f"upload.repo={REPO}")
    ran = g4("build", "tiny-31b", *asked)
    assert ran.code == 0
    assert f"g4 upload publishes it as {REPO}" in ran.err
    assert hub.requests == []
    ran = g4("build", "tiny-31b", "--until", "upload")
    assert ran.code == 2
    assert "this recipe has no upload section" in ran.err
    ran = g4("build", "tiny-31b", *asked, "--until", "upload", "--json")
    assert ran.code == 0, ran.out
    assert ran.json["commit"] == hub.repos[REPO].commit
    assert "g4.json" in hub.repos[REPO].files


def test_streamed_from_one_repository_and_published_in_another(
    g4: G4, hub: Hub, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_folder("tiny-31b").iterdir()}
    hub.repos["google/gemma-tiny"] = Repo({**files, "README.md": b"---\nlicense: x\n---\n"})
    home = ("--home", str(tmp_path / "home"), "--json")
    more = ("--set", "model=google/gemma-tiny", "--set", f"upload.repo={REPO}", *home)
    streamed = g4("build", "31b-int4-hqq", *more, "--stream-source")
    assert streamed.code == 0, streamed.out
    assert [stage["stage"] for stage in streamed.json["stages"]] == ["quantize"]
    hub.requests.clear()
    ran = g4("upload", REPO, "--recipe", "31b-int4-hqq", *more)
    assert ran.code == 0, ran.out
    assert hub.fetched() == []  # the checkpoint is not needed again
    front = ModelCard(hub.repos[REPO].files["README.md"].decode()).data.to_dict()
    assert front["base_model"] == "google/gemma-tiny"
    assert front["base_model_relation"] == "quantized"
    assert front["license"] == "x"
    local = g4("build", "tiny-31b", "--stream-source", *home)
    assert local.code == 2
    assert "is for a model on the Hub" in local.json["error"]["message"]
