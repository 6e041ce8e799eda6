"""`WebInterfaceManager`: the interface through which custom pages use an environment.

It acts as the shared visitor of programs without a cookie, so both see each other's actions, and `/ws/ui` shows them.
Its names, some with a leading underscore, come from the published interface. Knows visitors; must not know Gradio.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, TypeVar

from openenv.env.binding import RemoteEnvironment
from openenv.env.environment import Environment
from openenv.errors import SessionLost
from openenv.protocol.json_values import decode
from openenv.types import EnvironmentMetadata

from ..options import ServerOptions
from ..service import EnvService, ServedModels
from ..sessions.lifetime import client_reason
from ..sessions.operations import read_state
from ..sessions.session import Session, SessionState
from .page_description import load_environment_metadata
from .page_operations import EncodedObservation
from .visitor_actions import UnfitAction, VisitorActions
from .visitors import MAX_ENTRIES, ActionLog, EpisodeState, Visitor, Visitors

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOK_S = 1.0


class WebInterfaceManager:
    """Uses one environment for a custom page.

    Args:
        env: The environment, or its factory.
        action_cls: The action model.
        observation_cls: The observation model.
        metadata: The environment's description.
    """

    MAX_ACTION_LOGS: ClassVar[int] = MAX_ENTRIES

    def __init__(
        self,
        env: Any,
        action_cls: type[Any],
        observation_cls: type[Any],
        metadata: EnvironmentMetadata | None = None,
        *,
        served: tuple[EnvService, Visitors, VisitorActions] | None = None,
    ) -> None:
        self.action_cls = action_cls
        self.observation_cls = observation_cls
        self.metadata = metadata or load_environment_metadata(env)
        self.episode_state = EpisodeState(step_count=0)
        self.connected_clients: list[Any] = []
        if served is None:
            service = _service_of(env, action_cls, observation_cls)
            served = service, Visitors(service.manager), VisitorActions(service)
        self._service, self._visitors, self._actions = served
        self._instance = env if isinstance(env, Environment) else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outside: set[asyncio.Task[None]] = set()

    @property
    def env(self) -> Any:
        """A proxy of the environment; its calls run in the session's lane."""
        return self._instance if self._instance is not None else SharedEnvironment(self)

    async def reset_environment(self, reset_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin an episode and return `observation`, `reward` and `done`."""
        return await self._act(self._actions.reset, reset_kwargs or {})

    async def step_environment(self, action_data: dict[str, Any]) -> dict[str, Any]:
        """Take an action and return `observation`, `reward` and `done`.

        Raises:
            pydantic.ValidationError: The action does not fit.
            SessionLost: The session is gone; a reset opens a new one.
        """
        try:
            return await self._act(self._actions.step, action_data)
        except UnfitAction as exc:
            raise exc.__cause__ or exc from None

    def get_state(self) -> dict[str, Any]:
        """Return the environment's state as a dict."""
        state = self.read_state()
        return dict(state.model_dump() if hasattr(state, "model_dump") else state)

    def read_state(self) -> Any:
        """Return the environment's state."""
        session = self.enter()
        if isinstance(session.env, RemoteEnvironment):
            return self._service.state_cls.model_validate(decode(self.run(self._actions.state(self.visitor))))
        return self.in_lane(session, lambda: read_state(session.env))

    # -- sockets of custom pages ----------------------------------------------------------------------------------

    async def connect_websocket(self, websocket: Any) -> None:
        """Accept a socket and send it the episode, now and after each change."""
        await websocket.accept()
        self.connected_clients.append(websocket)
        await self._send_state_update()

    async def disconnect_websocket(self, websocket: Any) -> None:
        """Forget a socket."""
        if websocket in self.connected_clients:
            self.connected_clients.remove(websocket)

    async def _send_state_update(self) -> None:
        """Send the episode to all sockets; drops one that fails."""
        if not self.connected_clients:
            return
        text = f'{{"type":"state_update","episode_state":{self.episode_state.model_dump_json()}}}'
        for client in list(self.connected_clients):
            try:
                await client.send_text(text)
            except Exception:
                logger.debug("a socket of a custom page is gone", exc_info=True)
                await self.disconnect_websocket(client)

    async def _run_sync_in_thread_pool(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run blocking code off the event loop."""
        return await asyncio.to_thread(func, *args, **kwargs)

    # -- Watcher --------------------------------------------------------------------------------------------------

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Follow the episode, including actions of other clients of the shared visitor."""
        if not is_state:
            return
        change = decode(frame)
        if change["type"] == "reset":
            self.episode_state = EpisodeState(
                episode_id=change["episode_id"], step_count=0, current_observation=change["observation"]
            )
        else:
            self._add(visitor, change["entry"])
        sending = asyncio.ensure_future(self._send_state_update())
        self._outside.add(sending)
        sending.add_done_callback(self._outside.discard)

    def _add(self, visitor: Visitor, entry: dict[str, Any]) -> None:
        del entry["duration_ms"]
        state = self.episode_state
        state.action_logs.append(ActionLog(**entry))
        del state.action_logs[: -self.MAX_ACTION_LOGS]
        state.episode_id = visitor.episode.episode_id
        state.step_count = visitor.episode.step_count
        state.current_observation = entry["observation"]
        state.is_reset = False

    def shut_down(self, reason: str) -> None:
        """Do nothing: custom pages end with the server."""

    # -- loops and threads ----------------------------------------------------------------------------------------

    @property
    def visitor(self) -> Visitor:
        """The visitor of this manager."""
        visitor = self._visitors.shared
        visitor.watchers.add(self)
        return visitor

    async def _act(
        self, action: Callable[[Visitor, dict[str, Any]], Awaitable[EncodedObservation]], argument: dict[str, Any]
    ) -> dict[str, Any]:
        async def act() -> dict[str, Any]:
            payload: dict[str, Any] = decode((await action(self.begin(), argument)).payload)
            return payload

        return await self._on_own_loop(act())

    def begin(self) -> Visitor:
        """Store the running loop as the visitor's, and follow the episode from now on."""
        self._loop = asyncio.get_running_loop()
        self._visitors.of(None)
        return self.visitor

    async def _on_own_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the server's loop, because a custom page may run on another one."""
        loop = self._loop
        if loop is None or not loop.is_running() or loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the server's loop, from synchronous code.

        Raises:
            RuntimeError: The caller is on that loop itself.
        """
        loop = self._loop
        if loop is not None and loop.is_running():
            if asyncio._get_running_loop() is loop:
                work.close()
                raise RuntimeError("this waits for the server's event loop: call it from a thread, or await it")
            return asyncio.run_coroutine_threadsafe(work, loop).result()
        return _run_in_thread(work)

    def enter(self, *, renew: bool = False) -> Session:
        """Return the shared visitor's session, or open one.

        Args:
            renew: Whether a lost session may be replaced.

        Raises:
            SessionLost: The session was lost, and may not be replaced.
        """
        visitor = self.visitor
        session = visitor.session
        if session is not None and not session.is_ending:
            visitor.touch()
            return session
        if self._loop is not None and asyncio._get_running_loop() is self._loop:
            return _run_in_thread(visitor.enter(renew=renew))  # blocks this loop for as long as the constructor takes
        return self.run(_enter(visitor, renew=renew))

    async def enter_async(self, *, renew: bool = False) -> Session:
        """Return the session as `enter` does, from a coroutine."""
        return await self._on_own_loop(_enter(self.visitor, renew=renew))

    @property
    def env_cls(self) -> type[Any] | None:
        """The environment's class, once it is known."""
        return self._service.manager.env_cls

    def in_lane(self, session: Session, function: Callable[[], _T]) -> _T:
        """Run a function in a session's lane, and wait for it.

        Raises:
            SessionLost: The session ended before the function could run.
        """
        session.touch()
        call = _LaneCall(function)
        session.lane.submit(call)
        while True:
            try:
                result: _T = call.done.result(timeout=_LOOK_S)
                return result
            except concurrent.futures.TimeoutError:
                if call.done.done():
                    continue
                if session.state in (SessionState.CLOSED, SessionState.ABANDONED):
                    raise SessionLost(client_reason(session.close_reason)) from None


class SharedEnvironment:
    """A proxy of the environment for a custom page: reads attributes and calls methods in the session's lane."""

    _manager: WebInterfaceManager

    def __init__(self, manager: WebInterfaceManager) -> None:
        self.__dict__["_manager"] = manager

    def __repr__(self) -> str:
        return f"<environment of {self._manager.metadata.name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A method is found in the class, without a session: a coroutine may pass it to a thread that calls it there.
        member = inspect.getattr_static(self._manager.env_cls, name, None)
        if inspect.iscoroutinefunction(member):
            return partial(self._call_async, name)
        if inspect.isfunction(member):
            return partial(self._call, name)
        return self._read(name)

    def __setattr__(self, name: str, value: Any) -> None:
        session = self._manager.enter()
        self._manager.in_lane(session, lambda: setattr(session.env, name, value))

    def _read(self, name: str) -> Any:
        manager = self._manager
        if name == "state":
            return manager.read_state()
        session = manager.enter()
        value = manager.in_lane(session, lambda: getattr(session.env, name))
        return partial(self._call, name) if inspect.ismethod(value) else value

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        session = self._manager.enter(renew=name == "reset")
        return self._manager.in_lane(session, lambda: getattr(session.env, name)(*args, **kwargs))

    async def _call_async(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        session = await self._manager.enter_async(renew=name == "reset_async")
        return await getattr(session.env, name)(*args, **kwargs)


class _LaneCall:
    """A function for a lane."""

    kind = "call"
    count = 1

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run(self) -> None:
        """Call the function, in the lane."""
        try:
            self.done.set_result(self._function())
        except BaseException as exc:
            self.done.set_exception(exc)


async def _enter(visitor: Visitor, *, renew: bool) -> Session:
    async with visitor.turn:
        return await visitor.enter(renew=renew)


def _run_in_thread(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a loop in a new thread, and wait for it."""
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name="openenv-web-manager").start()
    return done.result()


def _service_of(env: Any, action_cls: type[Any], observation_cls: type[Any]) -> EnvService:
    """Make a service with one session, for a manager that was built without a server."""
    factory = env
    if isinstance(env, Environment):

        def factory() -> Any:
            return env

    return EnvService(factory, ServedModels(action_cls, observation_cls), options=ServerOptions())
