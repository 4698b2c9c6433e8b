"""A small Hub on 127.0.0.1: reading, publishing, and misbehaving when told to.

It speaks the endpoints that huggingface_hub uses with HF_HUB_DISABLE_XET: repositories, trees,
files with ranges, preupload, LFS batch, PUT and verify, commits as ndjson.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

REPO = "someone/gemma"
COMMIT = "a" * 40
TOKEN = "hf_secretsecretsecretsecretsecretsecr"
_REPO_ID = r"[\w.-]+/[\w.-]+"


@dataclass
class Repo:
    """One repository: what main holds now, and what it held."""

    files: dict[str, bytes]
    commit: str = COMMIT
    private: bool = False
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)


@dataclass
class Fault:
    """Something that goes wrong with requests whose "METHOD path" the regex `match` is found in.

    `times` of them, after `skip` good ones: answered with `status` (with `headers` and `message`),
    else the connection is cut; `after` lets the request take effect before that. `slow` seconds
    pass before each kilobyte of a file, and nothing else goes wrong.
    """

    match: str
    status: int | None = None
    times: int = 1
    skip: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    after: bool = False
    slow: float = 0.0


class Hub:
    """What is served and how it goes wrong. `files` and `commit` are those of REPO.

    `cut`: file -> bytes sent before the connection breaks; after that the server refuses (503)
    until `cut` is emptied. `wrong`: file -> other bytes of the same size. `gated`: no file is given
    out. `spoil`: names of uploaded files that the server stores with a byte changed. `writers`:
    the owners that TOKEN may write to. `requests` lists method, path and Range header.
    """

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.repos: dict[str, Repo] = {} if files is None else {REPO: Repo(files)}
        self.objects: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.wrong: dict[str, bytes] = {}
        self.gated = False
        self.spoil: set[str] = set()
        self.writers = {"someone"}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str]] = []
        self.endpoint = ""
        self.lock = threading.Lock()

    @property
    def files(self) -> dict[str, bytes]:
        return self.repos[REPO].files

    @files.setter
    def files(self, files: dict[str, bytes]) -> None:
        self.repos[REPO].files = files

    @property
    def commit(self) -> str:
        return self.repos[REPO].commit

    @commit.setter
    def commit(self, commit: str) -> None:
        self.repos[REPO].commit = commit

    def fetched(self) -> list[tuple[str, str]]:
        """(file, Range header) of every GET of a file so far, and forgets them."""
        marker = "/resolve/"
        found = [
            (path.partition(marker)[2].partition("/")[2], ranges)
            for method, path, ranges in self.requests
            if method == "GET" and marker in path
        ]
        self.requests.clear()
        return found

    def asked(self, match: str) -> int:
        """How many requests fit the regex so far."""
        return sum(bool(re.search(match, f"{m} {p}")) for m, p, _ in self.requests)

    def fault(self, request: str) -> Fault | None:
        """The fault that this request meets, counted."""
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.match, request):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pte", "tokenizer.json"))


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves `hub` on a free port; stops with the block."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 20
    wbufsize = -1  # an answer is one packet; in pieces each would wait for the other side
    slow = 0.0

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
        fault = self.hub.fault(f"{self.command} {self.path}")
        self.slow = fault.slow if fault else 0.0
        if fault is None or fault.slow:
            self._route(self._body())
        elif fault.status is None and not fault.after:
            self.close_connection = True  # while the client may still be sending
        else:
            body = self._body()
            if fault.after:
                self._send = lambda *_: None  # type: ignore[method-assign]
                self._route(body)
                del self._send  # type: ignore[method-assign]
            if fault.status is None:
                self.close_connection = True
            else:
                self._answer(fault.status, {"error": fault.message}, headers=fault.headers)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _route(self, body: bytes) -> None:
        path = unquote(self.path.partition("?")[0])
        routes = {
            rf"GET /api/models/({_REPO_ID})(?:/revision/(.+))?": self._model,
            rf"GET /api/models/({_REPO_ID})/tree/(.+)": self._tree,
            rf"(?:GET|HEAD) /({_REPO_ID})/resolve/([^/]+)/(.+)": self._file,
            r"GET /api/whoami-v2": self._whoami,
            r"POST /api/repos/create": lambda: self._create(json.loads(body)),
            r"POST /api/validate-yaml": lambda: self._validate(json.loads(body)["content"]),
            rf"POST /api/models/({_REPO_ID})/preupload/main": lambda r: self._preupload(r, body),
            rf"POST /({_REPO_ID})\.git/info/lfs/objects/batch": lambda r: self._batch(r, body),
            r"PUT /lfs/([0-9a-f]{64})": lambda oid: self._put(oid, body),
            r"POST /lfs-verify": lambda: self._verify(json.loads(body)),
            rf"POST /api/models/({_REPO_ID})/commit/main": lambda r: self._commit(r, body),
        }
        for pattern, serve in routes.items():
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                serve(*found.groups())  # type: ignore[operator]
                return
        self._answer(404)

    # Reading

    def _model(self, repo: str, revision: str | None) -> None:
        if (found := self._at(repo, revision or "main")) is not None:
            sha, _ = found
            about = {"id": repo, "sha": sha, "siblings": [], "gated": False}
            self._answer(200, {**about, "private": self.hub.repos[repo].private})

    def _tree(self, repo: str, revision: str) -> None:
        if (found := self._at(repo, revision)) is not None:
            _, files = found
            self._answer(200, [_entry(name, files[name]) for name in files])

    def _file(self, repo: str, revision: str, name: str) -> None:
        hub = self.hub
        if (found := self._at(repo, revision)) is None:
            return
        sha, files = found
        if hub.gated:
            self._answer(403, error="GatedRepo")
            return
        if name not in files:
            self._answer(404, error="EntryNotFound")
            return
        if hub.cut.get(name) == 0:
            self._answer(503)
            return
        content = hub.wrong.get(name, files[name])
        digest = hashlib.sha256 if is_large(name) else None
        etag = digest(files[name]).hexdigest() if digest else git_sha1(files[name])
        first, last = _range(self.headers.get("Range"), len(content))
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        whole = self.headers.get("Range") is None
        if not whole:
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(content)}"
        headers["Content-Length"] = str(last - first)
        self._send(200 if whole else 206, headers)
        if self.command == "HEAD":
            return
        if name in hub.cut:
            self.wfile.write(content[first : hub.cut[name]])
            hub.cut[name] = 0
            self.close_connection = True
            return
        step = 1000 if self.slow else len(content)
        for start in range(first, last, step):
            time.sleep(self.slow)
            self.wfile.write(content[start : min(last, start + step)])
            self.wfile.flush()

    def _at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files at a revision; None when the answer has been given."""
        found = self.hub.repos.get(repo)
        if found is None or (found.private and not self._token()):
            self._answer(401, error="RepoNotFound")
            return None
        if revision in ("main", found.commit):
            return found.commit, found.files
        if revision in found.history:
            return revision, found.history[revision]
        self._answer(404, error="RevisionNotFound")
        return None

    # Publishing

    def _token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _whoami(self) -> None:
        about = {"type": "user", "name": "someone", "auth": {"type": "access_token"}}
        self._answer(200, about) if self._token() else self._answer(401)

    def _may_write(self, owner: str) -> bool:
        if not self._token():
            self._answer(401)
        elif owner not in self.hub.writers:
            self._answer(403, {"error": f"You don't have the rights to write to {owner}"})
        else:
            return True
        return False

    def _create(self, wanted: dict[str, Any]) -> None:
        owner = wanted.get("organization") or "someone"
        repo = f"{owner}/{wanted['name']}"
        if not self._may_write(owner):
            return
        if repo in self.hub.repos:
            self._answer(409, {"error": "You already created this model repo"})
            return
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        files = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
        self.hub.repos[repo] = Repo(files, _commit_id(repo, files), private)
        self._answer(200, {"url": f"{self.hub.endpoint}/{repo}"})

    def _validate(self, content: str) -> None:
        lines = content.split("\n")
        good = lines[0] == "---" and "---" in lines[1:]
        errors = [] if good else [{"message": "no front matter"}]
        self._answer(200 if good else 400, {"errors": errors, "warnings": []})

    def _preupload(self, repo: str, body: bytes) -> None:
        if not self._may_write(repo.partition("/")[0]):
            return
        there = self.hub.repos[repo].files
        self._answer(
            200,
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                        "shouldIgnore": False,
                        "oid": _oid(file["path"], there),
                    }
                    for file in json.loads(body)["files"]
                ]
            },
        )

    def _batch(self, repo: str, body: bytes) -> None:
        if not self._may_write(repo.partition("/")[0]):
            return
        objects: list[dict[str, Any]] = []
        for wanted in json.loads(body)["objects"]:
            one = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                one["actions"] = {
                    "upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"},
                    "verify": {"href": f"{self.hub.endpoint}/lfs-verify"},
                }
            objects.append(one)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _put(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "wrong content"})
            return
        self.hub.objects[oid] = body
        self._answer(200)

    def _verify(self, wanted: dict[str, Any]) -> None:
        held = self.hub.objects.get(wanted["oid"])
        self._answer(200 if held is not None and len(held) == wanted["size"] else 404)

    def _commit(self, repo: str, body: bytes) -> None:
        if not self._may_write(repo.partition("/")[0]):
            return
        held = self.hub.repos[repo]
        files = dict(held.files)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header" and value.get("parentCommit", held.commit) != held.commit:
                self._answer(412, {"error": "the branch has moved"})
                return
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                content = self.hub.objects[value["oid"]]
                spoilt = value["path"] in self.hub.spoil
                files[value["path"]] = content[:-1] + b"~" if spoilt else content
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        held.history[held.commit] = held.files
        held.files, held.commit = files, _commit_id(held.commit, files)
        url = f"{self.hub.endpoint}/{repo}/commit/{held.commit}"
        self._answer(200, {"commitUrl": url, "commitOid": held.commit})

    # Answers

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _answer(
        self,
        status: int,
        value: object = (),
        error: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        content = json.dumps(value or {}).encode()
        about = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        code = {"X-Error-Code": error} if error else {}
        self._send(status, {**about, **code, **(headers or {})}, content)


def _range(header: str | None, size: int) -> tuple[int, int]:
    """First byte and the one after the last."""
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first), min(size, int(last) + 1) if last else size


def _commit_id(parent: str, files: dict[str, bytes]) -> str:
    names = "".join(f"{name} {git_sha1(content)}" for name, content in sorted(files.items()))
    return hashlib.sha1(f"{parent} {names}".encode()).hexdigest()


def _oid(name: str, files: dict[str, bytes]) -> str | None:
    if name not in files:
        return None
    content = files[name]
    return hashlib.sha256(content).hexdigest() if is_large(name) else git_sha1(content)


def _entry(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": git_sha1(content),
    }
    if is_large(name):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry
