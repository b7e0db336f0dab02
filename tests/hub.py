"""A hub on 127.0.0.1: the few addresses of the Hugging Face hub that `snapshot_download` asks for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/?]+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


def commit(n: int) -> str:
    return f"{n:040x}"


@dataclass
class Hub:
    """repos: {id: {revision name or commit: folder}}. requests: paths that were asked for."""

    repos: dict[str, dict[str, Path]]
    address: str = ""
    requests: list[str] = field(default_factory=list)
    gated: frozenset[str] = frozenset()

    def fetched(self) -> set[str]:
        """Names of the files that were sent."""
        return {match["path"] for path in self.requests if (match := _FILE.match(path))}


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            hub.requests.append(unquote(self.path))
            self.answer()

        def answer(self) -> None:
            path = unquote(self.path)
            match = _FILE.match(path) or _API.match(path)
            if match is None or match["repo"] not in hub.repos:
                return self.refuse(404, "RepoNotFound")
            if match["repo"] in hub.gated:
                return self.refuse(403, "GatedRepo")
            revisions = hub.repos[match["repo"]]
            folder = revisions.get(match["revision"] or "main")
            if folder is None:
                return self.refuse(404, "RevisionNotFound")
            sha = next(r for r, place in revisions.items() if place == folder and len(r) == 40)
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            if match.re is _FILE:
                file = folder / match["path"]
                if not file.is_file():
                    return self.refuse(404, "EntryNotFound")
                return self.send(file.read_bytes(), sha)
            if match["what"] == "tree":
                entries = [
                    {
                        "type": "file",
                        "path": str(p.relative_to(folder)),
                        "size": p.stat().st_size,
                        "oid": _etag(p),
                    }
                    for p in files
                ]
                return self.send(json.dumps(entries).encode(), sha)
            siblings = [{"rfilename": str(p.relative_to(folder))} for p in files]
            self.send(json.dumps({"id": match["repo"], "sha": sha, "siblings": siblings}).encode(), sha)

        def send(self, data: bytes, sha: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", sha)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
