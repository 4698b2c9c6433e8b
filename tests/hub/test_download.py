"""Downloads from a small Hub of our own: whole, cut, corrupt, refused and offline."""

import hashlib
import json
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from g4tool.errors import G4Error, UsageError
from g4tool.hub.download import download, expected, missing, resolve
from g4tool.hub.failures import explained
from g4tool.progress import Progress
from tests.hub.server import COMMIT, REPO, Fault, Hub, serving

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
INDEX = json.dumps({"weight_map": {"a": SHARD, "b": OTHER}}).encode()
WANTED = {
    SHARD: bytes(range(256)) * 4000,
    OTHER: b"weights" * 1000,
    "model.safetensors.index.json": INDEX,
    "config.json": b'{"model_type": "gemma4"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ bos_token }}",
    "additional_chat_templates/tool.jinja": b"x",
    "processor_config.json": b"{}",
    "LICENSE": b"Apache-2.0",
    "README.md": b"# card",
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"copy",
    "onnx/model.safetensors": b"copy",
    "original/params.json": b"{}",
    "model.gguf": b"GGUF",
    ".gitattributes": b"*",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    # Small enough that a cut file leaves something to go on from.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    with serving(Hub({**WANTED, **UNWANTED})) as served:
        yield served


def _check(folder: Path) -> None:
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {name for name in found if not name.startswith(".cache/")} == set(WANTED)
    for name, content in WANTED.items():
        assert (folder / name).read_bytes() == content


def test_fetches_what_is_wanted_into_the_hubs_cache(hub: Hub, tmp_path: Path) -> None:
    folder = download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    _check(folder)
    assert folder == tmp_path / "models--someone--gemma" / "snapshots" / COMMIT
    # It is the cache that every other tool reads.
    held = snapshot_download(
        REPO, cache_dir=tmp_path, local_files_only=True, allow_patterns=list(WANTED)
    )
    assert Path(held) == folder


def test_second_run_fetches_and_rehashes_nothing(hub: Hub, tmp_path: Path) -> None:
    memory: dict[Path, str] = {}
    reads = []

    def remembered(path: Path) -> str:
        path = path.resolve()
        if path not in memory:
            reads.append(path)
            memory[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return memory[path]

    for _ in range(2):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path, hash_file=remembered)
    assert len(hub.fetched()) == len(set(WANTED.values()))  # two files have the same content
    assert len(reads) == 3  # the two shards and tokenizer.json, once each


def test_a_folder_of_choice(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "here"
    for _ in range(2):
        assert download(REPO, local_dir=target, endpoint=hub.endpoint, cache=tmp_path) == target
        _check(target)
    assert len(hub.fetched()) == len(WANTED)


def test_a_folder_of_choice_follows_a_new_commit(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "here"
    target.mkdir()
    (target / "LICENSE").write_text("of another model")
    download(REPO, local_dir=target, endpoint=hub.endpoint, cache=tmp_path)
    hub.fetched()
    hub.commit = "c" * 40
    hub.files = {**hub.files, "config.json": b'{"model_type": "gemma5"}', "README.md": b"# longer"}
    download(REPO, local_dir=target, endpoint=hub.endpoint, cache=tmp_path)
    assert {name for name, _ in hub.fetched()} == {"config.json", "README.md"}
    assert (target / "config.json").read_bytes() == hub.files["config.json"]


def test_expected_and_missing(hub: Hub, tmp_path: Path) -> None:
    sizes = {name: len(content) for name, content in WANTED.items()}
    assert dict(expected(REPO, endpoint=hub.endpoint, cache=tmp_path)) == sizes
    assert dict(missing(REPO, endpoint=hub.endpoint, cache=tmp_path)) == sizes
    folder = download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    assert missing(REPO, endpoint=hub.endpoint, cache=tmp_path) == []
    (folder / SHARD).unlink()
    assert missing(REPO, COMMIT, endpoint=hub.endpoint, cache=tmp_path) == [(SHARD, sizes[SHARD])]


def test_the_next_run_goes_on_after_a_cut_connection(hub: Hub, tmp_path: Path) -> None:
    hub.cut = {SHARD: 300_000}
    with pytest.raises(G4Error, match="run this again"):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    folder = tmp_path / "models--someone--gemma" / "snapshots" / COMMIT
    left = {name for name in WANTED if not (folder / name).exists()}
    assert SHARD in left != set(WANTED)
    hub.fetched()
    hub.cut = {}
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path))
    assert {name for name, _ in hub.fetched()} == left


def test_a_cut_connection_is_resumed_within_a_run(hub: Hub, tmp_path: Path) -> None:
    class Once(dict[str, int]):
        def __setitem__(self, name: str, _: int) -> None:
            del self[name]  # cut, then well behaved

    hub.cut = Once({SHARD: 300_000})
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path))
    ranges = [ranges for name, ranges in hub.fetched() if name == SHARD]
    assert ranges[0] == ""
    assert len(ranges) == 2
    assert int(ranges[1].removeprefix("bytes=").removesuffix("-")) >= 1 << 16


def test_a_connection_that_drips_is_cut_and_taken_up_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults = [Fault(f"GET .*{SHARD}", slow=0.02)]  # 20 s for the whole
    began = time.monotonic()
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path, patience=0.6))
    assert time.monotonic() - began < 15
    assert [name for name, _ in hub.fetched()].count(SHARD) >= 2
    hub.faults = [Fault(f"GET .*{OTHER}", slow=0.5, times=99)]
    (tmp_path / "models--someone--gemma" / "snapshots" / COMMIT / OTHER).resolve().unlink()
    with pytest.raises(G4Error, match="run this again"):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path, patience=0.2)


@pytest.mark.parametrize("headers", [{"Retry-After": "41"}, {}])
def test_slow_down_is_obeyed(
    hub: Hub, tmp_path: Path, sleeps: list[float], headers: dict[str, str]
) -> None:
    hub.faults = [Fault(f"GET .*/resolve/.*{SHARD}", 429, headers=headers)]
    hub.faults.append(Fault("GET .*/tree/", 429, headers=headers))
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path))
    assert [fault.times for fault in hub.faults] == [0, 0]
    assert all(41 <= pause <= 43 for pause in sleeps) == bool(headers)
    assert len(sleeps) >= 2


@pytest.mark.parametrize("status", [500, 502, 503, 504, None])
@pytest.mark.parametrize("where", ["/revision/", "/tree/", f"/resolve/.*{SHARD}", "config.json"])
def test_what_passes_is_tried_again_or_told(
    hub: Hub, tmp_path: Path, sleeps: list[float], where: str, status: int | None
) -> None:
    hub.faults = [Fault(f"(GET|HEAD) .*{where}", status)]
    told = ""
    try:
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    except G4Error as error:
        told = str(error)
    assert hub.faults[0].times == 0
    assert not told or "run this again" in told
    # The library itself tries again what it asks most often, but not after every kind of break.
    assert not told or where == "/revision/" or status is None
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path))


def test_a_token_that_has_expired(hub: Hub, tmp_path: Path) -> None:
    hub.faults = [Fault("/resolve/", 401, times=99)]
    with pytest.raises(G4Error, match=r"refuses access to someone/gemma \(401\): log in"):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    hub.faults = []
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path))


@pytest.mark.parametrize("name", [SHARD, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_wrong_bytes_of_the_right_size_are_caught(
    hub: Hub, tmp_path: Path, name: str, in_folder: bool
) -> None:
    target = tmp_path / "here" if in_folder else None
    hub.wrong = {name: WANTED[name][:-1] + b"~"}
    with pytest.raises(G4Error, match=rf"{REPO}: {name} did not match .* was removed"):
        download(REPO, local_dir=target, endpoint=hub.endpoint, cache=tmp_path)
    hub.fetched()
    hub.wrong = {}
    _check(download(REPO, local_dir=target, endpoint=hub.endpoint, cache=tmp_path))
    assert [fetched for fetched, _ in hub.fetched()] == [name]


def test_rot_on_the_disk_is_caught(hub: Hub, tmp_path: Path) -> None:
    folder = download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    for name in (OTHER, "processor_config.json"):
        blob = (folder / name).resolve()
        blob.write_bytes(b"~" * blob.stat().st_size)
    with pytest.raises(G4Error, match=r"did not match .* were removed") as caught:
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    # The Hub's cache keeps the two equal files once, so both are spoilt.
    for name in (OTHER, "processor_config.json", "generation_config.json"):
        assert name in str(caught.value)
    _check(download(REPO, endpoint=hub.endpoint, cache=tmp_path))


def test_resolve(hub: Hub, tmp_path: Path) -> None:
    assert resolve(REPO, endpoint=hub.endpoint, cache=tmp_path) == COMMIT
    hub.requests.clear()
    assert resolve(REPO, "b" * 40, endpoint=hub.endpoint, cache=tmp_path) == "b" * 40
    assert hub.requests == []


def test_offline_uses_what_is_here(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(G4Error, match=f"{REPO} is not on this machine .*HF_HUB_OFFLINE"):
            resolve(REPO, endpoint=hub.endpoint, cache=tmp_path)
    commit = resolve(REPO, endpoint=hub.endpoint, cache=tmp_path)
    folder = download(REPO, commit, endpoint=hub.endpoint, cache=tmp_path)
    hub.requests.clear()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPO, endpoint=hub.endpoint, cache=tmp_path) == COMMIT
    assert download(REPO, endpoint=hub.endpoint, cache=tmp_path) == folder
    assert {n for n, _ in expected(REPO, endpoint=hub.endpoint, cache=tmp_path)} == set(WANTED)
    blob = (folder / OTHER).resolve()
    blob.write_bytes(b"~" * blob.stat().st_size)
    with pytest.raises(G4Error, match=f"{OTHER} did not match"):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    with pytest.raises(G4Error, match="not on this machine as a whole"):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    assert hub.requests == []


def test_offline_never_points_to_a_commit_that_is_not_here(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    hub.commit = "c" * 40
    assert resolve(REPO, endpoint=hub.endpoint, cache=tmp_path) == hub.commit
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPO, endpoint=hub.endpoint, cache=tmp_path) == COMMIT


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(G4Error, match=rf"connection to {endpoint} failed \(ConnectError\)"):
        resolve(REPO, endpoint=endpoint, cache=tmp_path)


def test_refusals_are_one_sentence(hub: Hub, tmp_path: Path) -> None:
    def message(repo: str = REPO, revision: str = "main") -> str:
        with pytest.raises(G4Error) as caught:
            download(repo, revision, endpoint=hub.endpoint, cache=tmp_path)
        text = str(caught.value)
        assert "\n" not in text
        assert "secret" not in text
        return text

    assert "no model repository someone/else" in message("someone/else")
    assert f"{REPO} has no revision 'nowhere'" in message(revision="nowhere")
    assert f"{REPO} has no revision '{'d' * 40}'" in message(revision="d" * 40)
    hub.gated = True
    gated = message()
    assert f"accept its terms at {hub.endpoint}/{REPO}" in gated
    assert "`hf auth login`" in gated
    with pytest.raises(UsageError, match="'a/b/c' is no repository name"):
        resolve("a/b/c", endpoint=hub.endpoint, cache=tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"only as pickles \(pytorch_model.bin"),
        ({"config.json": b"{}", "model.gguf": b"x"}, "no safetensors weights"),
    ],
)
def test_weights_that_are_never_loaded(
    hub: Hub, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    hub.files = files
    with pytest.raises(G4Error, match=message):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    assert hub.fetched() == []


def test_a_disk_too_small_is_found_before(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2e9, 1e9, 50_000_000))
    with pytest.raises(G4Error, match=r"needs 0\.07 GB and has 0\.05 GB free"):
        download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    assert hub.fetched() == []


def test_progress_is_reported_and_nothing_is_drawn(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Progress] = []
    folder = download(REPO, endpoint=hub.endpoint, cache=tmp_path)
    (folder / OTHER).resolve().unlink()
    download(REPO, endpoint=hub.endpoint, cache=tmp_path, report=seen.append)
    total = sum(map(len, WANTED.values()))
    for job in (f"download {REPO}", f"verify {REPO}"):
        steps = [p for p in seen if p.job == job]
        done = [p.done for p in steps]
        assert {(p.total, p.unit) for p in steps} == {(total, "bytes")}
        assert done == sorted(done)
        assert done[-1] == total
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_importing_is_cheap() -> None:
    code = "import sys, g4tool.hub.download; print('huggingface_hub' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_name_that_nobody_knows_is_not_tried_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    began = time.monotonic()
    with pytest.raises(G4Error, match=f"{REPO} cannot be fetched, for hub.invalid was not found"):
        download(REPO, COMMIT, endpoint="http://hub.invalid:1", cache=tmp_path)
    assert time.monotonic() - began < 2


def test_behind_a_proxy_the_name_is_the_proxys_business(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with explained(REPO, "main", "https://hub.invalid"):
        pass


def test_the_librarys_warnings_stay_off_the_terminal(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    with explained(REPO, "main", hub.endpoint):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        logging.getLogger("huggingface_hub.utils._http").error("at last")
    assert logger.level == level
    assert [record.message for record in caplog.records] == ["at last"]
