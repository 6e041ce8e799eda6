"""`EnvClient`: a typed client for one session; `SyncEnvClient` is its blocking twin, `GenericEnvClient` has no models.

Inside a running event loop each method of an `EnvClient` returns a coroutine; outside it blocks and returns the value.
The first use decides, and one object keeps to it. Knows flows; `hooks` knows models.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Coroutine, Generator, Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, Generic, Literal

from pydantic import BaseModel
from typing_extensions import Self

from openenv._notebook import add_hints
from openenv.errors import AccessDenied, SessionLost
from openenv.protocol.backoff import Backoff
from openenv.protocol.client_sessions import SUBPROTOCOL_JSON, ResumableSession
from openenv.protocol.redaction import redacted
from openenv.settings import client_mode
from openenv.types import StepResult

from .bootstrap import Bootstrap, provide_container, provide_space, start_provider, stop_provider
from .driver import Driver, named
from .flows import (
    CLOSED_BY_CLIENT,
    ClientRequest,
    Flow,
    RunBlocking,
    RunFlows,
    attach,
    connect,
    detach,
    hang_up,
    request,
    require_v2,
)
from .hooks import ActT, ClientHooks, ObsT, StateT
from .network import PROTOCOLS, ConnectionOptions, ProtocolChoice, socket_url, with_token

OnSessionLost = Literal["raise", "reset"]

SESSION_LOST_KEY = "session_lost"

_MODES = ("simulation", "production")
_LOSS_POLICIES = ("raise", "reset")
_GRACE_S = 1.0
_REPLIES = {"reset": "observation", "step": "observation"}  # the other replies have the type of their request


class EnvClient(ClientHooks[ActT, ObsT, StateT]):
    """A client for one session of a served environment.

    A subclass names its models: `class WordEnv(EnvClient[WordAction, WordObservation, WordState]): pass`. It may
    override the hooks `_step_payload`, `_parse_result` and `_parse_state` if the wire has another shape.

    Args:
        base_url: The server's address: `http(s)://`, `ws(s)://` or a bare host.
        connect_timeout_s: How long connecting may take; transient failures are retried until then.
        message_timeout_s: How long a reply may take; afterwards the episode is lost.
        max_message_size_mb: The largest reply that is read.
        websocket_ping_interval_s: How often an idle connection is checked; None for never.
        websocket_ping_timeout_s: How long the answer to a check may take.
        provider: Starts and stops a server for this client.
        mode: `simulation` or `production`; by default `OPENENV_CLIENT_MODE`.
        headers: HTTP headers for the handshake.
        token: The token that the server requires; by default `OPENENV_TOKEN`.
        protocol: `v1`, `v2`, or `auto`: v2 if the server speaks it, else v1.
        reconnect_timeout_s: How long a request may spend on getting back to its session after a lost connection; 0 for
            not at all. Only with v2.
        on_session_lost: What `step` does when the episode is gone: `raise` SessionLost, or `reset` with the keywords
            of the last reset and return that result, with the reason as `metadata["session_lost"]`.
        resume_token: Continue the session that this token names, opened by another client.
        wait_s: How long to wait in the server's queue if every slot is taken; by default not at all. Only with v2.
        retry_refused_s: How long to retry if no server listens or its host is out of reach. A server that is just
            starting is reached; a wrong address fails quickly.

    Raises:
        ValueError: Neither `base_url` nor `provider` is given, or an argument is not valid.
    """

    def __init__(
        self,
        base_url: str | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float | None = 60.0,
        max_message_size_mb: float = 100.0,
        websocket_ping_interval_s: float | None = 20.0,
        websocket_ping_timeout_s: float | None = 20.0,
        provider: Any = None,
        mode: str | None = None,
        headers: dict[str, str] | None = None,
        *,
        token: str | None = None,
        protocol: ProtocolChoice = "auto",
        reconnect_timeout_s: float = 30.0,
        on_session_lost: OnSessionLost = "raise",
        resume_token: str | None = None,
        wait_s: float | None = None,
        retry_refused_s: float = 2.0,
    ) -> None:
        """Connect to nothing yet. Mode `simulation` has reset, step and state; mode `production` has tools only."""
        if base_url is None and provider is None:
            raise ValueError("Give base_url (the server's address) or provider (to start a server)")
        self._provider = provider
        self._provider_pid = os.getpid()
        self._base_url = base_url
        self._options = ConnectionOptions(
            connect_timeout_s=connect_timeout_s,
            retry_refused_s=retry_refused_s,
            message_timeout_s=message_timeout_s,
            max_message_bytes=int(max_message_size_mb * 1024 * 1024),
            ping_interval_s=websocket_ping_interval_s,
            ping_timeout_s=websocket_ping_timeout_s,
            headers=with_token(headers, token),
            protocol=_one_of("protocol", protocol, PROTOCOLS),
            subprotocols=() if protocol == "v1" else (SUBPROTOCOL_JSON,),
        )
        self._on_session_lost = _one_of("on_session_lost", on_session_lost, _LOSS_POLICIES)
        if not (reconnect_timeout_s >= 0 and isfinite(reconnect_timeout_s)):
            raise ValueError(f"reconnect_timeout_s must be a number of seconds, not {reconnect_timeout_s!r}")
        if wait_s is not None and not (wait_s >= 0 and isfinite(wait_s)):
            raise ValueError(f"wait_s must be a number of seconds, not {wait_s!r}")
        if resume_token is not None and protocol == "v1":
            raise ValueError("resume_token needs protocol v2")
        self._driver = Driver(
            self._options,
            "" if base_url is None else socket_url(base_url),
            backoff=Backoff(reconnect_timeout_s),
            resume_token=resume_token,
            wait_s=wait_s,
        )
        self._last_reset: dict[str, Any] = {}
        self._children: list[EnvClient[ActT, ObsT, StateT]] = []
        self._mode = self._checked_mode(mode)
        add_hints()

    @classmethod
    def _checked_mode(cls, mode: str | None) -> str:
        mode = client_mode() if mode is None else mode
        if mode.lower() not in _MODES:
            raise ValueError(
                f"invalid client mode {mode!r}: choose 'simulation' or 'production', by argument or OPENENV_CLIENT_MODE"
            )
        return mode.lower()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_mode" and "_mode" in self.__dict__:
            raise AttributeError("the mode of a client cannot be changed")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        where = redacted(str(self._base_url or "without a server yet"))
        return f"<{type(self).__name__} {where}, {self._driver.status}>"

    @property
    def _ws_url(self) -> str:
        return self._driver.url

    @_ws_url.setter
    def _ws_url(self, url: str) -> None:
        self._driver.url = url

    # Private names of the published client that public code reads or calls: `if env._ws is None`, a longer
    # `_connect_timeout` for a server that loads a model, messages of one's own through `_send_and_receive`.

    @property
    def _ws(self) -> object | None:
        """The connection, or None while there is none."""
        return self._driver.websocket if self._driver.has_connected and self._driver.is_open else None

    @property
    def _connect_timeout(self) -> float:
        return self._options.connect_timeout_s

    @_connect_timeout.setter
    def _connect_timeout(self, seconds: float) -> None:
        self._options = self._driver.options = replace(self._options, connect_timeout_s=seconds)

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message of protocol v1, such as `{"type": "state"}`, and return the reply, with its type."""
        kind = str(message.get("type", ""))
        data = await self._driver.run(self._request(kind, message.get("data")), "EnvClient._send_and_receive")
        return {"type": _REPLIES.get(kind, kind), "data": data}

    # -- operations -----------------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str | None:
        """The server's address, without a slash at the end."""
        return None if self._base_url is None else self._base_url.rstrip("/")

    @property
    def resume_token(self) -> str | None:
        """The token that continues this session in another client; None before the first request and on v1 servers.

        It is a secret: it gives access to the session.
        """
        session = self._driver.session
        return session.token if isinstance(session, ResumableSession) else None

    def connect(self) -> Coroutine[Any, Any, Self]:
        """Connect now instead of at the first request."""
        return self._driver.run(self._connect_flow(), "EnvClient.connect")

    def reset(self, **kwargs: Any) -> Coroutine[Any, Any, StepResult[ObsT]]:
        """Begin an episode; keywords go to the environment's `reset`."""
        return self._driver.run(self._reset_flow(kwargs), "EnvClient.reset")

    def step(self, action: ActT, **kwargs: Any) -> Coroutine[Any, Any, StepResult[ObsT]]:
        """Take an action.

        Args:
            action: The action.
            kwargs: Passed to the environment's `step` if it accepts them, above all `timeout_s`. Servers that speak
                only v1 do not get them.

        Raises:
            SessionLost: The episode is gone; `reset` begins a new one.
            RequestTimeout: No reply came in time; the episode is lost.
            ServerError: The server reported an error; the class follows its code.
        """
        return self._driver.run(self._step_flow(action, kwargs), "EnvClient.step")

    def state(self) -> Coroutine[Any, Any, StateT]:
        """Ask for the environment's state."""
        return self._driver.run(self._state_flow(), "EnvClient.state")

    def render_web(self, result: StepResult[ObsT]) -> Coroutine[Any, Any, str | None]:
        """Let the environment draw a result of `reset` or `step`, as its web page does.

        Returns:
            HTML, or None if there is nothing to draw.

        Raises:
            UnknownTypeError: The environment has no `render_web`.
            ProtocolError: The server speaks only v1.
        """
        return self._driver.run(self._render_flow(result), "EnvClient.render_web")

    def fork(self, n: int = 1) -> Coroutine[Any, Any, list[Self]]:
        """Return clients that go on from here, each with a new session and an exact copy of the environment.

        Each takes a slot of the server and has another token. Closing this client does not close them. Either all
        copies are made, or none.

        Raises:
            NotForkable: The environment cannot be copied; the text gives the reason and a remedy.
            SessionCapacityError: The server has not so many slots left; `wait_s` of this client waits for them.
            ProtocolError: The server speaks only v1.
        """
        return self._driver.run(self._fork_flow(n), "EnvClient.fork")

    def snapshot(self) -> Coroutine[Any, Any, Self]:
        """Return a client with a copy of the environment as it is now, to `restore` from; raises as `fork` does.

        It is a client as any other, so it holds a slot until it is closed. A step in it would change the snapshot.
        """
        return self._driver.run(self._snapshot_flow(), "EnvClient.snapshot")

    def restore(
        self, snapshot: EnvClient[Any, Any, Any] | SyncEnvClient[Any, Any, Any] | str
    ) -> Coroutine[Any, Any, None]:
        """Continue this session from a snapshot, which may be used any number of times.

        Args:
            snapshot: A client of the same server, as `snapshot` returns it, or the resume token of one.

        Raises:
            NotForkable: The snapshot is gone, or cannot be copied.
            ValueError: The client has no session.
        """
        return self._driver.run(self._restore_flow(snapshot), "EnvClient.restore")

    def disconnect(self) -> Coroutine[Any, Any, None]:
        """End the session and hang up; the provider keeps running."""
        return self._driver.run(hang_up(self._driver), "EnvClient.disconnect")

    def detach(self) -> Coroutine[Any, Any, str]:
        """Hang up but leave the session, and return the token that another client continues it with.

        Raises:
            ProtocolError: The client has no session, or the server speaks only v1.
        """
        return self._driver.run(detach(self._driver), "EnvClient.detach")

    def close(self) -> Coroutine[Any, Any, None]:
        """End the session, the sessions of child clients, and the provider."""
        if self._driver.is_blocking:
            self._close_blocking()
            return self._driver.awaitable(None)
        return named(self._close_on_loop(), "EnvClient.close")

    def sync(self) -> SyncEnvClient[ActT, ObsT, StateT]:
        """Return the blocking twin of this client."""
        return SyncEnvClient(self)

    def new_session(self) -> Self:
        """Return another client of the same server with a new session; it is closed with this one.

        It needs no `await`, but existing code has one, which does no harm.
        """
        if self._base_url is None:
            raise ValueError("connect() first: the provider has not started a server yet")
        child = self._clone()
        self._children.append(child)
        return child

    def _clone(self) -> Self:
        options = self._options
        clone = type(self)(
            base_url=self._base_url,
            connect_timeout_s=options.connect_timeout_s,
            message_timeout_s=options.message_timeout_s,
            max_message_size_mb=options.max_message_bytes / (1024 * 1024),
            websocket_ping_interval_s=options.ping_interval_s,
            websocket_ping_timeout_s=options.ping_timeout_s,
            mode=self._mode,
            headers=dict(options.headers),
        )
        # Not as arguments: the constructor of a subclass need not know them.
        clone._options = clone._driver.options = options
        clone._driver.backoff, clone._driver.wait_s = self._driver.backoff, self._driver.wait_s
        clone._on_session_lost = self._on_session_lost
        return clone

    @classmethod
    def from_docker_image(cls, image: str, provider: Any = None, **kwargs: Any) -> Bootstrap[Self]:
        """Start a container of an image and connect to it; await the result, or call its `sync()`.

        Args:
            image: The image to start.
            provider: What starts it; by default the local Docker engine.
            kwargs: Passed to the provider's `start_container`.
        """
        return Bootstrap(cls, lambda: provide_container(image, provider, kwargs))

    @classmethod
    def from_env(
        cls, repo_id: str, *, use_docker: bool = True, provider: Any = None, **provider_kwargs: Any
    ) -> Bootstrap[Self]:
        """Start an environment of the Hugging Face Hub and connect to it; await the result, or call its `sync()`."""
        return Bootstrap(
            cls, lambda: provide_space(repo_id, use_docker=use_docker, provider=provider, kwargs=provider_kwargs)
        )

    def __await__(self) -> Generator[Any, None, Self]:
        """Return the client as it is, so that `await client.new_session()` works as well."""
        return self
        yield

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        self._driver.claim_blocking(on_loops=True)
        self._driver.run_blocking(self._connect_flow())
        return self

    def __exit__(self, *_: object) -> None:
        self._close_blocking()

    # -- flows ----------------------------------------------------------------------------------------------------

    def _connect_flow(self) -> Flow[Self]:
        yield from self._start_provider()
        try:
            yield from connect(self._driver)
        except (ConnectionError, AccessDenied):
            yield from self._stop_provider()
            raise
        return self

    def _reset_flow(self, kwargs: dict[str, Any]) -> Flow[StepResult[ObsT]]:
        if self._base_url is None:
            yield from self._start_provider()
        payload = yield from self._request("reset", kwargs)
        self._last_reset = kwargs
        return self._parse_result(payload)

    def _step_flow(self, action: ActT, kwargs: dict[str, Any]) -> Flow[StepResult[ObsT]]:
        if self._base_url is None:
            yield from self._start_provider()
        try:
            if kwargs:
                payload = yield from self._step_with(action, kwargs)
            else:
                payload = yield from self._request("step", self._step_payload(action))
        except SessionLost as exc:
            if self._on_session_lost == "raise" or exc.reason == CLOSED_BY_CLIENT:
                raise
            reason = exc.reason
        else:
            return self._parse_result(payload)
        result = yield from self._reset_flow(self._last_reset)
        result.metadata = {**(result.metadata or {}), SESSION_LOST_KEY: reason}
        return result

    def _step_with(self, action: ActT, kwargs: dict[str, Any]) -> Flow[dict[str, Any]]:
        """Take a step with further arguments for the environment."""
        timeout_s = kwargs.get("timeout_s")
        rest = {key: value for key, value in kwargs.items() if key != "timeout_s" and value is not None}
        extra: dict[str, Any] = {"kwargs": rest} if rest else {}
        wait_s = self._options.message_timeout_s
        if timeout_s is not None:
            extra["timeout_s"] = timeout_s
            if wait_s is not None and isinstance(timeout_s, (int, float)):
                wait_s = max(wait_s, timeout_s + _GRACE_S)  # or we would give up before the environment does
        return (yield from request(self._driver, ClientRequest("step", self._step_payload(action), wait_s, extra)))

    def _state_flow(self) -> Flow[StateT]:
        if self._base_url is None:
            yield from self._start_provider()
        return self._parse_state((yield from self._request("state", None)))

    def _render_flow(self, result: StepResult[ObsT]) -> Flow[str | None]:
        yield from require_v2(self._driver, "render_web")
        data = {"observation": result.observation, "reward": result.reward, "done": result.done}
        html: str | None = (yield from self._request("render", data))["html"]
        return html

    def _fork_flow(self, n: int) -> Flow[list[Self]]:
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}")
        if self._base_url is None:
            yield from self._start_provider()
        driver, timeout_s = self._driver, self._options.message_timeout_s
        data: dict[str, Any] = {"n": n}
        if driver.wait_s is not None:
            data["wait_s"] = driver.wait_s
            timeout_s = None if timeout_s is None else timeout_s + driver.wait_s
        yield from require_v2(driver, "fork")
        reply = yield from request(driver, ClientRequest("fork", data, timeout_s))
        copies = [self._copy(str(copied["token"])) for copied in reply["sessions"]]
        drivers = [copied._driver for copied in copies]
        try:
            # At once: the server keeps a session that no client has attached to for a minute only.
            yield RunFlows([(driver, attach(driver)) for driver in drivers])
        except BaseException:
            yield RunFlows([(driver, hang_up(driver)) for driver in drivers])
            raise
        return copies

    def _copy(self, token: str) -> Self:
        """Return a client of the session that a token names."""
        copied = self._clone()
        copied._driver.session = ResumableSession(token)
        copied._last_reset = self._last_reset
        return copied

    def _snapshot_flow(self) -> Flow[Self]:
        (copied,) = yield from self._fork_flow(1)
        return copied

    def _restore_flow(self, snapshot: EnvClient[Any, Any, Any] | SyncEnvClient[Any, Any, Any] | str) -> Flow[None]:
        token = snapshot if isinstance(snapshot, str) else snapshot.resume_token
        if token is None:
            raise ValueError("The snapshot has no session: it was closed, or its server has ended")
        if self._base_url is None:
            yield from self._start_provider()
        yield from require_v2(self._driver, "restore")
        yield from self._request("restore", {"from": token})

    def _request(self, kind: str, data: Any) -> Flow[dict[str, Any]]:
        return request(self._driver, ClientRequest(kind, data, self._options.message_timeout_s))

    def _close_flow(self) -> Flow[None]:
        yield from hang_up(self._driver)
        yield from self._stop_provider()

    def _start_provider(self) -> Flow[None]:
        if self._base_url is not None:
            return
        provider = self._provider
        try:
            self._provider_pid = os.getpid()
            base_url: str = yield RunBlocking(lambda: start_provider(provider))
            self._ws_url = socket_url(base_url)
            self._base_url = base_url
        except BaseException:
            yield from self._stop_provider()
            raise

    def _stop_provider(self) -> Flow[None]:
        provider, self._provider = self._provider, None
        if provider is not None and self._provider_pid == os.getpid():  # a fork leaves it to its parent
            yield RunBlocking(lambda: stop_provider(provider))

    # -- drivers --------------------------------------------------------------------------------------------------

    def _close_blocking(self) -> None:
        children, self._children = self._children, []
        for child in children:
            child._close_blocking()
        self._driver.run_blocking(self._close_flow())
        self._driver.drop_loop()

    async def _close_on_loop(self) -> None:
        children, self._children = self._children, []
        for child in children:
            await child._close_on_loop()
        await self._driver.run_on_loop(self._close_flow())


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


class SyncEnvClient(Generic[ActT, ObsT, StateT]):
    """The blocking twin of a client, on a plain socket without an event loop; works inside a running loop too.

    Other methods of the client, coroutines too, work as well: they run in this thread.

    Raises:
        ClientModeError: The client is already in asynchronous use.
    """

    def __init__(self, async_client: EnvClient[ActT, ObsT, StateT]) -> None:
        async_client._driver.claim_blocking()
        self._client = async_client
        self._driver = async_client._driver

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>"

    @property
    def async_client(self) -> EnvClient[ActT, ObsT, StateT]:
        """The client that this one drives."""
        return self._client

    def connect(self) -> Self:
        """Connect now instead of at the first request."""
        self._driver.run_blocking(self._client._connect_flow())
        return self

    def reset(self, **kwargs: Any) -> StepResult[ObsT]:
        """Begin an episode; keywords go to the environment's `reset`."""
        return self._driver.run_blocking(self._client._reset_flow(kwargs))

    def step(self, action: ActT, **kwargs: Any) -> StepResult[ObsT]:
        """Take an action."""
        return self._driver.run_blocking(self._client._step_flow(action, kwargs))

    def state(self) -> StateT:
        """Ask for the environment's state."""
        return self._driver.run_blocking(self._client._state_flow())

    def render_web(self, result: StepResult[ObsT]) -> str | None:
        """Let the environment draw a result of `reset` or `step`; see `EnvClient.render_web`."""
        return self._driver.run_blocking(self._client._render_flow(result))

    def disconnect(self) -> None:
        """End the session and hang up; the provider keeps running."""
        self._driver.run_blocking(hang_up(self._driver))

    def detach(self) -> str:
        """Hang up but leave the session, and return the token that another client continues it with."""
        return self._driver.run_blocking(detach(self._driver))

    def fork(self, n: int = 1) -> list[Self]:
        """Return clients that go on from here, each with a copy of the environment; see `EnvClient.fork`."""
        return [type(self)(copied) for copied in self._driver.run_blocking(self._client._fork_flow(n))]

    def snapshot(self) -> Self:
        """Return a client with a copy of the environment as it is now, to `restore` from."""
        return type(self)(self._driver.run_blocking(self._client._snapshot_flow()))

    def restore(self, snapshot: EnvClient[Any, Any, Any] | SyncEnvClient[Any, Any, Any] | str) -> None:
        """Continue this session from a snapshot; see `EnvClient.restore`."""
        self._driver.run_blocking(self._client._restore_flow(snapshot))

    @property
    def resume_token(self) -> str | None:
        """What another client continues this session with; see `EnvClient.resume_token`."""
        return self._client.resume_token

    def close(self) -> None:
        """End the session, the sessions of child clients, and the provider."""
        self._client._close_blocking()

    def new_session(self) -> Self:
        """Return another blocking client of the same server with a new session."""
        return type(self)(self._client.new_session())

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._client, name)
        if not callable(value) or inspect.isclass(value):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._driver.run_helper(value, *args, **kwargs)

        return call


class GenericAction(dict[str, Any]):
    """An action as a dict: `GenericAction(message="hi")`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def __repr__(self) -> str:
        fields = ", ".join(f"{key}={value!r}" for key, value in self.items())
        return f"GenericAction({fields})"


class GenericEnvClient(EnvClient[Any, dict[str, Any], dict[str, Any]]):
    """A client for any environment, with dicts instead of models."""

    def _step_payload(self, action: Any) -> dict[str, Any]:
        if isinstance(action, (dict, Mapping)):  # dict is a Mapping, but checking for it first is quicker
            return dict(action)
        if isinstance(action, BaseModel):
            return action.model_dump()
        if hasattr(action, "__dict__"):
            return dict(vars(action))
        raise TypeError(f"an action must be a dict, a pydantic model or an object with fields, not {action!r}")

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[dict[str, Any]]:
        get = payload.get
        return StepResult(get("observation", {}), get("reward"), bool(get("done")), get("metadata"))

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload
