"""A double of E2B on a loopback port: its control plane and, behind the same address, the `envd` of every sandbox.

The wire is the real one: the messages of envd's process service are the package's own, spoken by Connect's own server,
and files go through `/files` as multipart or octet stream. Commands run for real, in a container per sandbox. Requests
are kept, so that tests can look at what the package really sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.client_shared import ENVD_JSON_CODEC
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from openenv.sandboxes.base import SandboxSpec
from openenv.sandboxes.docker import DockerSandbox, DockerSandboxes

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
ENVD_VERSION = "0.6.7"
USER = "1000:1000"
Event = process_pb.ProcessEvent

# The first line is the pid inside, as envd reports it before anything else.
_RUN = 'printf "%d\\n" $$; cd "$1" || exit 1; shift; exec "$@"'


@dataclass
class Running:
    """A command under way."""

    process: asyncio.subprocess.Process
    pid: int
    config: process_pb.ProcessConfig


@dataclass
class Box:
    """One sandbox."""

    container: DockerSandbox
    token: str
    request: dict[str, Any]
    running: dict[int, Running] = field(default_factory=dict)


class E2BDouble:
    """What answers in E2B's place."""

    def __init__(self, containers: DockerSandboxes) -> None:
        self.containers = containers
        self.boxes: dict[str, Box] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        envd = process_connect.ProcessASGIApplication(ProcessService(self), codecs=[ENVD_JSON_CODEC])
        self.app = Starlette(
            routes=[
                Route("/v2/sandboxes", self.create, methods=["POST"]),
                Route("/v2/sandboxes", self.list_boxes, methods=["GET"]),
                Route("/sandboxes/{id}", self.delete, methods=["DELETE"]),
                Route("/health", lambda request: Response(status_code=204)),
                Route("/files", self.read_file, methods=["GET"]),
                Route("/files", self.write_file, methods=["POST"]),
                Mount("/", envd),
            ]
        )

    def asgi(self) -> ASGIApp:
        """Return the application with its doorkeeper in front."""
        return Doorkeeper(self, self.app)

    def close(self) -> None:
        """End every sandbox."""
        for box in self.boxes.values():
            box.container.close()

    def kwargs(self, url: str) -> dict[str, Any]:
        """Return what `Sandbox.create` needs to come here."""
        return {"api_url": url, "sandbox_url": url, "http_version": "1.1"}

    # The control plane

    async def create(self, request: Request) -> Response:
        """Start a sandbox."""
        arguments = await request.json()
        spec = SandboxSpec(timeout_s=arguments.get("timeout", 15), envs=arguments.get("envVars") or {})
        container = await asyncio.to_thread(self.containers.open, spec)
        name = f"i{secrets.token_hex(10)}"
        self.boxes[name] = Box(container, secrets.token_hex(16), arguments)
        answer = {
            "templateID": arguments["templateID"],
            "sandboxID": name,
            "clientID": "6532622b",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.boxes[name].token,
            "domain": None,
        }
        return JSONResponse(answer, status_code=201)

    async def list_boxes(self, request: Request) -> Response:
        """List sandboxes; the tests only ask whether it answers."""
        return JSONResponse([])

    async def delete(self, request: Request) -> Response:
        """End a sandbox."""
        box = self.boxes.pop(request.path_params["id"], None)
        if box is None:
            return JSONResponse({"code": 404, "message": "sandbox not found"}, status_code=404)
        await asyncio.to_thread(box.container.close)
        return Response(status_code=204)

    # envd's files

    async def read_file(self, request: Request) -> Response:
        """Send a file."""
        box, path = self.box(request.headers["e2b-sandbox-id"]), request.query_params["path"]
        process = await self.inside(box, "/bin/sh", "-c", '[ -f "$1" ] && exec cat "$1"; exit 9', "sh", path)
        assert process.stdout is not None
        first = await process.stdout.read(1 << 16)
        if not first and await process.wait() == 9:
            return JSONResponse({"code": 404, "message": f"path '{path}' does not exist"}, status_code=404)
        return StreamingResponse(_rest(first, process), media_type="application/octet-stream")

    async def write_file(self, request: Request) -> Response:
        """Take a file, as a form or as it is."""
        path = request.query_params["path"]
        script = 'mkdir -p "${1%/*}/" && cat >"$1"'
        process = await self.inside(self.box(request.headers["e2b-sandbox-id"]), "/bin/sh", "-c", script, "sh", path)
        assert process.stdin is not None
        if request.headers["content-type"].startswith("multipart/"):
            async with request.form() as form:
                process.stdin.write(await form["file"].read())  # type: ignore[union-attr]
        else:
            async for part in request.stream():
                process.stdin.write(part)
                await process.stdin.drain()
        process.stdin.close()
        if await process.wait() != 0:
            return JSONResponse({"code": 500, "message": "error writing file"}, status_code=500)
        return JSONResponse([{"name": path.rpartition("/")[2], "type": "file", "path": path}])

    def box(self, name: str) -> Box:
        """Return a sandbox."""
        return self.boxes[name]

    async def inside(self, box: Box, *argv: str, envs: dict[str, str] | None = None) -> asyncio.subprocess.Process:
        """Run something in a sandbox's container."""
        engine = box.container._engine
        settings = [word for name, value in (envs or {}).items() for word in ("--env", f"{name}={value}")]
        command = engine.argv("exec", "-i", "--user", USER, *settings, box.container.sandbox_id, *argv)
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 20)


class Doorkeeper:
    """Answers for the load balancer: unknown keys, and sandboxes that are not there any more."""

    def __init__(self, double: E2BDouble, app: ASGIApp) -> None:
        self._double = double
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._double.requests.append((scope["method"], scope["path"], headers))
        answer = await asyncio.to_thread(self._refuse, scope["path"], headers)
        return await (answer or self._app)(scope, receive, send)

    def _refuse(self, path: str, headers: dict[str, str]) -> Response | None:
        if path.startswith(("/sandboxes", "/v2")):
            if headers.get("x-api-key") == KEY:
                return None
            return JSONResponse({"code": 401, "message": "Invalid API key"}, status_code=401)
        name = headers.get("e2b-sandbox-id", "")
        box = self._double.boxes.get(name)
        costly = path.endswith(("/SendInput", "/CloseStdin"))  # a command that is gone with its sandbox is not found
        if box is None or (not costly and box.container._why_gone() is not None):
            body = {"sandboxId": name, "message": "The sandbox was not found", "code": 502}
            return JSONResponse(body, status_code=502)
        if headers.get("x-access-token") != box.token:
            return JSONResponse({"code": 401, "message": "unauthenticated"}, status_code=401)
        return None


class ProcessService:
    """envd's process service."""

    def __init__(self, double: E2BDouble) -> None:
        self._double = double

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        """Start a command and stream its events."""
        box = self._box(ctx)
        config = request.process
        wants_input = request.stdin if request.has_field("stdin") else True
        envs = {**box.container.spec.envs, **dict(config.envs)}
        cwd = config.cwd or "/home/user"
        process = await self._double.inside(box, "/bin/sh", "-c", _RUN, "sh", cwd, config.cmd, *config.args, envs=envs)
        assert process.stdout is not None
        assert process.stdin is not None
        if not wants_input:
            process.stdin.close()
        line = await process.stdout.readline()
        if not line:
            raise ConnectError(Code.UNAVAILABLE, "the connection to sandbox ended before the stream completed")
        running = box.running[int(line)] = Running(process, int(line), config)
        yield _response(Oneof("start", Event.StartEvent(pid=running.pid)))
        try:
            async for name, data in _output(process):
                yield _response(Oneof("data", Event.DataEvent(output=Oneof(name, data))))
            code = await process.wait()
        finally:
            box.running.pop(running.pid, None)
            # Kills the command if the client has left. Its children may hold the pipes for longer than the loop runs.
            process._transport.close()  # type: ignore[attr-defined]
        if await asyncio.to_thread(box.container._why_gone) is not None:
            raise ConnectError(Code.UNAVAILABLE, "the connection to sandbox ended before the stream completed")
        yield _response(Oneof("end", _end(code)))

    async def send_input(self, request: Any, ctx: Any) -> Any:
        """Write to a command's standard input."""
        process = self._running(request, ctx).process
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(request.input.input.value)
            await process.stdin.drain()
        return process_pb.SendInputResponse()

    async def close_stdin(self, request: Any, ctx: Any) -> Any:
        """Close a command's standard input."""
        process = self._running(request, ctx).process
        assert process.stdin is not None
        process.stdin.close()
        return process_pb.CloseStdinResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        """Signal a command."""
        running = self._running(request, ctx)
        number = "-KILL" if request.signal == process_pb.Signal.SIGKILL else "-TERM"
        process = await self._double.inside(self._box(ctx), "kill", number, str(running.pid))
        await process.wait()
        return process_pb.SendSignalResponse()

    async def list(self, request: Any, ctx: Any) -> Any:
        """List the commands under way."""
        running = self._box(ctx).running.values()
        return process_pb.ListResponse(
            processes=[process_pb.ProcessInfo(pid=one.pid, config=one.config) for one in running]
        )

    def connect(self, request: Any, ctx: Any) -> Any:
        """Not needed."""
        raise ConnectError(Code.UNIMPLEMENTED, "connect")

    async def update(self, request: Any, ctx: Any) -> Any:
        """Not needed."""
        raise ConnectError(Code.UNIMPLEMENTED, "update")

    async def stream_input(self, request: Any, ctx: Any) -> Any:
        """Not needed."""
        raise ConnectError(Code.UNIMPLEMENTED, "stream_input")

    def _box(self, ctx: Any) -> Box:
        return self._double.box(ctx.request_headers["e2b-sandbox-id"])

    def _running(self, request: Any, ctx: Any) -> Running:
        pid = request.process.selector.value
        try:
            return self._box(ctx).running[pid]
        except KeyError:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {pid} not found") from None


async def _rest(first: bytes, process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    yield first
    while data := await process.stdout.read(1 << 16):
        yield data
    await process.wait()


async def _output(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[Any, bytes]]:
    """Yield what comes on both streams, in the order in which it comes."""
    events: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(maxsize=16)

    async def follow(name: str, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 15):
            await events.put((name, data))
        await events.put((name, b""))

    assert process.stdout is not None
    assert process.stderr is not None
    tasks = [
        asyncio.create_task(follow("stdout", process.stdout)),
        asyncio.create_task(follow("stderr", process.stderr)),
    ]
    try:
        left = 2
        while left:
            name, data = await events.get()
            if data:
                yield name, data
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()


def _response(event: Any) -> Any:
    return process_pb.StartResponse(event=Event(event=event))


def _end(code: int) -> Any:
    if code > 128:
        return Event.EndEvent(exit_code=-1, exited=False, status="signal: killed", error="signal: killed")
    error = None if code == 0 else f"exit status {code}"
    return Event.EndEvent(exit_code=code, exited=True, status=f"exit status {code}", error=error)


def sent_bodies(double: E2BDouble) -> Iterator[str]:
    """Yield the requests for sandboxes, as text."""
    for box in double.boxes.values():
        yield json.dumps(box.request)
