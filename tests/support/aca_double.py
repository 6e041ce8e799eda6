"""A double of the data plane of Azure Container Apps sandboxes, over TLS, as its package insists. Runs a `Box` each."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from cloud_boxes import Box, Boxes

TOKEN = "eyJ-the-token-of-the-credential"
ACCOUNT = {"subscription_id": "sub", "resource_group": "rg", "sandbox_group": "sg"}


class Credential:
    """A credential whose token never changes."""

    def get_token(self, *scopes: str, **kwargs: Any) -> Any:
        """Return the token."""
        from azure.core.credentials import AccessToken

        return AccessToken(TOKEN, 1 << 40)


@dataclass
class Listed:
    """A sandbox as the service knows it."""

    box: Box
    request: dict[str, Any]


class ACADouble:
    """What answers in Azure's place."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.listed: dict[str, Listed] = {}
        self.fails: dict[str, str] = {}
        self.never_starts = False
        one = "/sandboxes/{id}"
        routes = [
            Route("/sandboxes", self.create, methods=["PUT"]),
            Route("/sandboxes", self.list, methods=["GET"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/executeShellCommand", self.execute, methods=["POST"]),
            Route(f"{one}/ports/add", self.add_port, methods=["POST"]),
        ]
        self.app = Starlette(routes=[Mount("/subscriptions/sub/resourceGroups/rg/sandboxGroups/sg", routes=routes)])

    def labels(self) -> list[dict[str, str]]:
        """The labels of each sandbox."""
        return [one.request["labels"] for one in self.listed.values()]

    async def create(self, request: Request) -> Response:
        """Start a sandbox."""
        if (refusal := self._refuse(request, "create")) is not None:
            return refusal
        wanted = await request.json()
        disk = wanted["sourcesRef"]["diskImage"]
        image = disk.get("name") or disk.get("id")
        if image not in self.boxes.images:
            return _error(400, f"The disk {image} does not exist")
        box = await asyncio.to_thread(self.boxes.open, image, wanted.get("environment") or {})
        name = secrets.token_hex(8)
        self.listed[name] = Listed(box, wanted)
        return JSONResponse(self._described(name))

    async def list(self, request: Request) -> Response:
        """List sandboxes with certain labels."""
        if (refusal := self._refuse(request, "list")) is not None:
            return refusal
        pairs = [one.split("=", 1) for one in request.query_params.get("labels", "").split(",") if one]
        wanted = {(name, value) for name, value in pairs}
        names = [name for name, one in self.listed.items() if wanted <= set(one.request["labels"].items())]
        return JSONResponse({"value": [self._described(name) for name in names]})

    async def get(self, request: Request) -> Response:
        """Describe a sandbox."""
        name = request.path_params["id"]
        return JSONResponse(self._described(name)) if name in self.listed else _error(404, "no such sandbox")

    async def delete(self, request: Request) -> Response:
        """End a sandbox."""
        if (refusal := self._refuse(request, "delete")) is not None:
            return refusal
        one = self.listed.pop(request.path_params["id"], None)
        if one is None:
            return _error(404, "no such sandbox")
        await asyncio.to_thread(one.box.close)
        return Response(status_code=202)

    async def execute(self, request: Request) -> Response:
        """Run a command."""
        if (refusal := self._refuse(request, "execute")) is not None:
            return refusal
        ran = await asyncio.to_thread(self.listed[request.path_params["id"]].box.run, (await request.json())["command"])
        texts = {"stdout": ran.stdout.decode("utf-8", "replace"), "stderr": ran.stderr.decode("utf-8", "replace")}
        return JSONResponse({"exitCode": ran.code, **texts})

    async def add_port(self, request: Request) -> Response:
        """Give a port an address."""
        if (refusal := self._refuse(request, "address")) is not None:
            return refusal
        wanted = await request.json()
        assert wanted == {"port": 8000, "auth": {"anonymous": True}}
        url = self.listed[request.path_params["id"]].box.end.url
        return JSONResponse({"ports": [{"port": wanted["port"], "url": url}]})

    def _refuse(self, request: Request, operation: str) -> Response | None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _error(401, "no such credential")
        return _error(400, self.fails[operation]) if operation in self.fails else None

    def _described(self, name: str) -> dict[str, Any]:
        request = self.listed[name].request
        state = "Creating" if self.never_starts else "Running"
        return {"id": name, "state": state, "labels": request.get("labels", {}), "sourcesRef": request["sourcesRef"]}


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"code": str(status), "message": message}}, status_code=status)
