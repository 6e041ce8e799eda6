"""A double of the Hub's Jobs and of the sandbox server in each, which proxies to port 8000. Runs a `Box` each."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cloud_boxes import Box, Boxes, TlsEnd, reply, splice

TOKEN = "hf_0123456789abcdefghijklmnopqrstuvwx"


@dataclass
class Job:
    """A job that runs a sandbox server."""

    box: Box
    end: SandboxEnd
    request: dict[str, Any]
    stage: str = "RUNNING"


class SandboxEnd(TlsEnd):
    """What the Jobs proxy and the sandbox server answer, for one job."""

    def __init__(self, box: Box, sandbox_token: str, double: HubJobsDouble, tls: ssl.SSLContext) -> None:
        self._box = box
        self._token = sandbox_token
        self._double = double
        super().__init__(box.end.target, tls)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1])) if length else b""
        path = head.split(" ", 2)[1]
        wanted = (f"authorization: bearer {TOKEN}", f"x-sandbox-token: {self._token}")
        if not all(header.lower() in head.lower() for header in wanted):
            await _reply(writer, 401, {"error": "unauthorized"})
        elif path == "/health":
            await _reply(writer, 503 if self._double.never_starts else 200, {"protocol": 3})
        elif path == "/v1/exec":
            await self._execute(writer, json.loads(body))
        elif path.startswith("/v1/proxy/8000/"):
            if "address" in self._double.fails:
                await _reply(writer, 502, {"error": self._double.fails["address"]})
                return
            head = head.replace("/v1/proxy/8000", "", 1)
            if "upgrade:" not in head.lower():
                head = re.sub(r"\r\nconnection:[^\r]*", "", head, flags=re.IGNORECASE)
                head = head.replace("\r\n", "\r\nConnection: close\r\n", 1)
            await splice(reader, writer, self.target, first=head.encode("latin-1") + body)
        else:
            await _reply(writer, 404, {"error": f"no route {path}"})

    async def _execute(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        if "execute" in self._double.fails:
            await _reply(writer, 500, {"error": self._double.fails["execute"]})
            return
        ran = await asyncio.to_thread(self._box.run, request["cmd"], timeout_s=request.get("timeout"))
        events = [
            {"event": "stdout", "data": ran.stdout.decode("utf-8", "replace")},
            {"event": "stderr", "data": ran.stderr.decode("utf-8", "replace")},
            {"event": "exit", "exit_code": ran.code, "timed_out": ran.timed_out},
        ]
        await _reply(writer, 200, "".join(json.dumps(event) + "\n" for event in events))


async def _reply(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    await reply(writer, status, (content if isinstance(content, str) else json.dumps(content)).encode())


class HubJobsDouble:
    """What answers in the Hub's place."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.jobs: dict[str, Job] = {}
        self.fails: dict[str, str] = {}
        self.never_starts = False
        self.app = Starlette(
            routes=[
                Route("/api/whoami-v2", self.who, methods=["GET"]),
                Route("/api/jobs/me", self.create, methods=["POST"]),
                Route("/api/jobs/me", self.list, methods=["GET"]),
                Route("/api/jobs/me/{id}", self.get, methods=["GET"]),
                Route("/api/jobs/me/{id}/cancel", self.cancel, methods=["POST"]),
            ]
        )

    def labels(self) -> list[dict[str, str]]:
        """The labels of each job that runs."""
        return [job.request["labels"] for job in self.jobs.values() if job.stage == "RUNNING"]

    async def who(self, request: Request) -> Response:
        """Name the account."""
        return JSONResponse({"name": "me", "id": "1", "type": "user"})

    async def create(self, request: Request) -> Response:
        """Start a job."""
        if (refusal := self._refuse(request, "create")) is not None:
            return refusal
        wanted = await request.json()
        image = wanted.get("dockerImage") or wanted["spaceId"]
        if image not in self.boxes.images:
            return JSONResponse({"error": f"image {image} does not exist"}, status_code=400)
        hidden = dict(wanted["secrets"])
        token = hidden.pop("SBX_TOKEN")
        box = await asyncio.to_thread(self.boxes.open, image, hidden)
        name = secrets.token_hex(12)
        self.jobs[name] = Job(box, SandboxEnd(box, token, self, self.boxes.tls), wanted)
        return JSONResponse(self._described(name))

    async def list(self, request: Request) -> Response:
        """List jobs with certain labels."""
        if (refusal := self._refuse(request, "list")) is not None:
            return refusal
        wanted = {tuple(pair.split("=", 1)) for pair in request.query_params.getlist("label")}
        names = [name for name, job in self.jobs.items() if wanted <= set(job.request["labels"].items())]
        return JSONResponse([self._described(name) for name in names])

    async def get(self, request: Request) -> Response:
        """Describe a job."""
        return JSONResponse(self._described(request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        """End a job."""
        if (refusal := self._refuse(request, "delete")) is not None:
            return refusal
        job = self.jobs.get(request.path_params["id"])
        if job is None:
            return JSONResponse({"error": "no such job"}, status_code=404)
        await asyncio.to_thread(job.end.close)
        await asyncio.to_thread(job.box.close)
        job.stage = "CANCELED"
        return JSONResponse({})

    def _refuse(self, request: Request, operation: str) -> Response | None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"error": "Invalid user token."}, status_code=401)
        if operation in self.fails:
            return JSONResponse({"error": self.fails[operation]}, status_code=400)
        return None

    def _described(self, name: str) -> dict[str, Any]:
        job = self.jobs[name]
        url = f"https://{name}--49983.cloud.localhost:{job.end.port}"
        return {
            "id": name,
            "createdAt": datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"),
            "dockerImage": job.request.get("dockerImage"),
            "owner": {"id": "1", "name": "me", "type": "user"},
            "labels": job.request["labels"],
            "status": {"stage": job.stage, "exposeUrls": [url]},
        }
