"""A double of Novita: its API, and behind each sandbox's names the daemon `envd` and port 8000. Runs a `Box` each."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import ssl
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cloud_boxes import Box, Boxes, TlsEnd, reply, splice

KEY = "sk_0123456789abcdef0123456789abcdef"


@dataclass
class Listed:
    """A sandbox as the API knows it."""

    box: Box
    end: EnvdEnd
    request: dict[str, Any]


class EnvdEnd(TlsEnd):
    """What the names of one sandbox lead to: `49983-ID.` to envd, `8000-ID.` to the server."""

    def __init__(self, box: Box, token: str, double: NovitaDouble, tls: ssl.SSLContext) -> None:
        self._box = box
        self._token = token
        self._double = double
        self.users: list[str] = []
        super().__init__(box.end.target, tls)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        fields = dict(re.findall(r"\r\n([^:\r]+): ?([^\r]*)", head.decode("latin-1").lower()))
        if fields["host"].startswith("8000-"):
            await splice(reader, writer, self.target, first=head)
            return
        body = await _read_body(reader, fields)
        if fields.get("x-access-token") != self._token:
            await reply(writer, 401, b"unauthenticated")
        elif b"/process.Process/Start " not in head:
            await reply(writer, 404, b"no such call")
        elif "execute" in self._double.fails:
            error = {"error": {"code": "internal", "message": self._double.fails["execute"]}}
            await reply(writer, 200, _enveloped(error, last=True), kind="application/connect+json")
        else:
            user = re.match(r"basic (\S+)", fields.get("authorization", ""))
            self.users.append("" if user is None else user[1])
            await reply(writer, 200, await self._start(json.loads(body[5:])), kind="application/connect+json")

    async def _start(self, request: dict[str, Any]) -> bytes:
        wanted = request["process"]
        assert wanted["args"][:2] == ["-l", "-c"]
        argv = [wanted["cmd"], *wanted["args"][1:]]  # the profile here is this machine's, not the image's
        ran = await asyncio.to_thread(self._box.run, argv, env=wanted.get("envs"), timeout_s=60)
        texts = {"stdout": ran.stdout, "stderr": ran.stderr}
        events: list[dict[str, Any]] = [{"start": {"pid": 7}}]
        events += [{"data": {name: base64.b64encode(text).decode()}} for name, text in texts.items() if text]
        events.append({"end": {"exitCode": ran.code, "exited": True, "status": f"exit status {ran.code}"}})
        return b"".join(_enveloped({"event": event}) for event in events) + _enveloped({}, last=True)


async def _read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if "content-length" in fields:
        return await reader.readexactly(int(fields["content-length"]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    return body


def _enveloped(message: dict[str, Any], *, last: bool = False) -> bytes:
    """Return a message in the envelope of the Connect protocol."""
    data = json.dumps(message).encode()
    return bytes([2 if last else 0]) + len(data).to_bytes(4, "big") + data


class NovitaDouble:
    """What answers in Novita's place."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.listed: dict[str, Listed] = {}
        self.builds: dict[str, dict[str, Any]] = {}
        self.fails: dict[str, str] = {}
        self.never_starts = False
        build = "/templates/{template}/builds/{build}"
        self.app = Starlette(
            routes=[
                Route("/sandboxes", self.create, methods=["POST"]),
                Route("/v2/sandboxes", self.list, methods=["GET"]),
                Route("/sandboxes/{id}", self.delete, methods=["DELETE"]),
                Route("/templates/aliases/{alias}", self.alias, methods=["GET"]),
                Route("/v3/templates", self.request_build, methods=["POST"]),
                Route(f"/v2{build}", self.start_build, methods=["POST"]),
                Route(f"{build}/status", self.build_status, methods=["GET"]),
                Route("/templates/{template}/files/{hash}", self.file_link, methods=["GET"]),
            ]
        )

    def labels(self) -> list[dict[str, str]]:
        """The labels of each sandbox."""
        return [one.request["metadata"] for one in self.listed.values()]

    async def create(self, request: Request) -> Response:
        """Start a sandbox."""
        if (refusal := self._refuse(request, "create")) is not None:
            return refusal
        wanted = await request.json()
        if self.never_starts:
            return JSONResponse({"code": 500, "message": "no machine is free"}, status_code=500)
        template = wanted["templateID"]
        image = next((name for name in self.boxes.images if f"-{name}-" in template or name == template), "")
        if template in self.builds:
            image = self.builds[template]["fromImage"]
        if not image:
            return JSONResponse({"code": 400, "message": f"template {template} not found"}, status_code=400)
        box = await asyncio.to_thread(self.boxes.open, image, wanted.get("envVars") or {})
        name, token = f"i{secrets.token_hex(8)}", secrets.token_hex(16)
        self.listed[name] = Listed(box, EnvdEnd(box, token, self, self.boxes.tls), wanted)
        answer = {
            "templateID": template,
            "sandboxID": name,
            "clientID": "c",
            "envdVersion": "0.5.0",
            "envdAccessToken": token,
            "domain": f"cloud.localhost:{self.listed[name].end.port}",
        }
        return JSONResponse(answer, status_code=201)

    async def list(self, request: Request) -> Response:
        """List sandboxes with certain metadata."""
        if (refusal := self._refuse(request, "list")) is not None:
            return refusal
        wanted = set(parse_qsl(request.query_params.get("metadata", "")))
        now = datetime.now(timezone.utc)
        items = [
            {
                "sandboxID": name,
                "templateID": one.request["templateID"],
                "clientID": "c",
                "metadata": one.request["metadata"],
                "startedAt": now.isoformat(),
                "endAt": (now + timedelta(hours=1)).isoformat(),
                "state": "running",
                "cpuCount": 1,
                "memoryMB": 512,
                "diskSizeMB": 512,
                "envdVersion": "0.5.0",
            }
            for name, one in self.listed.items()
            if wanted <= set(one.request["metadata"].items())
        ]
        return JSONResponse(items)

    async def delete(self, request: Request) -> Response:
        """End a sandbox."""
        if (refusal := self._refuse(request, "delete")) is not None:
            return refusal
        one = self.listed.pop(request.path_params["id"], None)
        if one is None:
            return JSONResponse({"code": 404, "message": "not found"}, status_code=404)
        await asyncio.to_thread(one.end.close)
        await asyncio.to_thread(one.box.close)
        return Response(status_code=204)

    # Templates

    async def alias(self, request: Request) -> Response:
        """Say that an image has been made into a template before."""
        alias = request.path_params["alias"]
        return JSONResponse({"templateID": alias, "public": False})

    async def request_build(self, request: Request) -> Response:
        """Name a new template."""
        wanted = await request.json()
        name = f"t{secrets.token_hex(4)}"
        self.builds[name] = {"request": wanted}
        answer = {"templateID": name, "buildID": "b1", "public": False, "aliases": [], "names": [], "tags": []}
        return JSONResponse(answer, status_code=202)

    async def start_build(self, request: Request) -> Response:
        """Take the steps of a build."""
        self.builds[request.path_params["template"]] |= await request.json()
        return Response(status_code=202)

    async def build_status(self, request: Request) -> Response:
        """Say that a build is done."""
        name = request.path_params["template"]
        return JSONResponse({"templateID": name, "buildID": "b1", "status": "ready", "logs": [], "logEntries": []})

    async def file_link(self, request: Request) -> Response:
        """Say that the files are there."""
        return JSONResponse({"present": True}, status_code=201)

    def _refuse(self, request: Request, operation: str) -> Response | None:
        if KEY not in request.headers.values() and request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"code": 401, "message": "Invalid API key"}, status_code=401)
        if operation in self.fails:
            return JSONResponse({"code": 400, "message": self.fails[operation]}, status_code=400)
        return None
