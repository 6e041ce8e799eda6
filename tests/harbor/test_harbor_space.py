"""A Space of Harbor's tasks, pushed by the real `huggingface_hub` to a double of the Hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

from openenv.harbor.space import SpacePlan, push_space


class HubDouble(ThreadingHTTPServer):
    """Notes what is asked of it, and answers as the Hub does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[tuple[str, str, Any]] = []
        self.files: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubDouble

    def do_DELETE(self) -> None:
        self._note("DELETE")
        self._send({})

    def do_GET(self) -> None:
        self._note("GET")
        self._send({"name": "me", "type": "user"} if "whoami" in self.path else {"siblings": [], "sha": "0" * 40})

    def do_POST(self) -> None:
        body = self._note("POST")
        if self.path.endswith("/repos/create"):
            self._send({"url": f"{self.server.url}/spaces/{body['organization']}/{body['name']}"})
        elif "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in body["files"]]
            self._send({"files": files})
        elif "/commit/" in self.path:
            for entry in body:
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"]).decode()
            self._send(
                {"commitUrl": f"{self.server.url}/spaces/me/tasks/commit/1", "commitOid": "1" * 40, "success": True}
            )
        elif self.path.endswith("/variables"):
            self._send({body["key"]: {"value": body["value"], "updatedAt": "2026-01-01T00:00:00.000Z"}})
        else:
            self._send({"stage": "BUILDING", "hardware": {"current": None, "requested": "cpu-basic"}})

    def _note(self, method: str) -> Any:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        body = lines if "/commit/" in self.path else (lines[0] if lines else None)
        self.server.calls.append((method, self.path.partition("?")[0], body))
        return body

    def _send(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    double = HubDouble()
    thread = threading.Thread(target=double.serve_forever, daemon=True)
    thread.start()
    yield double
    double.shutdown()
    double.server_close()
    thread.join()


def test_a_space_gets_its_settings_before_its_files(hub: HubDouble, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("KUBE=very-secret\n")
    plan = SpacePlan(
        repo_id="me/tasks",
        datasets=("me/data",),
        llm_url="https://models.example/v1",
        hardware="cpu-basic",
        switches={"rollouts": True, "add-datasets": False},
        api_key="also-secret",
        env_file=tmp_path / "env",
    )
    lines: list[str] = []
    push_space(plan, recreate=True, endpoint=hub.url, report=lines.append)
    order = [path.rpartition("/")[2] for method, path, _ in hub.calls if method != "GET"]
    assert order == ["delete", "create", "variables", "secrets", "secrets", "validate-yaml", "main", "main", "hardware"]
    sent = {body["key"]: body["value"] for _, path, body in hub.calls if path.endswith(("/variables", "/secrets"))}
    assert sent == {"OPENENV_DATASETS": "me/data", "KUBE": "very-secret", "OPENENV_LLM_API_KEY": "also-secret"}
    assert '"--no-add-datasets", "--rollouts"' in hub.files["Dockerfile"]
    assert "sdk: docker" in hub.files["README.md"]
    assert "secret" not in "".join(hub.files.values())
    assert "-secret" not in "".join(lines)
    assert "also-secret" not in repr(plan)


def test_hardware_that_is_not_there_is_named_before_anything_is_made(hub: HubDouble) -> None:
    with pytest.raises(ValueError, match="no hardware 'huge'; there is cpu-basic"):
        push_space(SpacePlan(repo_id="me/tasks", hardware="huge"), endpoint=hub.url)
    assert hub.calls == []
