"""The Hugging Face Hub's side of `huggingface_hub` for datasets: create, upload in one commit, on one local port."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test_token"
USER = "tester"


@dataclass
class DatasetRepository:
    """A dataset with the files of its branch `main`."""

    id: str
    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


class DatasetHub(ThreadingHTTPServer):
    """The Hub, for as long as a `with` block lasts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, DatasetRepository] = {}
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """The address for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> DatasetHub:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DatasetHub

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        repository = self.server.repositories.get("/".join(parts[2:4]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials in Authorization header"})
        elif parts[:2] == ["api", "validate-yaml"]:
            front_matter = json.loads(body)["content"].startswith("---\n")
            self._send(200 if front_matter else 400, {"errors": [], "warnings": []})
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif repository is None or parts[1] != "datasets":
            self._send(404, {"error": "Repository not found"})
        elif parts[4:5] == ["preupload"]:
            files = [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in json.loads(body)["files"]]
            self._send(200, {"files": files})
        elif parts[4:5] == ["commit"]:
            self._commit(repository, body)
        else:
            self._send(200, {"id": repository.id, "sha": "0" * 40, "private": repository.private, "siblings": []})

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization') or USER}/{request['name']}"
        url = f"{self.server.url}/datasets/{name}"
        if name in self.server.repositories:
            self._send(409, {"error": "You already created this dataset repo", "url": url})
            return
        assert request["type"] == "dataset"
        self.server.repositories[name] = DatasetRepository(name, request.get("visibility") == "private")
        self._send(200, {"url": url, "name": name, "id": "68"})

    def _commit(self, repository: DatasetRepository, body: bytes) -> None:
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "header":
                repository.commits.append(item["value"]["summary"])
            elif item["key"] == "file":
                repository.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        page = f"{self.server.url}/datasets/{repository.id}/commit/{'0' * 40}"
        self._send(200, {"success": True, "commitOid": "0" * 40, "commitUrl": page})

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", value.get("error", ""))
        self.end_headers()
        self.wfile.write(data)
