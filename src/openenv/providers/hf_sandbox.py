"""Servers in Hugging Face sandboxes: `HFSandboxProvider`, through `huggingface_hub`, and the proxy in front of it.

    client ──> http://127.0.0.1:N/SECRET ──> AuthProxy, a thread ──https, with the token──> the sandbox ──> port 8000

The Hub lets a request in only with two headers, which clients do not know: the proxy adds them. The random first part
of its path keeps other users of this machine out.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import Self

from openenv.errors import ProviderUnavailable, install_command
from openenv.protocol.backoff import Backoff
from openenv.providers.cloud import (
    PORT,
    START_LABEL,
    CloudProvider,
    CloudSandbox,
    StartPlan,
    import_package,
    require_https,
)
from openenv.sandboxes.host import CLOUD_OWNER_LABEL, ProcessOwner
from openenv.server.thread_server import ThreadServer

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import Sandbox

Message: TypeAlias = "dict[str, Any]"
Scope: TypeAlias = "dict[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[Message]]"
Send: TypeAlias = "Callable[[Message], Awaitable[None]]"
_OWN_COMMAND = "server"
_START_S = 300.0
_ACTIVE = ("RUNNING", "SCHEDULING", "UPDATING")
_TRIES = 5
_PAUSES = Backoff(first_pause_s=0.5, longest_pause_s=1.0)
_ANSWER_S = 300.0
_HOP_BY_HOP = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    }
)
_HANDSHAKE = _HOP_BY_HOP | {
    *("sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"),
}


class HFSandboxProvider(CloudProvider["Sandbox"]):
    """Starts a server in a Hugging Face sandbox and returns the address of a local proxy to it.

    A sandbox is one Hugging Face Job, which the account pays for until it is stopped. The image should have a command
    `server`, as images of environments do; without one, `openenv.yaml` under /app names the application.

    Args:
        image: The image to start, such as `hf.co/spaces/openenv/echo_env`.
        env_vars: The default variables of the server; the Hub keeps them as secrets.
        flavor: The hardware.

    Raises:
        ProviderUnavailable: `huggingface_hub` is not installed, or too old to have sandboxes.
    """

    _cloud = "Hugging Face"
    _place = "huggingface"

    def __init__(self, *, image: str, env_vars: dict[str, str] | None = None, flavor: str = "cpu-basic") -> None:
        super().__init__(image=image, env_vars=env_vars, cmd=None)
        self.image = image
        self.flavor = flavor
        self._sdk: Any = import_package("huggingface_hub", "hub")
        if not hasattr(self._sdk, "Sandbox"):
            raise ProviderUnavailable(
                f"huggingface_hub {self._sdk.__version__} has no sandboxes. Install a newer one: "
                f"{install_command('hub').replace('install', 'install -U', 1)}"
            )
        self._api = self._sdk.HfApi()
        self._redact.add(self._sdk.get_token())
        self._proxy: AuthProxy | None = None
        self._namespace: str | None = None

    @classmethod
    def for_account(cls) -> Self:
        return cls(image="")

    def _create(self, plan: StartPlan) -> Sandbox:
        box: Sandbox = self._sdk.Sandbox.create(
            plan.image, flavor=self.flavor, secrets=plan.env_vars or None, labels=plan.labels, start_timeout=_START_S
        )
        return box

    def _find_command(self, box: Sandbox, plan: StartPlan) -> str:
        has_own = self._run(box, f"command -v {_OWN_COMMAND}", 20).strip()
        return _OWN_COMMAND if has_own else super()._find_command(box, plan)

    def _run(self, box: Sandbox, command: str, timeout_s: float) -> str:
        return box.run(command, shell=True, timeout=timeout_s, check=False).stdout

    def _address(self, box: Sandbox) -> str:
        target = require_https(box.proxy_url_for(PORT, "/"), self._cloud)
        self._redact.add(*box.proxy_headers.values())
        self._proxy = AuthProxy(target, lambda: box.proxy_headers)
        self._proxy.start()
        return self._proxy.url

    def _release(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None

    def _delete(self, box: Sandbox) -> None:
        self._cancel(box.id)
        box.close()

    def _cancel(self, job_id: str) -> None:
        """Cancel the job of a sandbox, and raise on failure. `Sandbox.kill` would only write a warning."""
        try:
            self._api.cancel_job(job_id=job_id, namespace=self._account())
        except import_package("huggingface_hub.errors", "hub").HfHubHTTPError as error:
            if error.response.status_code != 404:
                raise

    def _account(self) -> str:
        """Return the name of the account, which the Hub is asked for once."""
        if self._namespace is None:
            self._namespace = str(self._api.whoami()["name"])
        return self._namespace

    def _labelled(self, start_id: str | None = None) -> Iterable[CloudSandbox]:
        labels = None if start_id is None else {START_LABEL: start_id}
        for job in self._api.list_jobs(labels=labels, namespace=self._account()):
            if CLOUD_OWNER_LABEL in (job.labels or {}) and job.status.stage in _ACTIVE:
                what = job.docker_image or job.space_id or ""
                created = None if job.created_at is None else job.created_at.isoformat()
                owner = ProcessOwner.parse_short(job.labels[CLOUD_OWNER_LABEL])
                yield CloudSandbox(job.id, what, owner, partial(self._cancel, job.id), created)


class AuthProxy:
    """Serves the target of an address on a loopback port, and adds headers to every request.

    Args:
        target: The address.
        headers: Returns the headers; called for each request, because a token may be renewed.
    """

    def __init__(self, target: str, headers: Callable[[], Mapping[str, str]]) -> None:
        self._target = target.rstrip("/")
        self._headers = headers
        self._prefix = f"/{secrets.token_urlsafe(24)}"
        self._client: httpx2.AsyncClient | None = None
        # The server inside decides on the size of messages.
        self._server = ThreadServer(self, lifespan="off", ws_max_size=1 << 31, timeout_graceful_shutdown=2)

    @property
    def url(self) -> str:
        """The address that replaces the target's."""
        return f"{self._server.url}{self._prefix}"

    def start(self) -> None:
        """Start to serve."""
        self._server.start()

    def close(self) -> None:
        """Stop to serve."""
        self._server.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith(f"{self._prefix}/"):
            await self._refuse(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._relay_socket(scope, path[len(self._prefix) :], receive, send)
        else:
            await self._relay_request(scope, path[len(self._prefix) :], receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 404, b"not found")

    def _address(self, scope: Scope, path: str) -> str:
        query = scope["query_string"].decode()
        return f"{self._target}{path}{'?' + query if query else ''}"

    def _forwarded(self, scope: Scope, left_out: frozenset[str]) -> list[tuple[str, str]]:
        added = dict(self._headers())
        taken = {name.lower() for name in added} | left_out
        pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return [*((name, value) for name, value in pairs if name not in taken), *added.items()]

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _relay_request(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        import httpx2

        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(_ANSWER_S, connect=20), follow_redirects=False)
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        request = self._client.build_request(
            scope["method"],
            self._address(scope, path),
            headers=self._forwarded(scope, _HOP_BY_HOP),
            content=_body(receive) if has_body else None,
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            await _answer(send, 502, f"the sandbox cannot be reached: {type(error).__name__}".encode())
            return
        async with contextlib.aclosing(response):
            pairs = [pair for pair in response.headers.raw if pair[0].lower().decode("latin-1") not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": response.status_code, "headers": pairs})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    # -- sockets -----------------------------------------------------------------------------------------------------

    async def _relay_socket(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        from websockets.exceptions import WebSocketException

        await receive()
        try:
            upstream = await self._connect(scope, path)
        except (OSError, WebSocketException, TimeoutError):
            await send({"type": "websocket.close", "code": 1013, "reason": "the sandbox cannot be reached"})
            return
        await send({"type": "websocket.accept", "subprotocol": upstream.subprotocol})
        async with upstream:
            upward = asyncio.ensure_future(_upward(receive, upstream))
            downward = asyncio.ensure_future(_downward(upstream, send))
            try:
                await asyncio.wait({upward, downward}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (upward, downward):
                    task.cancel()
                await asyncio.gather(upward, downward, return_exceptions=True)

    async def _connect(self, scope: Scope, path: str) -> Any:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidStatus

        url = f"ws{self._address(scope, path).removeprefix('http')}"
        for attempt in range(_TRIES):
            try:
                return await connect(
                    url,
                    additional_headers=self._forwarded(scope, _HANDSHAKE),
                    subprotocols=scope["subprotocols"] or None,
                    max_size=None,
                    compression=None,
                    ping_interval=None,  # the ends ping each other through the proxy
                    user_agent_header=None,
                    proxy=None,
                )
            except (OSError, InvalidStatus):  # the Hub's own proxy may not know the port yet
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(_PAUSES.pause_s(attempt))
        raise AssertionError


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _answer(send: Send, status: int, text: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": text})


async def _upward(receive: Receive, upstream: Any) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            await upstream.close(_sendable(message.get("code")))
            return
        data = message.get("bytes")
        await upstream.send(message.get("text") if data is None else data)


async def _downward(upstream: Any, send: Send) -> None:
    from websockets.exceptions import ConnectionClosed

    try:
        while True:
            data = await upstream.recv()
            await send({"type": "websocket.send", "text" if isinstance(data, str) else "bytes": data})
    except ConnectionClosed as closed:
        received = closed.rcvd
        code, reason = (1011, "") if received is None else (_sendable(received.code), received.reason)
        await send({"type": "websocket.close", "code": code, "reason": reason})


def _sendable(code: int | None) -> int:
    """Return a code that may be sent: some only stand for a connection that ended without one."""
    return 1000 if code in (None, 1005, 1006, 1015) else int(code or 1000)
