"""Hugging Face's side of its sandboxes, as far as `huggingface_hub` uses it: the API of Jobs, and the server in a Job.

Commands run for real, on this machine. Routes and shapes are those of `huggingface_hub` 2.4 (protocol 3 of its server).
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_test"
OWNER = {"id": "5e9ecfc04957053f60648a3e", "name": "tester", "type": "user"}


@dataclass
class Job:
    """A Job that runs the sandbox server."""

    id: str
    spec: dict[str, Any]
    url: str
    stage: str = "RUNNING"
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return what the API says of it."""
        status = {"stage": self.stage, "message": None, "exposeUrls": [self.url]}
        kept = {name: self.spec.get(name) for name in ("dockerImage", "command", "environment", "flavor", "labels")}
        return {"id": self.id, "createdAt": "2026-11-01T10:00:00.000Z", "owner": OWNER, "status": status, **kept}

    def end(self) -> None:
        """Cancel it, with everything that runs in it."""
        self.stage = "CANCELED"
        for process in self.processes.values():
            _kill(process)


class HuggingFaceDouble(ThreadingHTTPServer):
    """The Hub and every Job on one port, for as long as a `with` block lasts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, Job] = {}
        self.refuses_jobs = False
        self.fails_cancel = 0
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """The address for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> HuggingFaceDouble:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for job in self.jobs.values():
            job.end()
        self.shutdown()
        self.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HuggingFaceDouble

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def do_DELETE(self) -> None:
        self._route("DELETE")

    def _route(self, method: str) -> None:
        address = urlsplit(self.path)
        self._query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials"})
            return
        parts = address.path.strip("/").split("/")
        if parts[0] == "api":
            self._hub(method, parts[1:])
            return
        job = self.server.jobs.get(parts[0].partition("--")[0])
        if job is None or job.stage != "RUNNING":
            self._send(404, {"error": "no such job"})
        elif parts[1:] == ["health"]:
            self._send(200, {"status": "ok", "version": "0.7.0", "protocol": 3})
        elif self.headers.get("X-Sandbox-Token") != job.spec["secrets"]["SBX_TOKEN"]:
            self._send(403, {"error": "wrong token"})
        else:
            self._sandbox(job, f"{method} {'/'.join(parts[2:4])}", parts[4:])

    # -- the Hub --------------------------------------------------------------------------------------------------

    def _hub(self, method: str, parts: list[str]) -> None:
        if parts == ["whoami-v2"]:
            self._send(200, {**OWNER, "orgs": [], "auth": {}})
        elif method == "POST" and len(parts) == 2:
            if self.server.refuses_jobs:
                self._send(402, {"error": "pre-paid credit balance is insufficient"})
                return
            name = secrets.token_hex(12)
            job = Job(name, json.loads(self._body), f"{self.server.url}/{name}--49983.jobs")
            self.server.jobs[name] = job
            self._send(200, job.described())
        elif method == "POST" and parts[-1] == "cancel":
            if self.server.fails_cancel > 0:
                self.server.fails_cancel -= 1
                self._send(500, {"error": "try again"})
                return
            self.server.jobs[parts[2]].end()
            self._send(200, self.server.jobs[parts[2]].described())
        else:
            self._send(200, self.server.jobs[parts[2]].described())

    # -- the server in a Job --------------------------------------------------------------------------------------

    def _sandbox(self, job: Job, route: str, rest: list[str]) -> None:
        path = Path(self._query.get("path", "/"))
        match route:
            case "POST exec":
                self._exec(job)
            case "POST processes":
                process = self._popen(job, output=subprocess.DEVNULL)
                name = secrets.token_hex(8)
                job.processes[name] = process
                self._send(200, {"id": name, "pid": process.pid})
            case "GET processes":
                self._send(200, [_listed(name, process) for name, process in job.processes.items()])
            case route if route.startswith("DELETE processes"):
                process = job.processes[route.rpartition("/")[2]]
                ran = process.poll() is None
                _kill(process)
                self._send(200, {"killed": ran})
            case "POST files/mkdir":
                path.mkdir(parents=True, exist_ok=True)
                self._send(200, {})
            case "PUT files/write":
                path.write_bytes(self._body)
                self._send(200, {})
            case "GET files/stat" | "GET files/read" if not path.exists():
                self._send(404, {"error": f"{path}: not found"})
            case "GET files/stat":
                kind = "dir" if path.is_dir() else "file"
                self._send(200, {"name": path.name, "path": str(path), "type": kind, "size": path.stat().st_size})
            case "GET files/read":
                self._send_bytes(200, path.read_bytes(), "application/octet-stream")
            case _:
                self._send(404, {"error": f"no route {route}"})

    def _popen(self, job: Job, *, output: int) -> subprocess.Popen[bytes]:
        asked = json.loads(self._body)
        line = asked["cmd"]
        return subprocess.Popen(
            ["/bin/sh", "-c", line] if isinstance(line, str) else line,
            env={**os.environ, **job.spec["environment"], **asked.get("env", {})},
            cwd=asked.get("cwd"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def _exec(self, job: Job) -> None:
        timeout = json.loads(self._body).get("timeout")
        process = self._popen(job, output=subprocess.PIPE)
        timed_out = False
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _kill(process)
            out, err = process.communicate()
        code = process.returncode
        events: list[dict[str, Any]] = [{"event": "ping"}]
        events += [{"event": "stdout", "data": out.decode()}] if out else []
        events += [{"event": "stderr", "data": err.decode()}] if err else []
        ended = {"exit_code": code} if code >= 0 else {"exit_code": None, "signal": -code}
        events.append({"event": "exit", **ended, "timed_out": timed_out, "duration_ms": 5})
        self._send_bytes(200, "".join(f"{json.dumps(event)}\n" for event in events).encode(), "application/x-ndjson")

    def _send(self, status: int, value: Any) -> None:
        self._send_bytes(status, json.dumps(value).encode(), "application/json")

    def _send_bytes(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _listed(name: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    code = process.poll()
    shown = None if code is None or code < 0 else code
    return {"id": name, "pid": process.pid, "cmd": "", "running": code is None, "exit_code": shown}


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
