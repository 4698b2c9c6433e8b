"""Quantizing a Hub model shard by shard: the artifact of the ordinary road, with little disk."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from g4tool.checkpoint.tiny import tiny_folder
from g4tool.errors import G4Error, UsageError
from g4tool.hub import shards
from g4tool.pipeline.artifact import Artifact
from g4tool.pipeline.store import Store
from g4tool.recipe.load import load_recipe
from g4tool.stages.build import build
from tests.hub.conftest import empty_hub, sleeps  # noqa: F401 (fixtures)
from tests.hub.server import COMMIT, Fault, Hub, Repo

REPO = "google/gemma-tiny"


@pytest.fixture(params=["tiny-31b", "tiny-e2b", "tiny-26b-a4b"])
def hub(
    request: pytest.FixtureRequest,
    empty_hub: Hub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Hub:
    """A Hub with one of the tiny models, each of several shards, and an empty cache."""
    files = {path.name: path.read_bytes() for path in tiny_folder(request.param).iterdir()}
    empty_hub.repos[REPO] = Repo({**files, "README.md": b"---\nlicense: x\n---\n"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return empty_hub


def _make(home: Path, stream: bool = True, formats: str = "[torchao]") -> Artifact:
    recipe = load_recipe("31b-int4-hqq", [f"model={REPO}", f"quantize.formats={formats}"])
    chosen = build(recipe, "cpu", stream=stream)
    assert chosen.quantize is not None
    assert [stage.name for stage in chosen.stages] == (
        ["quantize"] if stream else ["download", "convert", "quantize"]
    )
    return Store(home).ensure(chosen.quantize)


def _content(artifact: Artifact) -> dict[str, bytes]:
    return {
        path.relative_to(artifact.path).as_posix(): path.read_bytes()
        for path in artifact.path.rglob("*")
        if path.is_file()
    }


only_dense = pytest.mark.parametrize("hub", ["tiny-31b"], indirect=True)


def test_the_same_artifact_as_by_the_ordinary_road(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    arrive = shards.Shards._arrive

    def counted(self: shards.Shards, file: shards.RemoteFile) -> object:
        opened = arrive(self, file)
        held.append(sum(path.stat().st_size for path in self._whole.glob("*.safetensors")))
        return opened

    monkeypatch.setattr(shards.Shards, "_arrive", counted)
    made = _make(tmp_path / "a")
    sizes = sorted(len(c) for n, c in hub.repos[REPO].files.items() if n.endswith(".safetensors"))
    assert len(sizes) >= 3
    assert max(held) <= sum(sizes[-2:])
    # Nothing of the source stays.
    kept = [p for p in (tmp_path / "a").rglob("*") if p.is_file() and "artifacts" in p.parts]
    assert {path.parent for path in kept} == {made.path}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))

    ordinary = _make(tmp_path / "b", stream=False)
    assert made.identity == ordinary.identity
    assert _content(made) == _content(ordinary)
    # And what is there is there, whichever way is asked for.
    hub.requests.clear()
    assert _make(tmp_path / "a", stream=False).path == made.path
    assert hub.fetched() == []


@only_dense
@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"GET .*/resolve/.*00003-of", 503, times=99),
        Fault(r"GET .*/resolve/.*00002-of", times=99, skip=2),
        Fault("GET .*/tree/", 500, times=99),
        Fault("GET .*/resolve/.*json", 503, times=99),
        Fault("GET .*/resolve/.*00001-of", 401, times=99),
    ],
    ids=lambda fault: fault.match,
)
def test_an_interrupted_one_is_gone_on_with(hub: Hub, tmp_path: Path, fault: Fault) -> None:
    hub.faults = [fault]
    with pytest.raises(G4Error) as caught:
        _make(tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "a" / "artifacts").glob("quantize/*/manifest.json"))
    done = {path.name for path in (tmp_path / "a").rglob("files/model-*.safetensors")}
    hub.faults = []
    hub.requests.clear()
    made = _make(tmp_path / "a")
    fetched = {name for name, _ in hub.fetched()}
    if len(done) > 4:  # the first layers lie in the first shard, which is not wanted again
        assert "model-00001-of-00003.safetensors" not in fetched
    assert _content(made) == _content(_make(tmp_path / "b", stream=False))


@only_dense
def test_several_formats_fetch_as_much_as_one(hub: Hub, tmp_path: Path) -> None:
    formats = "[compressed-tensors, torchao, executorch]"
    # The last shard comes for the final norm, and not when its layers are due.
    hub.faults = [Fault(r"GET .*/resolve/.*00003-of", 503, times=99, skip=3)]
    with pytest.raises(G4Error):
        _make(tmp_path / "a", formats=formats)
    done = {path.name for path in (tmp_path / "a").rglob("files/torchao/model-*")}
    assert 0 < len(done) < 7
    hub.faults = []
    hub.requests.clear()
    made = _make(tmp_path / "a", formats=formats)
    assert "model-00001-of-00003.safetensors" not in dict(hub.fetched())
    undisturbed = _make(tmp_path / "b", formats=formats)
    several = hub.fetched()
    _make(tmp_path / "c")
    assert several == hub.fetched()
    assert made.identity == undisturbed.identity
    assert _content(made) == _content(undisturbed)
    assert {"model.safetensors.index.json", "torchao/config.json"} < _content(made).keys()


@only_dense
def test_a_shard_of_wrong_bytes_is_caught_and_fetched_anew(hub: Hub, tmp_path: Path) -> None:
    name = "model-00002-of-00003.safetensors"
    content = hub.repos[REPO].files[name]
    hub.wrong = {name: content[:-1] + bytes([content[-1] ^ 1])}
    with pytest.raises(G4Error, match=f"{REPO}: {name} did not match the Hub's checksum"):
        _make(tmp_path / "a")
    hub.wrong = {}
    assert _content(_make(tmp_path / "a")) == _content(_make(tmp_path / "b", stream=False))


@only_dense
def test_what_the_cache_holds_is_read_there_and_kept(hub: Hub, tmp_path: Path) -> None:
    from g4tool.hub.download import download

    folder = download(REPO, COMMIT)
    hub.requests.clear()
    _make(tmp_path / "a")
    asked = [(name, ranges) for name, ranges in hub.fetched() if name.endswith(".safetensors")]
    assert all(ranges for _, ranges in asked)  # headers only
    assert len(list(folder.glob("*.safetensors"))) == 3


@only_dense
def test_a_disk_too_small(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 1000))
    with pytest.raises(G4Error, match=r"needs [\d,]+ bytes more|too small for model-00001"):
        _make(tmp_path / "a")


def test_what_cannot_be_streamed() -> None:
    for overrides, message in (
        (["model=tiny-31b"], "is for a model on the Hub"),
        (["model=tiny-31b", "compile-neuron.tp=2"], "compile-neuron needs one"),
    ):
        with pytest.raises(UsageError, match=message):
            build(load_recipe("tiny-31b", overrides), "cpu", stream=True)
