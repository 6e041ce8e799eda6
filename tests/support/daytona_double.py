"""A double of Daytona: its API and, behind `/toolbox`, the daemon of every sandbox. Commands run in a `Box`."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cloud_boxes import Box, Boxes, Ran

KEY = "dtn_0123456789abcdef0123456789abcdef"


@dataclass
class Listed:
    """A sandbox as the API knows it."""

    box: Box
    request: dict[str, Any]
    state: str = "started"


class DaytonaDouble:
    """What answers in Daytona's place; `snapshots` names folders of images."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.listed: dict[str, Listed] = {}
        self.url = ""
        self.fails: dict[str, str] = {}
        """Operations that answer with an error: its text."""
        self.never_starts = False
        self.requests: list[tuple[str, str]] = []
        self.as_user = False
        """Whether commands run as a user that is not root."""
        self._threads = ThreadPoolExecutor(256)
        self.app = Starlette(
            routes=[
                Route("/api/sandbox", self.create, methods=["POST"]),
                Route("/api/sandbox", self.list, methods=["GET"]),
                Route("/api/sandbox/{id}", self.get, methods=["GET"]),
                Route("/api/sandbox/{id}", self.delete, methods=["DELETE"]),
                Route("/api/sandbox/{id}/ports/{port:int}/signed-preview-url", self.preview, methods=["GET"]),
                Route("/toolbox/{id}/process/execute", self.execute, methods=["POST"]),
                Route("/toolbox/{id}/files/bulk-upload", self.upload, methods=["POST"]),
                Route("/toolbox/{id}/files/bulk-download", self.download, methods=["POST"]),
            ],
        )

    def labels(self) -> list[dict[str, str]]:
        """The labels of each sandbox."""
        return [one.request["labels"] for one in self.listed.values()]

    async def create(self, request: Request) -> Response:
        """Start a sandbox."""
        if (refusal := self._refuse(request, "create")) is not None:
            return refusal
        wanted = await request.json()
        image = wanted.get("snapshot") or "empty"
        if wanted.get("buildInfo"):
            image = re.match(r"FROM (\S+)", wanted["buildInfo"]["dockerfileContent"])[1]  # type: ignore[index]
        if image not in self.boxes.images:
            return JSONResponse({"statusCode": 400, "message": f"Snapshot {image} not found"}, status_code=400)
        box = await asyncio.to_thread(self.boxes.open, image, wanted.get("env") or {})
        name = f"{secrets.token_hex(4)}-{secrets.token_hex(6)}"
        self.listed[name] = Listed(box, wanted, "starting" if self.never_starts else "started")
        return JSONResponse(self._described(name))

    async def list(self, request: Request) -> Response:
        """List sandboxes, those with certain labels if any are asked for."""
        if (refusal := self._refuse(request, "list")) is not None:
            return refusal
        labels = json.loads(request.query_params.get("labels") or "{}")
        names = [name for name, one in self.listed.items() if labels.items() <= (one.request["labels"] or {}).items()]
        return JSONResponse(
            {"items": [self._described(name) for name in names], "total": len(names), "nextCursor": None}
        )

    async def get(self, request: Request) -> Response:
        """Describe a sandbox."""
        if request.path_params["id"] not in self.listed:
            return _missing()
        return JSONResponse(self._described(request.path_params["id"]))

    async def delete(self, request: Request) -> Response:
        """End a sandbox."""
        if (refusal := self._refuse(request, "delete")) is not None:
            return refusal
        one = self.listed.pop(request.path_params["id"], None)
        if one is None:
            return _missing()
        await asyncio.to_thread(one.box.close)
        one.state = "destroyed"
        return JSONResponse(self._described(request.path_params["id"], one))

    async def preview(self, request: Request) -> Response:
        """Sign an address."""
        if (refusal := self._refuse(request, "address")) is not None:
            return refusal
        one = self.listed[request.path_params["id"]]
        token = secrets.token_hex(8)
        url = f"{one.box.end.url}/"
        port = request.path_params["port"]
        return JSONResponse({"sandboxId": request.path_params["id"], "port": port, "token": token, "url": url})

    async def execute(self, request: Request) -> Response:
        """Run a command."""
        if (refusal := self._refuse(request, "execute")) is not None:
            return refusal
        one = self.listed.get(request.path_params["id"])
        if one is None:
            return _missing()
        wanted = await request.json()
        try:
            ran = await self._run(
                one, wanted["command"], env=wanted.get("envs"), cwd=wanted.get("cwd"), timeout_s=wanted.get("timeout")
            )
        except OSError:
            return _missing()
        if ran.timed_out:
            return JSONResponse({"statusCode": 408, "message": "command execution timeout"}, status_code=408)
        return JSONResponse({"exitCode": ran.code, "result": (ran.stdout + ran.stderr).decode("utf-8", "replace")})

    async def upload(self, request: Request) -> Response:
        """Take a file."""
        one = self.listed.get(request.path_params["id"])
        if one is None:
            return _missing()
        async with request.form() as form:
            path, data = str(form["files[0].path"]), await form["files[0].file"].read()  # type: ignore[union-attr]
        ran = await self._run(one, ["/bin/sh", "-c", 'cat >"$0"', path], stdin=data)
        return JSONResponse({}) if ran.code == 0 else JSONResponse({"errors": [ran.stderr.decode()]}, status_code=400)

    async def download(self, request: Request) -> Response:
        """Send a file, as the part of a form."""
        one = self.listed.get(request.path_params["id"])
        if one is None:
            return _missing()
        (path,) = (await request.json())["paths"]
        ran = await self._run(one, ["cat", path])
        name, data = ("file", ran.stdout) if ran.code == 0 else ("error", ran.stderr)
        head = f'--edge\r\nContent-Disposition: form-data; name="{name}"; filename="{path}"\r\n\r\n'
        body = head.encode() + data + b"\r\n--edge--\r\n"
        return Response(body, media_type="multipart/form-data; boundary=edge")

    async def _run(self, one: Listed, command: Any, **options: Any) -> Ran:
        # Not the loop's own threads, which are few: many calls wait for output at the same time.
        call = partial(one.box.run, command, as_user=self.as_user, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _refuse(self, request: Request, operation: str) -> Response | None:
        self.requests.append((request.method, request.url.path))
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"statusCode": 401, "message": "Invalid credentials"}, status_code=401)
        if operation in self.fails:
            return JSONResponse({"statusCode": 500, "message": self.fails[operation]}, status_code=500)
        return None

    def _described(self, name: str, one: Listed | None = None) -> dict[str, Any]:
        one = one or self.listed[name]
        return {
            "id": name,
            "organizationId": "o",
            "name": name,
            "snapshot": one.request.get("snapshot"),
            "user": "daytona",
            "env": one.request.get("env") or {},
            "labels": one.request.get("labels") or {},
            "public": bool(one.request.get("public")),
            "networkBlockAll": bool(one.request.get("networkBlockAll")),
            "kvm": False,
            "target": "us",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": one.state,
            "createdAt": datetime.now(timezone.utc).isoformat(),
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }


def _missing() -> Response:
    return JSONResponse({"statusCode": 404, "message": "Sandbox not found"}, status_code=404)
