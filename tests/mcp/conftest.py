"""What the MCP tests share: an environment of tools that behave well and badly, and clients that speak the wire by
hand: OpenEnv's JSON-RPC, the handshake era of MCP, and the era without sessions.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from fastmcp import Context, FastMCP
from websockets.sync.client import connect as connect_socket

from endless_tools import spin
from openenv.core.env_server.http_server import create_app
from openenv.env.mcp_environment import MCPEnvironment
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation
from openenv.types import Action, ConcurrencyConfig, Observation, State
from servers import Serve

BOTH = "application/json, text/event-stream"
MODERN = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}


# -- the environment ----------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the environments of one application went through."""

    built: int = 0
    closed: int = 0
    resets: int = 0
    steps: int = 0
    entered: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def alive(self) -> int:
        """Environments that were built and not closed."""
        return self.built - self.closed

    def forget(self) -> None:
        """Start over."""
        self.built = self.closed = self.resets = self.steps = 0
        self.entered.clear()
        self.cancelled.clear()


class Desk(MCPEnvironment):
    """Tools of every kind; each step earns a reward of one half, and the third ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, watch: Watch, extra_tools: int = 0) -> None:
        self.watch = watch
        self.number = 0
        self.steps = 0
        server: FastMCP = FastMCP("desk", instructions="Count.")
        for tool in (
            self.echo,
            self.count,
            self.work,
            self.talk,
            self.boom,
            self.thing,
            self.big,
            self.wait,
            self.spin,
        ):
            server.tool(tool)
        server.tool(self.spin, name="spin_briefly", timeout=0.3)
        server.tool(self.wait, name="wait_briefly", timeout=0.3)
        for index in range(extra_tools):
            server.tool(self.count, name=f"count_{index:03d}")
        server.resource("note://today")(lambda: "hello")
        server.resource("note://{day}/text")(_note_of)
        server.prompt(_greet, name="greet")
        super().__init__(server)

        @self.tool(mode="simulation")
        def peek() -> int:
            """Look at the number."""
            return self.number

        @self.tool(mode="production")
        def ship() -> str:
            """Do it for real."""
            return "shipped"

        watch.built += 1

    def echo(self, message: str, times: int = 1) -> dict[str, str]:
        """Say it again."""
        return {"message": message * times}

    def count(self) -> int:
        """Count up."""
        self.number += 1
        return self.number

    async def work(self, ctx: Context, steps: int = 3) -> str:
        """Tell progress."""
        for step in range(1, steps + 1):
            await ctx.report_progress(step, steps, f"step {step}")
        return "worked"

    async def talk(self, ctx: Context) -> str:
        """Log at three levels."""
        await ctx.debug("whisper")
        await ctx.info("word")
        await ctx.error("shout")
        return "talked"

    def boom(self) -> str:
        """Raise."""
        raise ValueError("bang")

    def thing(self):  # type: ignore[no-untyped-def]
        """Return what is no JSON."""
        return object()

    def big(self, megabytes: int = 10) -> str:
        """Return much."""
        return "x" * (megabytes * 1024 * 1024)

    async def wait(self) -> str:
        """Never return, but let itself be cancelled."""
        self.watch.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.watch.cancelled.set()
            raise
        return "never"

    def spin(self) -> str:
        """Never return, and hold a thread."""
        self.watch.entered.set()
        try:
            return spin()
        finally:
            self.watch.cancelled.set()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Start at a number: the seed, or none."""
        self.watch.resets += 1
        self.number = seed or 0
        self.steps = 0
        return Observation()

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Reward each step."""
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        self.watch.steps += 1
        self.steps += 1
        observation.reward = 0.5
        observation.done = self.steps >= 3
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("only tools here")

    @property
    def state(self) -> State:
        """How many steps there were."""
        return State(episode_id="desk", step_count=self.steps)

    def close(self) -> None:
        """Count."""
        super().close()
        self.watch.closed += 1


def _note_of(day: str) -> str:
    return f"note of {day}"


def _greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello {name}"


class Server:
    """A served desk."""

    def __init__(self, running: Any, watch: Watch) -> None:
        self.url: str = running.url
        self.manager: Any = running.manager
        self.wait_for: Callable[..., None] = running.wait_for
        self.watch = watch

    @property
    def session(self) -> Any:
        """The only session there is."""
        (session,) = self.manager.sessions()
        return session


@pytest.fixture
def desk(serve: Serve) -> Callable[..., Server]:
    """Serve desks: `sessions` slots, and a lease in seconds if asked for."""

    def start(
        *, sessions: int = 8, lease_s: float | None = None, extra_tools: int = 0, mode: str | None = None
    ) -> Server:
        watch = Watch()
        config = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=lease_s)
        return Server(serve(desk_app(watch, config, extra_tools, mode)), watch)

    return start


def desk_app(watch: Watch, config: ConcurrencyConfig, extra_tools: int = 0, mode: str | None = None) -> Any:
    """An application that serves desks."""
    return create_app(
        lambda: Desk(watch, extra_tools),
        CallToolAction,
        CallToolObservation,
        env_name="desk",
        concurrency_config=config,
        mode=mode,
    )


@pytest.fixture(scope="session")
def shared_desk(serve_once: Serve) -> Server:
    """A served desk with eight slots, for all tests that need nothing else."""
    watch = Watch()
    return Server(serve_once(desk_app(watch, ConcurrencyConfig(max_concurrent_envs=8))), watch)


@pytest.fixture
def server(shared_desk: Server) -> Iterator[Server]:
    """A served desk with eight slots, all of them free."""
    yield shared_desk
    for session in shared_desk.manager.sessions():
        session.close("the test is over")
    shared_desk.wait_for(lambda: shared_desk.manager.active == 0 and shared_desk.watch.alive == 0)
    shared_desk.watch.forget()


# -- clients ------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What a request was answered with: JSON is one message, a stream may be several."""

    status: int
    headers: httpx2.Headers
    messages: list[Any]

    @classmethod
    def read(cls, response: httpx2.Response) -> Answer:
        """Read a whole response."""
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            lines = response.text.splitlines()
            messages = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        else:
            messages = [response.json()] if response.content else []
        return cls(response.status_code, response.headers, messages)

    @property
    def is_stream(self) -> bool:
        """Whether it came as events."""
        return self.headers["content-type"].startswith("text/event-stream")

    @property
    def message(self) -> Any:
        """The answer itself, after all notifications."""
        return self.messages[-1]

    @property
    def result(self) -> Any:
        """What it says."""
        assert "result" in self.message, self.message
        return self.message["result"]

    @property
    def error(self) -> Any:
        """Why it was refused."""
        assert "error" in self.message, self.message
        return self.message["error"]

    @property
    def text(self) -> str:
        """The text of a tool's result."""
        return "".join(block["text"] for block in self.result["content"])

    def notes(self, method: str) -> list[Any]:
        """Parameters of the notifications of one method."""
        return [note["params"] for note in self.messages if note.get("method") == method]


class Wire:
    """Speaks to `/mcp` over one HTTP client, which keeps cookies."""

    def __init__(self, url: str) -> None:
        # The server ends idle connections after 5 s: one that was idle for nearly as long must not be used again.
        limits = httpx2.Limits(keepalive_expiry=2)
        self.http = httpx2.Client(base_url=url, trust_env=False, timeout=120, limits=limits)
        self._ids = 0

    def next_id(self) -> int:
        """A fresh id for a request."""
        self._ids += 1
        return self._ids

    def post(self, body: Any, headers: Mapping[str, str] | None = None, path: str = "/mcp") -> Answer:
        """Send a body: bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", "accept": "*/*", **(headers or {})}
        return Answer.read(self.http.post(path, content=content, headers=sent))

    def own(self, method: str, params: Any = None, **fields: Any) -> Any:
        """Call a method of OpenEnv's own; the whole response."""
        body = {"jsonrpc": "2.0", "id": self.next_id(), "method": method, "params": params or {}, **fields}
        answer = self.post(body)
        assert answer.status == 200
        return answer.message


class HandshakeClient(Wire):
    """A client of the era that begins with `initialize`."""

    session_id: str | None = None
    version = "2025-11-25"

    def initialize(self, version: str = "2025-11-25", headers: Mapping[str, str] | None = None, **extra: Any) -> Answer:
        """Begin."""
        path = extra.pop("path", "/mcp")
        params = {
            "protocolVersion": version,
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
            **extra,
        }
        body = {"jsonrpc": "2.0", "id": self.next_id(), "method": "initialize", "params": params}
        answer = self.post(body, {"accept": BOTH, **(headers or {})}, path)
        self.session_id = answer.headers.get("mcp-session-id")
        if self.session_id is not None:
            assert self.notify("notifications/initialized").status == 202
        return answer

    @property
    def headers(self) -> dict[str, str]:
        """What every request after the first carries."""
        assert self.session_id is not None, "not initialized"
        return {"accept": BOTH, "mcp-session-id": self.session_id, "mcp-protocol-version": self.version}

    def request(self, method: str, params: Any = None, *, id: Any = None, headers: Any = None) -> Answer:
        """Send a request."""
        body: dict[str, Any] = {"jsonrpc": "2.0", "id": self.next_id() if id is None else id, "method": method}
        if params is not None:
            body["params"] = params
        return self.post(body, {**self.headers, **(headers or {})})

    def notify(self, method: str, params: Any = None) -> Answer:
        """Send a notification."""
        return self.post({"jsonrpc": "2.0", "method": method, "params": params or {}}, self.headers)

    def call(self, tool: str, arguments: Any = None, *, id: Any = None, **meta: Any) -> Answer:
        """Call a tool."""
        params: dict[str, Any] = {"name": tool, "arguments": arguments or {}}
        if meta:
            params["_meta"] = meta
        return self.request("tools/call", params, id=id)


class ModernClient(Wire):
    """A client since 2026-07-28: each request stands alone."""

    def prepare(
        self, method: str, params: Mapping[str, Any] | None = None, meta: Any = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """A request's body and the headers that it must have."""
        params = dict(params or {})
        body = {
            "jsonrpc": "2.0",
            "id": self.next_id(),
            "method": method,
            "params": {**params, "_meta": {**META, **(meta or {})}},
        }
        headers = {"accept": BOTH, "mcp-protocol-version": MODERN, "mcp-method": method}
        named = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}.get(method)
        if named is not None and named in params:
            headers["mcp-name"] = str(params[named])
        return body, headers

    def request(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        meta: Any = None,
        headers: Mapping[str, str] | None = None,
        path: str = "/mcp",
    ) -> Answer:
        """Send a request as it should be, but for what is given."""
        body, required = self.prepare(method, params, meta)
        return self.post(body, {**required, **(headers or {})}, path)

    def call(self, tool: str, arguments: Any = None, **options: Any) -> Answer:
        """Call a tool."""
        return self.request("tools/call", {"name": tool, "arguments": arguments or {}}, **options)


@pytest.fixture
def connect(serve: Serve) -> Iterator[Callable[..., Any]]:
    """Make clients of any class here; they are closed before the servers stop."""
    with ExitStack() as stack:

        def make(kind: type[Wire], url: str) -> Any:
            client = kind(url)
            stack.callback(client.http.close)
            return client

        yield make


@pytest.fixture
def handshake(connect: Callable[..., Any]) -> Callable[..., HandshakeClient]:
    """Connect a client that has said `initialize`."""

    def make(url: str, **options: Any) -> HandshakeClient:
        client: HandshakeClient = connect(HandshakeClient, url)
        client.initialize(**options)
        return client

    return make


@pytest.fixture
def uninitialized(connect: Callable[..., Any]) -> Callable[[str], HandshakeClient]:
    """A client that has not said anything yet."""
    return lambda url: connect(HandshakeClient, url)


@pytest.fixture
def modern(connect: Callable[..., Any]) -> Callable[[str], ModernClient]:
    """A client of the era without sessions."""
    return lambda url: connect(ModernClient, url)


@pytest.fixture
def wire(connect: Callable[..., Any]) -> Callable[[str], Wire]:
    """A client of OpenEnv's own methods."""
    return lambda url: connect(Wire, url)


class RpcSocket:
    """OpenEnv's JSON-RPC on a WebSocket: `/mcp`, or `mcp` frames of `/ws`."""

    def __init__(self, socket: Any, *, framed: bool) -> None:
        self.socket = socket
        self._framed = framed

    def send(self, message: Any) -> None:
        """Send one message."""
        self.socket.send(json.dumps({"type": "mcp", "data": message} if self._framed else message))

    def receive(self, timeout_s: float = 20) -> Any:
        """Take the next message."""
        message = json.loads(self.socket.recv(timeout_s))
        if self._framed:
            assert message["type"] == "mcp", message
            return message["data"]
        return message

    def ask(self, message: Any) -> Any:
        """Send one message and take the next."""
        self.send(message)
        return self.receive()

    def own(self, method: str, params: Any = None) -> Any:
        """Call a method; the whole response."""
        return self.ask({"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}})


@pytest.fixture
def open_socket(serve: Serve) -> Iterator[Callable[..., Any]]:
    """Open WebSockets: plain ones, or those that carry JSON-RPC."""
    with ExitStack() as stack:

        def open_(url: str, path: str = "/mcp", *, plain: bool = False) -> Any:
            address = url.replace("http", "ws", 1) + path
            socket = stack.enter_context(connect_socket(address, max_size=None, proxy=None))
            return socket if plain else RpcSocket(socket, framed=path.startswith("/ws"))

        yield open_
