"""A Hub of one repository on 127.0.0.1, with the read endpoints, that misbehaves when told to."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "someone/gemma"
COMMIT = "a" * 40


@dataclass
class Hub:
    """What is served (`files`: large ones count as LFS), and how it goes wrong.

    `cut`: file -> bytes sent before the connection breaks; after that the server refuses (503)
    until `cut` is emptied. `wrong`: file -> other bytes of the same size. `gated`, `down`: answers
    of the whole repository. `commit`: what main is. `requests` lists what was asked for.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    cut: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    endpoint: str = ""

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


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", "tokenizer.json"))


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves `hub` on a free port; stops with the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 20

        def log_message(self, *_: object) -> None:
            """Silence."""

        def do_HEAD(self) -> None:
            self._serve(body=False)

        def do_GET(self) -> None:
            self._serve(body=True)

        def _serve(self, body: bool) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{REPO}/"):
                what, _, revision = path.removeprefix(f"/api/models/{REPO}/").partition("/")
                if revision not in ("main", hub.commit):
                    self._answer(404, error="RevisionNotFound")
                elif what == "revision":
                    self._answer(200, {"id": REPO, "sha": hub.commit, "siblings": []})
                else:
                    self._answer(200, [_entry(name, hub.files[name]) for name in hub.files])
            elif path.startswith(f"/{REPO}/resolve/{hub.commit}/"):
                self._file(path.removeprefix(f"/{REPO}/resolve/{hub.commit}/"), body)
            else:
                self._answer(401, error="RepoNotFound")

        def _file(self, name: str, body: bool) -> None:
            if hub.gated:
                return self._answer(403, error="GatedRepo")
            if hub.cut.get(name) == 0:
                return self._answer(503)
            content = hub.wrong.get(name, hub.files[name])
            digest = hashlib.sha256 if is_large(name) else None
            etag = digest(hub.files[name]).hexdigest() if digest else git_sha1(hub.files[name])
            first = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", hub.commit)
            self.send_header("Accept-Ranges", "bytes")
            if first:
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            if not body:
                return None
            if name in hub.cut:
                self.wfile.write(content[first : hub.cut[name]])
                hub.cut[name] = 0
                self.close_connection = True
                return None
            self.wfile.write(content[first:])
            return None

        def _answer(self, status: int, value: object = (), error: str = "") -> None:
            content = json.dumps(value or {}).encode()
            self.send_response(status)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
