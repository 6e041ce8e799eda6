"""The Hugging Face Hub's side of `huggingface_hub`, as far as repositories and Spaces are concerned, on one local port.

Routes, headers and shapes are those that `huggingface_hub` 2.4 uses: who a token belongs to, repositories, commits with
small and large files (Git LFS), pull requests, and the variables, secrets, hardware and copies of Spaces.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_test_token"
USER = "tester"
ORGANIZATION = "team"
_FRONT_MATTER = re.compile(rb"\A---\n(.*?)^---$", re.DOTALL | re.MULTILINE)


@dataclass
class Repository:
    """A repository of the Hub with the files of its branch `main`."""

    id: str
    kind: str = "space"
    private: bool = False
    sdk: str | None = "docker"
    hardware: str = "cpu-basic"
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.bin filter=lfs\n"})
    variables: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    pull_requests: list[dict[str, bytes]] = field(default_factory=list)

    @property
    def runtime(self) -> dict[str, Any]:
        """What the Hub says of a Space that runs."""
        return {"stage": "BUILDING", "hardware": {"current": None, "requested": self.hardware}, "gcTimeout": 172800}


class HubDouble(ThreadingHTTPServer):
    """The Hub, for as long as a `with` block lasts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.requests: list[str] = []
        """What was asked for: `POST /api/repos/create`."""
        self.failures: dict[str, tuple[int, str]] = {}
        """Status and message for requests that a pattern finds: `{"POST .*/secrets": (500, "oops")}`."""
        self.holds: str | None = None
        """A pattern of requests that get no reply before `released` is set."""
        self.released = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """The address for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repository: Repository) -> Repository:
        """Have a repository from the beginning."""
        self.repositories[repository.id] = repository
        return repository

    def __enter__(self) -> HubDouble:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubDouble

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self._route("GET")

    def do_DELETE(self) -> None:
        self._route("DELETE")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _route(self, method: str) -> None:
        address = urlsplit(self.path)
        self._query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{method} {unquote(address.path)}"
        self.server.requests.append(request)
        if self.server.holds is not None and re.fullmatch(self.server.holds, request):
            self.server.released.wait(60)
        for pattern, (status, message) in self.server.failures.items():
            if re.fullmatch(pattern, request):
                self._refuse(status, message)
                return
        parts = unquote(address.path).strip("/").split("/")
        if parts[0] == "lfs":  # addresses of storage are signed, they need no token
            self._store(parts[1])
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Invalid credentials in Authorization header")
        elif parts[:2] == ["api", "whoami-v2"]:
            orgs = [{"type": "org", "name": ORGANIZATION, "roleInOrg": "write"}]
            self._send(200, {"type": "user", "id": "5e9ecfc0", "name": USER, "fullname": "A tester", "orgs": orgs})
        elif parts[:2] == ["api", "validate-yaml"]:
            self._validate()
        elif parts[:2] == ["api", "repos"]:
            self._delete() if parts[2] == "delete" else self._create()
        elif parts[0] == "api" and len(parts) >= 4:
            self._repository(method, "/".join(parts[2:4]), parts[4:])
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            self._batch()
        else:
            self._refuse(404, "Sorry, we can't find the page you are looking for.")

    # -- repositories ---------------------------------------------------------------------------------------------

    def _delete(self) -> None:
        wish = json.loads(self._body)
        name = f"{wish.get('organization') or USER}/{wish['name']}"
        if self.server.repositories.pop(name, None) is None:
            self._refuse(404, "Repository not found", code="RepoNotFound")
        else:
            self._send(200, {})

    def _create(self) -> None:
        wish = json.loads(self._body)
        owner = wish.get("organization") or USER
        name = f"{owner}/{wish['name']}"
        if owner not in (USER, ORGANIZATION):
            self._refuse(403, f"You don't have the rights to create a repo under the namespace {owner}")
            return
        url = f"{self.server.url}/{wish['type']}s/{name}"
        if name in self.server.repositories:
            self._refuse(409, f"You already created this {wish['type']} repo", url=url)
            return
        private = wish.get("visibility") == "private"
        repository = Repository(name, wish["type"], private, wish.get("sdk"), wish.get("hardware") or "cpu-basic")
        self.server.add(repository)
        self._send(200, {"url": url, "name": name, "id": "68"})

    def _repository(self, method: str, name: str, rest: list[str]) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            self._refuse(404, "Repository not found", code="RepoNotFound")
            return
        data: Any = json.loads(self._body) if self._body and rest and rest[0] != "commit" else {}
        match [method, *rest[:1]]:
            case ["GET"]:
                self._send(200, self._described(repository))
            case ["GET", "tree"]:
                files = repository.files.items()
                self._send(200, [_tree_entry(path, content) for path, content in files])
            case ["GET", "revision"]:
                self._send(200, self._described(repository))
            case ["PUT", "settings"]:
                repository.private = data.get("visibility") == "private" or bool(data.get("private"))
                self._send(200, {"private": repository.private})
            case ["POST", "variables"]:
                repository.variables[data["key"]] = data["value"]
                self._send(200, {key: {"value": value} for key, value in repository.variables.items()})
            case ["POST", "secrets"]:
                repository.secrets[data["key"]] = data["value"]
                self._send(200, {})
            case ["POST", "hardware"]:
                repository.hardware = data["flavor"]
                self._send(200, repository.runtime)
            case ["POST", "duplicate"]:
                self._duplicate(repository, data)
            case ["POST", "preupload"]:
                self._send(200, {"files": [_upload_mode(repository, one) for one in data["files"]]})
            case ["POST", "commit"]:
                self._commit(repository)
            case _:
                self._refuse(404, "Sorry, we can't find the page you are looking for.")

    def _described(self, repository: Repository) -> dict[str, Any]:
        return {
            "_id": "68",
            "id": repository.id,
            "author": repository.id.partition("/")[0],
            "sha": _oid(repository),
            "private": repository.private,
            "sdk": repository.sdk,
            "siblings": [{"rfilename": path} for path in repository.files],
            "runtime": repository.runtime,
            "tags": [repository.sdk],
        }

    def _duplicate(self, source: Repository, wish: dict[str, Any]) -> None:
        target = wish["repository"]
        if target.partition("/")[0] not in (USER, ORGANIZATION):
            self._refuse(403, "You don't have the rights to create a repo under this namespace")
            return
        if target in self.server.repositories:
            self._refuse(409, "You already created this space repo")
            return
        copy = Repository(target, source.kind, source.private, source.sdk, wish["hardware"], dict(source.files))
        copy.private = wish["visibility"] == "private" if "visibility" in wish else source.private
        copy.variables = dict(source.variables) | {one["key"]: one["value"] for one in wish.get("variables", ())}
        copy.secrets = {one["key"]: one["value"] for one in wish.get("secrets", ())}
        self.server.add(copy)
        self._send(200, {"url": f"{self.server.url}/{source.kind}s/{target}", "filesCopyPending": False})

    # -- files ----------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Check the front matter of a README, as the Hub does before a commit."""
        request = json.loads(self._body)
        match = _FRONT_MATTER.match(request["content"].encode())
        try:
            data = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            self._send(400, {"errors": [{"message": str(error)}], "warnings": []})
            return
        missing = [] if data.get("sdk") or request["repoType"] != "space" else [{"message": '"sdk" is required'}]
        self._send(400 if missing else 200, {"errors": missing, "warnings": []})

    def _commit(self, repository: Repository) -> None:
        changed = dict(repository.files)
        for line in self._body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    summary = value["summary"]
                case "file":
                    changed[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.server.objects:
                        self._refuse(400, f"The object {value['oid']} was not uploaded")
                        return
                    changed[value["path"]] = self.server.objects[value["oid"]]
                case "deletedFile":
                    if changed.pop(value["path"], None) is None:
                        self._refuse(400, f"There is no file {value['path']}")
                        return
        page = f"{self.server.url}/{repository.kind}s/{repository.id}"
        answer = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{page}/commit/{'0' * 40}"}
        if self._query.get("create_pr") == "1":
            repository.pull_requests.append(changed)
            number = len(repository.pull_requests)
            answer["pullRequestUrl"] = f"{page}/discussions/{number}"
        else:
            repository.files = changed
            repository.commits.append(summary)
        self._send(200, answer)

    def _batch(self) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}}
            for one in json.loads(self._body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _store(self, oid: str) -> None:
        if hashlib.sha256(self._body).hexdigest() != oid:
            self._refuse(400, "BadDigest")
            return
        self.server.objects[oid] = self._body
        self._send(200, {})

    # -- replies --------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str, code: str | None = None, **more: str) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self._send(status, {"error": message, **more}, headers)

    def _send(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("X-Request-Id", "Root=1-double")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _oid(repository: Repository) -> str:
    return hashlib.sha1(repr(sorted(repository.files.items())).encode()).hexdigest()


def _tree_entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _upload_mode(repository: Repository, wish: dict[str, Any]) -> dict[str, Any]:
    """Texts are part of a commit; what is binary or matches `.gitattributes` is a large file."""
    binary = b"\0" in base64.b64decode(wish["sample"]) or wish["path"].endswith(".bin")
    existing = repository.files.get(wish["path"])
    oid = None
    if existing is not None:
        oid = hashlib.sha1(b"blob %d\0" % len(existing) + existing).hexdigest()
    mode = "lfs" if binary else "regular"
    return {"path": wish["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
