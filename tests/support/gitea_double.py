"""A double of a Gitea server: its API of repositories with pages and basic authentication, and git over HTTP.

Repositories are bare ones in a folder; `git http-backend`, the program that Git ships for this, serves them.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

USER, PASSWORD = "agent", "s3cret-of-gitea"


def git(folder: Path, *words: str) -> str:
    """Run git as a person with a name would; return its output."""
    names = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@x", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@x"}
    environment = {**os.environ, **names, "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclass
class GiteaDouble:
    """A running server."""

    root: Path
    url: str = ""
    page_size: int = 2
    """How many repositories a page has at most, whatever the request asks for."""
    requests: list[str] = field(default_factory=list)

    def add_repository(self, name: str, files: dict[str, str], *, branch: str = "main") -> str:
        """Make a repository with one commit; return its hash."""
        work = self.root / "work" / name
        work.mkdir(parents=True)
        git(work, "init", "--quiet", "--initial-branch", branch)
        bare = self.root / "repositories" / USER / f"{name}.git"
        bare.parent.mkdir(parents=True, exist_ok=True)
        git(self.root, "init", "--quiet", "--bare", "--initial-branch", branch, str(bare))
        git(bare, "config", "http.receivepack", "true")
        git(work, "remote", "add", "origin", str(bare))
        return self.commit(name, files)

    def commit(self, name: str, files: dict[str, str]) -> str:
        """Add a commit on the server; return its hash."""
        work = self.root / "work" / name
        for path, text in files.items():
            (work / path).write_text(text)
        git(work, "add", "--all")
        git(work, "commit", "--quiet", "-m", "a change")
        git(work, "push", "--quiet", "origin", "HEAD")
        return git(work, "rev-parse", "HEAD")

    def head(self, name: str) -> str:
        """Return the commit of a repository's default branch."""
        return git(self.root / "repositories" / USER / f"{name}.git", "rev-parse", "HEAD")

    def names(self) -> list[str]:
        """Return the names of all repositories."""
        return sorted(path.name.removesuffix(".git") for path in (self.root / "repositories" / USER).iterdir())

    def document(self, name: str) -> dict[str, Any]:
        """Return what the API says of a repository."""
        branch = git(self.root / "repositories" / USER / f"{name}.git", "symbolic-ref", "--short", "HEAD")
        path = f"{self.url}/{USER}/{name}"
        return {
            "name": name,
            "full_name": f"{USER}/{name}",
            "description": None if name == "empty" else f"about {name}",
            "html_url": path,
            "clone_url": f"{path}.git",
            "default_branch": branch,
        }


class GiteaHandler(BaseHTTPRequestHandler):
    """Answers the requests of a double, which is an attribute of its server."""

    protocol_version = "HTTP/1.1"

    @property
    def double(self) -> GiteaDouble:
        double: GiteaDouble = self.server.double  # type: ignore[attr-defined]
        return double

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.double.requests.append(self.path)
        url = urlsplit(self.path)
        if url.path == "/":
            self.answer(200, b"Gitea", "text/html")
        elif not self.is_allowed():
            self.answer(401, b'{"message": "invalid username or password"}', "application/json")
        elif url.path.startswith("/api/v1/"):
            self.api(url.path.removeprefix("/api/v1/"), parse_qs(url.query))
        else:
            self.backend()

    do_POST = do_GET

    def is_allowed(self) -> bool:
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return self.headers.get("authorization") == expected

    def api(self, path: str, query: dict[str, list[str]]) -> None:
        match path.split("/"):
            case ["user", "repos"]:
                page = int(query.get("page", ["1"])[0])
                size = min(int(query.get("limit", ["50"])[0]), self.double.page_size)
                chosen = self.double.names()[(page - 1) * size : page * size]
                self.json([self.double.document(name) for name in chosen])
            case ["repos", _, name] if name in self.double.names():
                self.json(self.double.document(name))
            case ["repos", _, name, "branches", _] if name in self.double.names():
                self.json({"commit": {"id": self.double.head(name)}})
            case _:
                self.answer(404, b'{"message": "not found"}', "application/json")

    def json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), "application/json")

    def backend(self) -> None:
        """Let `git http-backend` answer: a CGI program."""
        url = urlsplit(self.path)
        if self.headers.get("transfer-encoding") == "chunked":
            body = self.chunks()
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        variables = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.double.root / "repositories"),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "PATH_INFO": url.path,
            "QUERY_STRING": url.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("content-type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""),
            "REMOTE_USER": USER,
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=variables, capture_output=True, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
        self.answer(int(fields.pop("Status", "200").split()[0]), content, fields.get("Content-Type", "text/plain"))

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        if status == 401:
            self.send_header("www-authenticate", 'Basic realm="Gitea"')
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def gitea(root: Path) -> Iterator[GiteaDouble]:
    """Serve repositories below a folder until the block ends."""
    double = GiteaDouble(root)
    (root / "repositories" / USER).mkdir(parents=True)

    server = ThreadingHTTPServer(("127.0.0.1", 0), GiteaHandler)
    server.double = double  # type: ignore[attr-defined]
    server.daemon_threads = True
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
