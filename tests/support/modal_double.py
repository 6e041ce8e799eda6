"""A double of Modal: the gRPC service of its API, and that which runs commands in a sandbox. Runs a `Box` each."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2, task_command_router_grpc
from modal_proto import task_command_router_pb2 as router_pb2

from cloud_boxes import Box, Boxes, Ran

TOKEN_ID, TOKEN_SECRET = "ak-0123456789abcdef", "as-0123456789abcdef"

CLAIMS = base64.urlsafe_b64encode(b'{"exp": 99999999999}').decode()
JWT = f"h.{CLAIMS}.s"


@dataclass
class Listed:
    """A sandbox as the API knows it."""

    box: Box
    request: Any
    tags: dict[str, str] = field(default_factory=dict)


class ModalDouble:
    """What answers in Modal's place."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.url = ""
        self.listed: dict[str, Listed] = {}
        self.images: dict[str, str] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.commands: dict[str, Ran] = {}
        self.fails: dict[str, str] = {}
        self.never_starts = False
        self.calls: list[str] = []

    def labels(self) -> list[dict[str, str]]:
        """The tags of each sandbox."""
        return [one.tags for one in self.listed.values()]

    def fail(self, operation: str) -> None:
        """Raise where a test wants an operation to fail."""
        if operation in self.fails:
            raise GRPCError(Status.INVALID_ARGUMENT, self.fails[operation])

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Serve both services on a free port."""
        loop = asyncio.new_event_loop()
        started = threading.Event()

        async def serve() -> None:
            server = Server(
                [
                    _service(api_grpc.ModalClientBase, ModalApi(self)),
                    _service(task_command_router_grpc.TaskCommandRouterBase, CommandRouter(self)),
                ]
            )
            await server.start("127.0.0.1", 0)
            (listening,) = server._server.sockets  # type: ignore[union-attr]
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                server.close()

        task = loop.create_task(serve())

        def run() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)

        thread = threading.Thread(target=run, name="modal-double", daemon=True)
        thread.start()
        assert started.wait(20)
        try:
            yield self.url
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(20)
            loop.close()


def _service(base: type, handlers: Any) -> Any:
    """Return a service whose calls go to the methods of `handlers`; those it does not have are refused."""

    def method(name: str) -> Any:
        async def call(self: Any, stream: Any) -> None:
            handlers.double.calls.append(name)
            handler = getattr(handlers, name, None) or getattr(handlers, name.removesuffix("V2"), None)
            if handler is None:
                raise GRPCError(Status.UNIMPLEMENTED, name)
            request = await stream.recv_message()
            answer = handler(request)
            if hasattr(answer, "__aiter__"):
                async for message in answer:
                    await stream.send_message(message)
            else:
                await stream.send_message(await answer)

        return call

    methods = {name: method(name) for name in base.__abstractmethods__}  # type: ignore[attr-defined]
    return type(base.__name__, (base,), methods)()


class ModalApi:
    """The calls of the API that a sandbox needs."""

    def __init__(self, double: ModalDouble) -> None:
        self.double = double

    async def ClientHello(self, request: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    async def AuthTokenGet(self, request: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=JWT)

    async def AppGetOrCreate(self, request: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def ImageGetOrCreate(self, request: Any) -> Any:
        text = "\n".join(request.image.dockerfile_commands)
        name = re.search(r"FROM (?:.*/)?([\w-]+)", text)
        assert name is not None, text
        image_id = f"im-{secrets.token_hex(4)}"
        self.double.images[image_id] = name[1]
        status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=api_pb2.GenericResult(status=status))

    async def SecretGetOrCreate(self, request: Any) -> Any:
        secret_id = f"st-{secrets.token_hex(4)}"
        self.double.secrets[secret_id] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret_id)

    async def SandboxCreate(self, request: Any) -> Any:
        self.double.fail("create")
        definition = request.definition
        image = self.double.images[definition.image_id]
        if image not in self.double.boxes.images:
            raise GRPCError(Status.NOT_FOUND, f"image {image} does not exist")
        assert [port.port for port in definition.open_ports.ports] == [8000]
        env: dict[str, str] = {}
        for secret_id in definition.secret_ids:
            env |= self.double.secrets[secret_id]
        for source in getattr(request, "secret_sources", ()):
            env |= dict(source.env.contents)
        box = await asyncio.to_thread(self.double.boxes.open, image, env)
        name = f"sb-{secrets.token_hex(8)}"
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.double.listed[name] = Listed(box, request, tags)
        is_second = isinstance(request, api_pb2.SandboxCreateV2Request)
        return (api_pb2.SandboxCreateV2Response if is_second else api_pb2.SandboxCreateResponse)(sandbox_id=name)

    async def SandboxTagsSet(self, request: Any) -> Any:
        self.double.listed[request.sandbox_id].tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return api_pb2.google_dot_protobuf_dot_empty__pb2.Empty()

    async def SandboxTagsGet(self, request: Any) -> Any:
        return api_pb2.SandboxTagsGetResponse(tags=_tags(self.double.listed[request.sandbox_id].tags))

    async def SandboxList(self, request: Any) -> Any:
        self.double.fail("list")
        if request.before_timestamp:
            return api_pb2.SandboxListResponse()
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        names = [name for name, one in self.double.listed.items() if wanted <= set(one.tags.items())]
        return api_pb2.SandboxListResponse(sandboxes=[api_pb2.SandboxInfo(id=name, created_at=1.0) for name in names])

    async def SandboxGetTaskId(self, request: Any) -> Any:
        if self.double.never_starts:
            status = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
            result = api_pb2.GenericResult(status=status, exception="no machine is free")
            return api_pb2.SandboxGetTaskIdResponse(task_result=result)
        return api_pb2.SandboxGetTaskIdResponse(task_id=request.sandbox_id.replace("sb-", "ta-"))

    async def TaskGetCommandRouterAccess(self, request: Any) -> Any:
        return api_pb2.TaskGetCommandRouterAccessResponse(url=self.double.url, jwt=JWT)

    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self.double.url, jwt=JWT)

    async def SandboxGetTunnels(self, request: Any) -> Any:
        self.double.fail("address")
        port = self.double.listed[request.sandbox_id].box.end.port
        status = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        tunnel = api_pb2.TunnelData(host="localhost", port=port, container_port=8000)
        return api_pb2.SandboxGetTunnelsResponse(result=api_pb2.GenericResult(status=status), tunnels=[tunnel])

    async def SandboxTerminate(self, request: Any) -> Any:
        self.double.fail("delete")
        one = self.double.listed.pop(request.sandbox_id, None)
        if one is None:
            raise GRPCError(Status.NOT_FOUND, "Sandbox not found")
        await asyncio.to_thread(one.box.close)
        return api_pb2.SandboxTerminateResponse()


class CommandRouter:
    """The calls that run a command."""

    def __init__(self, double: ModalDouble) -> None:
        self.double = double

    async def TaskExecStart(self, request: Any) -> Any:
        self.double.fail("execute")
        box = self.double.listed[request.task_id.replace("ta-", "sb-")].box
        self.double.commands[request.exec_id] = await asyncio.to_thread(
            box.run, list(request.command_args), timeout_s=request.timeout_secs or None
        )
        return router_pb2.TaskExecStartResponse()

    async def TaskExecStdioRead(self, request: Any) -> Any:
        ran = self.double.commands[request.exec_id]
        is_out = request.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        data = (ran.stdout if is_out else ran.stderr)[request.offset :]
        if data:
            yield router_pb2.TaskExecStdioReadResponse(data=data)

    async def TaskExecWait(self, request: Any) -> Any:
        return router_pb2.TaskExecWaitResponse(code=self.double.commands[request.exec_id].code)

    async def TaskExecPoll(self, request: Any) -> Any:
        return router_pb2.TaskExecPollResponse(code=self.double.commands[request.exec_id].code)


def _tags(values: dict[str, str]) -> list[Any]:
    return [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in values.items()]
