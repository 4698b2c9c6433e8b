"""Uploads to a small Hub of our own: whole, cut, refused, spoilt; nothing is ever half there."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from g4tool.errors import G4Error, UsageError
from g4tool.hub.assemble import LocalFile
from g4tool.hub.upload import Published, check_login, look, upload
from g4tool.progress import Progress
from tests.hub.server import TOKEN, Fault, Hub

REPO = "someone/bundle"
CARD = "---\nlibrary_name: g4\n---\n# bundle\n"
CONTENT = {
    "README.md": CARD.encode(),
    ".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n",
    "config.json": b'{"model_type": "gemma4"}',
    "g4.json": b'{"format": "g4-bundle"}',
    "tokenizer.json": b'{"version": "1.0"}',
    **{f"model-0000{n}-of-00007.safetensors": bytes([n]) * 200_000 for n in range(1, 8)},
    "export-cpu/model.pte": b"program" * 1000,
}
LARGE = 9  # the shards, tokenizer.json, the program

Send = Callable[..., Published]


def local_files(folder: Path, content: dict[str, bytes]) -> list[LocalFile]:
    found = []
    for name, data in sorted(content.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        found.append(LocalFile(name, path, len(data), hashlib.sha256(data).hexdigest()))
    return found


@pytest.fixture
def send(tmp_path: Path) -> Send:
    """Uploads `content` as `g4 upload` does, what is there looked at first."""

    def run(content: dict[str, bytes] = CONTENT, repo: str = REPO, **more: object) -> Published:
        return upload(repo, local_files(tmp_path, content), "message", look(repo), **more)  # type: ignore[arg-type]

    return run


def _is_unpublished(hub: Hub) -> bool:
    return REPO not in hub.repos or set(hub.repos[REPO].files) == {".gitattributes"}


def _check(hub: Hub, done: Published) -> None:
    assert hub.repos[REPO].files == CONTENT
    assert done.commit == hub.repos[REPO].commit
    assert done.url == f"{hub.endpoint}/{REPO}/tree/{done.commit}"


def test_everything_appears_in_one_commit_and_only_once(empty_hub: Hub, send: Send) -> None:
    seen: list[Progress] = []
    done = send(report=seen.append)
    _check(empty_hub, done)
    # Its .gitattributes is what the Hub itself had put there.
    assert set(done.sent) == set(CONTENT) - {".gitattributes"}
    assert empty_hub.asked("POST .*/commit/") == 1
    assert empty_hub.asked("PUT ") == LARGE
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert (
        seen[-1].done
        == seen[-1].total
        == sum(map(len, CONTENT.values())) - len(CONTENT[".gitattributes"])
    )

    empty_hub.requests.clear()
    again = send()
    assert (again.commit, again.sent, again.removed) == (done.commit, (), ())
    assert empty_hub.asked("PUT |POST ") == 0


def test_a_new_bundle_replaces_weights_that_would_lie_beside_it(empty_hub: Hub, send: Send) -> None:
    send()
    old = empty_hub.repos[REPO].commit
    empty_hub.repos[REPO].files["assets/figure.png"] = b"somebody's"
    shards = {n: c for n, c in CONTENT.items() if not n.startswith("model-")}
    new = {**shards, "model.safetensors": b"one file", "export-cpu/other.pte": b"program 2"}
    del new["export-cpu/model.pte"]
    done = send(new)
    assert set(done.sent) == {"model.safetensors", "export-cpu/other.pte"}
    assert set(done.removed) == {n for n in CONTENT if n.startswith(("model-", "export-cpu/"))}
    assert empty_hub.repos[REPO].files == {**new, "assets/figure.png": b"somebody's"}
    assert empty_hub.repos[REPO].history[old] is not empty_hub.repos[REPO].files


def test_private(empty_hub: Hub, send: Send) -> None:
    send(private=True)
    assert empty_hub.repos[REPO].private
    found = look(REPO)
    assert found is not None
    assert (found.private, found.is_ours, found.is_new) == (True, True, False)


PUT, COMMIT = "^PUT /lfs/", "POST .*/commit/"
REFUSED = {
    "expired token while files are sent": (
        Fault("/lfs/objects/batch", 401, times=99, skip=1),
        "does not know this login .* has expired",
    ),
    "expired token at the commit": (Fault(COMMIT, 401), "has expired"),
    "no permission": (Fault("/preupload/", 403), f"this login may not write to {REPO}"),
    "out of quota": (
        Fault("/lfs/objects/batch", 403, message="Private repository storage limit reached"),
        "someone is out of quota",
    ),
    "payment": (Fault("/lfs/objects/batch", 402), "out of quota"),
    "too large": (Fault(COMMIT, 413), "out of quota"),
    "storage fails for long": (Fault(PUT, 503, times=99, skip=3), "the Hub answered 50"),
    "storage cuts for long": (Fault(PUT, times=99, skip=3), "connection to .* failed"),
    "slow down, for long": (Fault("/batch", 429, times=99), "asks to slow down"),
    "commit fails": (Fault(COMMIT, 500), "the Hub answered 500"),
    "commit cut before it arrived": (Fault(COMMIT), "connection to .* failed"),
    "server's verify fails": (Fault("/lfs-verify", 404, times=99), "is not there|answered"),
    "card refused": (Fault("/validate-yaml", 400), "does not take what was sent"),
    "create fails": (Fault("/repos/create", 500, times=99), "the Hub answered 500"),
    "tree fails at the end": (Fault("/tree/", 500, times=99, skip=1), "the Hub answered 500"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_goes_wrong_the_next_run_completes(empty_hub: Hub, send: Send, name: str) -> None:
    fault, message = REFUSED[name]
    empty_hub.faults = [fault]
    with pytest.raises(G4Error, match=message) as caught:
        send()
    text = str(caught.value)
    assert "\n" not in text
    assert TOKEN not in text
    if name != "tree fails at the end":
        assert _is_unpublished(empty_hub)
    stored = len(empty_hub.objects)
    empty_hub.faults, empty_hub.requests = [], []
    _check(empty_hub, send())
    # What had arrived is not sent again.
    assert empty_hub.asked("PUT ") == LARGE - stored


@pytest.mark.parametrize(
    "fault",
    [
        Fault(PUT, 500, times=2),
        Fault(PUT, times=2),
        Fault("/lfs/objects/batch", 502),
        Fault("/lfs/objects/batch"),
        Fault("/preupload/", 503),
        Fault("/lfs-verify", 504),
    ],
    ids=lambda fault: f"{fault.match} {fault.status or 'cut'}",
)
def test_what_passes_is_tried_again_within_the_run(
    empty_hub: Hub, send: Send, sleeps: list[float], fault: Fault
) -> None:
    empty_hub.faults = [fault]
    _check(empty_hub, send())
    assert fault.times == 0
    assert sleeps


@pytest.mark.parametrize("where", [PUT, "/lfs/objects/batch", "/preupload/"])
def test_retry_after_is_waited_for(
    empty_hub: Hub, send: Send, sleeps: list[float], where: str
) -> None:
    empty_hub.faults = [Fault(where, 429, headers={"Retry-After": "37"})]
    _check(empty_hub, send())
    assert 37 <= sleeps[0] <= 39


def test_an_answer_that_is_lost_after_the_commit(empty_hub: Hub, send: Send) -> None:
    empty_hub.faults = [Fault(COMMIT, after=True)]
    _check(empty_hub, send())
    assert empty_hub.asked(COMMIT) == 1


def test_bytes_that_the_server_spoils_are_noticed(empty_hub: Hub, send: Send) -> None:
    empty_hub.spoil = {"model-00003-of-00007.safetensors"}
    with pytest.raises(G4Error, match=r"does not hold what was sent \(model-00003-of-00007"):
        send()
    empty_hub.spoil = set()
    done = send()
    _check(empty_hub, done)
    assert done.sent == ("model-00003-of-00007.safetensors",)


def test_a_repository_that_moved_meanwhile(empty_hub: Hub, tmp_path: Path, send: Send) -> None:
    send()
    seen = look(REPO)
    empty_hub.repos[REPO].commit = "f" * 40
    files = local_files(tmp_path, {**CONTENT, "config.json": b"{}"})
    with pytest.raises(G4Error, match=f"{REPO} changed while files were sent"):
        upload(REPO, files, "message", seen)
    assert empty_hub.repos[REPO].files == CONTENT


def test_refusals_before_anything_is_sent(
    empty_hub: Hub, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(repo: str = REPO) -> str:
        with pytest.raises(G4Error) as caught:
            send(repo=repo)
        assert TOKEN not in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "may not write to google/bundle (403)" in message("google/bundle")
    with pytest.raises(UsageError, match="'a/b/c' is no repository name"):
        send(repo="a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "does not know this login (401)" in message()
    assert empty_hub.repos == {}
    assert empty_hub.asked("PUT |preupload|commit") == 0


def test_a_name_that_is_taken_and_hidden(empty_hub: Hub, send: Send) -> None:
    hidden = {"X-Error-Code": "RepoNotFound"}
    empty_hub.faults = [
        Fault(f"GET /api/models/{re.escape(REPO)}", 404, times=99, headers=hidden),
        Fault("/repos/create", 409),
    ]
    with pytest.raises(G4Error, match=f"the name {REPO} is taken"):
        send()


def test_without_a_login(empty_hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_login()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(G4Error, match=r"needs a login .* `hf auth login`"):
        check_login()


def test_no_network(empty_hub: Hub, send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(G4Error, match="cannot be published offline"):
        send()
