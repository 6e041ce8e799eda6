"""`WebInterfaceManager`: what custom pages are given to play with an environment.

It plays as the visitor that everybody without a cookie is, so what it does is seen on `/ws/ui`, and the other way
round. Its attributes and methods are those that pages written for the interface use, a few with a leading underscore
among them. Knows visitors and play; must not know Gradio.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, TypeVar

from ..env.binding import RemoteEnvironment
from ..env.environment import Environment
from ..errors import SessionLost
from ..protocol.json_values import decode
from ..server.options import ServerOptions
from ..server.service import EnvService
from ..sessions.lifetime import client_reason
from ..sessions.operations import read_state
from ..sessions.session import Session, SessionState
from ..types import EnvironmentMetadata
from .page_description import load_environment_metadata
from .page_operations import EncodedObservation
from .visitor_actions import UnfitAction, VisitorActions
from .visitors import MAX_ENTRIES, ActionLog, EpisodeState, Visitor, Visitors

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOK_S = 1.0


class WebInterfaceManager:
    """Plays with one environment for a custom page.

    Args:
        env: The environment, or what makes it.
        action_cls: The action model.
        observation_cls: The observation model.
        metadata: What is known of the environment.
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
        self._service, self._visitors, self._play = served
        self._instance = env if isinstance(env, Environment) else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outside: set[asyncio.Task[None]] = set()

    @property
    def env(self) -> Any:
        """The environment that is played with; what is called on it runs where its code runs."""
        return self._instance if self._instance is not None else SharedEnvironment(self)

    async def reset_environment(self, reset_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin an episode and return `observation`, `reward` and `done`."""
        outcome = await self._on_own_loop(self._reset(reset_kwargs or {}))
        payload: dict[str, Any] = decode(outcome.payload)
        return payload

    async def step_environment(self, action_data: dict[str, Any]) -> dict[str, Any]:
        """Take an action and return `observation`, `reward` and `done`.

        Raises:
            pydantic.ValidationError: The action does not fit.
            SessionLost: The session is gone; a reset begins a new one.
        """
        try:
            outcome = await self._on_own_loop(self._step(action_data))
        except UnfitAction as exc:
            raise exc.__cause__ or exc from None
        payload: dict[str, Any] = decode(outcome.payload)
        return payload

    def get_state(self) -> dict[str, Any]:
        """Return the environment's state as a dict."""
        state = self.read_state()
        return dict(state.model_dump() if hasattr(state, "model_dump") else state)

    def read_state(self) -> Any:
        """Return the environment's state."""
        session = self.enter()
        if isinstance(session.env, RemoteEnvironment):
            return self._service.state_cls.model_validate(decode(self.run(self._play.state(self.visitor))))
        return self.in_lane(session, lambda: read_state(session.env))

    # -- sockets of custom pages ----------------------------------------------------------------------------------

    async def connect_websocket(self, websocket: Any) -> None:
        """Accept a socket and show it the episode, now and after each change."""
        await websocket.accept()
        self.connected_clients.append(websocket)
        await self._send_state_update()

    async def disconnect_websocket(self, websocket: Any) -> None:
        """Forget a socket."""
        if websocket in self.connected_clients:
            self.connected_clients.remove(websocket)

    async def _send_state_update(self) -> None:
        """Show the episode to all sockets; one that fails is forgotten."""
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
        """Run blocking code away from the event loop."""
        return await asyncio.to_thread(func, *args, **kwargs)

    # -- Watcher --------------------------------------------------------------------------------------------------

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Take note of what happens to the episode, whoever has done it."""
        if not is_state:
            return
        told = decode(frame)
        if told["type"] == "reset":
            self.episode_state = EpisodeState(
                episode_id=told["episode_id"], step_count=0, current_observation=told["observation"]
            )
        else:
            self._add(visitor, told["entry"])
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

    def leave(self, reason: str) -> None:
        """Nothing more will come."""

    # -- where things run -----------------------------------------------------------------------------------------

    @property
    def visitor(self) -> Visitor:
        """Whom this plays as."""
        visitor = self._visitors.shared
        visitor.watchers.add(self)
        return visitor

    async def _reset(self, kwargs: dict[str, Any]) -> EncodedObservation:
        return await self._play.reset(self._here(), kwargs)

    async def _step(self, fields: dict[str, Any]) -> EncodedObservation:
        return await self._play.step(self._here(), fields)

    def _here(self) -> Visitor:
        """Note the loop that the visitor lives on."""
        self._loop = asyncio.get_running_loop()
        self._visitors.of(None)
        return self.visitor

    def began(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the loop of the server, which is up now."""
        self._loop = loop
        self._visitors.of(None)
        self.visitor.watchers.add(self)

    async def _on_own_loop(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something on the server's loop, also where a custom page has one of its own."""
        loop = self._loop
        if loop is None or not loop.is_running() or loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do something on the server's loop, from synchronous code.

        Raises:
            RuntimeError: The caller is on that loop, which would wait for itself.
        """
        loop = self._loop
        if loop is not None and loop.is_running():
            if asyncio._get_running_loop() is loop:
                work.close()
                raise RuntimeError("this waits for the server's event loop: call it from a thread, or await it")
            return asyncio.run_coroutine_threadsafe(work, loop).result()
        return _apart(work)

    def enter(self, *, anew: bool = False) -> Session:
        """Return the session that is played in, opened if there is none yet.

        Args:
            anew: Whether one that was lost may be replaced.

        Raises:
            SessionLost: It was, and may not.
        """
        visitor = self.visitor
        session = visitor.session
        if session is not None and not session.is_ending:
            visitor.touch()
            return session
        if self._loop is not None and asyncio._get_running_loop() is self._loop:
            return _apart(visitor.enter(anew=anew))  # blocks the loop as the constructor would, and not for ever
        return self.run(_enter(visitor, anew=anew))

    async def enter_async(self, *, anew: bool = False) -> Session:
        """Do the same, from a coroutine."""
        return await self._on_own_loop(_enter(self.visitor, anew=anew))

    @property
    def env_cls(self) -> type[Any] | None:
        """The environment's class, once it is known."""
        return self._service.manager.env_cls

    def in_lane(self, session: Session, function: Callable[[], _T]) -> _T:
        """Run something where a session's blocking code runs, and wait for it.

        Raises:
            SessionLost: The session has ended before it could run.
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
                if session.state is SessionState.CLOSED:
                    raise SessionLost(client_reason(session.close_reason)) from None


class SharedEnvironment:
    """Stands for the environment that a custom page plays with: attributes are read and methods called in its lane."""

    _manager: WebInterfaceManager

    def __init__(self, manager: WebInterfaceManager) -> None:
        self.__dict__["_manager"] = manager

    def __repr__(self) -> str:
        return f"<environment of {self._manager.metadata.name}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A method need not be looked for in an environment: a coroutine may hand it to a thread that then calls it.
        found = inspect.getattr_static(self._manager.env_cls, name, None)
        if inspect.iscoroutinefunction(found):
            return partial(self._call_async, name)
        if inspect.isfunction(found):
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
        found = manager.in_lane(session, lambda: getattr(session.env, name))
        return partial(self._call, name) if inspect.ismethod(found) else found

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        session = self._manager.enter(anew=name == "reset")
        return self._manager.in_lane(session, lambda: getattr(session.env, name)(*args, **kwargs))

    async def _call_async(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        session = await self._manager.enter_async(anew=name == "reset_async")
        return await getattr(session.env, name)(*args, **kwargs)


class _LaneCall:
    """A piece of work for a lane."""

    kind = "call"
    count = 1

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run(self) -> None:
        """Do it, in the lane."""
        try:
            self.done.set_result(self._function())
        except BaseException as exc:
            self.done.set_exception(exc)


async def _enter(visitor: Visitor, *, anew: bool) -> Session:
    async with visitor.turn:
        return await visitor.enter(anew=anew)


def _apart(work: Coroutine[Any, Any, _T]) -> _T:
    """Do something on a loop of its own, and wait for it."""
    done: concurrent.futures.Future[_T] = concurrent.futures.Future()
    threading.Thread(target=_run_apart, args=(work, done), name="openenv-web-manager").start()
    return done.result()


def _run_apart(work: Coroutine[Any, Any, Any], done: concurrent.futures.Future[Any]) -> None:
    try:
        done.set_result(asyncio.run(work))
    except BaseException as exc:
        done.set_exception(exc)


def _service_of(env: Any, action_cls: type[Any], observation_cls: type[Any]) -> EnvService:
    """Serve an environment to nobody but the manager that was given it."""
    factory = env
    if isinstance(env, Environment):

        def factory() -> Any:
            return env

    return EnvService(
        factory,
        action_cls=action_cls,
        observation_cls=observation_cls,
        state_cls=None,
        reset_observation_cls=None,
        env_name=None,
        options=ServerOptions(),
    )
