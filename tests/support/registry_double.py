"""A registry of container images on a local port, as far as `docker push` uses it: the Distribution API, version 2."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class RegistryDouble(ThreadingHTTPServer):
    """The registry, for as long as a `with` block lasts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, dict[str, Any]] = {}
        """By name and tag: `team/maze:latest`."""
        self.uploads: dict[str, bytes] = {}
        self.refuses_uploads = False
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def host(self) -> str:
        """What comes before the name of an image; engines speak plain HTTP to this machine."""
        return f"127.0.0.1:{self.server_address[1]}"

    def config(self, image: str) -> dict[str, Any]:
        """Return the configuration of an image: variables, command."""
        manifest = self.manifests[image]
        config: dict[str, Any] = json.loads(self.blobs[manifest["config"]["digest"]])["config"]
        return config

    def __enter__(self) -> RegistryDouble:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RegistryDouble

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self._send(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        self._send(200 if self.path.rpartition("/")[2] in self.server.blobs else 404)

    def do_POST(self) -> None:
        self._body()
        if self.server.refuses_uploads:
            self._send(403, {"errors": [{"code": "DENIED", "message": "requested access is denied"}]})
            return
        upload = secrets.token_hex(8)
        self.server.uploads[upload] = b""
        self._continued(upload)

    def do_PATCH(self) -> None:
        upload = self.path.rpartition("/")[2]
        self.server.uploads[upload] += self._body()
        self._continued(upload)

    def do_PUT(self) -> None:
        address = urlsplit(self.path)
        body = self._body()
        last = address.path.rpartition("/")[2]
        if "/manifests/" in address.path:
            name = address.path.removeprefix("/v2/").partition("/manifests/")[0]
            self.server.manifests[f"{name}:{last}"] = json.loads(body)
            self._send(201, digest=f"sha256:{hashlib.sha256(body).hexdigest()}")
            return
        content = self.server.uploads.pop(last) + body
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if parse_qs(address.query)["digest"] != [digest]:
            self._send(400, {"errors": [{"code": "DIGEST_INVALID"}]})
            return
        self.server.blobs[digest] = content
        self._send(201, digest=digest)

    def _continued(self, upload: str) -> None:
        prefix = self.path.partition("/blobs/uploads/")[0]
        size = len(self.server.uploads[upload])
        self._send(
            202,
            Location=f"http://{self.server.host}{prefix}/blobs/uploads/{upload}",
            Range=f"0-{max(size - 1, 0)}",
        )

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, data: Any = None, digest: str = "", **headers: str) -> None:
        body = json.dumps(data or {}).encode()
        self.send_response(status)
        if digest:
            headers["Docker-Content-Digest"] = digest
        for name, value in {"Docker-Distribution-Api-Version": "registry/2.0", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
