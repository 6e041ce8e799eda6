"""The actions of a visitor: reset, step, call a tool, read the state. The page and custom pages share them.

One action at a time for each visitor. Knows sessions and environments' operations; must not know requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from openenv.env.binding import class_of
from openenv.env.environment import Environment
from openenv.env.tools.source import ToolEvents, ToolOutcome, ToolRequest
from openenv.errors import ExecutionError, OpenEnvError, SessionClosedError, SessionLost, ToolCallError, message_of
from openenv.protocol.json_values import decode, encode
from openenv.protocol.schema import deserialize_action_with_preprocessing

from ..mcp.tool_calls import NoTools, ToolOperations
from ..service import EnvService
from ..sessions.lifetime import client_reason
from ..sessions.operations import CALL
from ..sessions.session import Session
from .page_operations import RENDER, RESET, STATE, STEP, EncodedObservation, Move, Render, Scenery
from .visitors import HistoryEntry, Visitor

logger = logging.getLogger(__name__)


class UnfitAction(Exception):
    """An action does not fit the environment's model; `__cause__` says why."""


class NoState(Exception):
    """The environment cannot return its state now."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """Additions to an observation on the page: the environment's picture, and its report of the episode."""

    render: Render
    episode_id: str | None
    step_count: int | None


class VisitorActions:
    """Acts for the visitors of one served environment; `now` returns the time of history entries."""

    def __init__(self, service: EnvService, now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)) -> None:
        self._service = service
        self._now = now
        self._tools = ToolOperations(service.action_cls)

    async def reset(self, visitor: Visitor, kwargs: Mapping[str, Any]) -> EncodedObservation:
        """Begin an episode, in a new session if the last one was lost."""
        async with self._turn(visitor, renew=True) as session:
            outcome: EncodedObservation = await visitor.unless_gone(session.run(RESET, dict(kwargs), cancellable=True))
            scene = await self._scene(visitor, session, outcome)
            visitor.begin(outcome, scene.render, scene.episode_id, seed=kwargs.get("seed"))
            return outcome

    async def step(self, visitor: Visitor, fields: Mapping[str, Any]) -> EncodedObservation:
        """Take an action.

        Raises:
            UnfitAction: It does not fit the action model.
            SessionLost: The session is gone, and the episode with it.
        """
        action = self._action(fields)
        async with self._turn(visitor) as session:
            return await self._step(visitor, session, action)

    async def say(self, visitor: Visitor, message: str) -> EncodedObservation:
        """Take the action of a chat message: the result of `message_to_action`, or an action with a `message` field."""
        async with self._turn(visitor) as session:
            action = None
            if hasattr(class_of(session.env), "message_to_action"):
                action = await visitor.unless_gone(session.run(CALL, lambda env: env.message_to_action(message)))
            return await self._step(visitor, session, self._action({"message": message}) if action is None else action)

    async def _step(self, visitor: Visitor, session: Session, action: Any) -> EncodedObservation:
        shown = _action_json(action)
        taken_at, began = self._now().isoformat(), time.perf_counter()
        move = Move(action, self._events(visitor))
        outcome: EncodedObservation = await visitor.unless_gone(session.run(STEP, move, cancellable=True))
        duration_ms = (time.perf_counter() - began) * 1000
        scene = await self._scene(visitor, session, outcome)
        count = visitor.episode.step_count + 1 if scene.step_count is None else scene.step_count
        entry = HistoryEntry.of_step(taken_at, shown, outcome, step_count=count, duration_ms=duration_ms)
        visitor.stepped(entry, outcome, scene.render, episode_id=scene.episode_id, step_count=count)
        return outcome

    async def call(self, visitor: Visitor, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool and return its `result` or `error`.

        Raises:
            NoTools: It has none.
            SessionLost: The session is gone.
        """
        async with self._turn(visitor) as session:
            taken_at, began = self._now().isoformat(), time.perf_counter()
            call = ToolRequest(name, arguments, events=self._events(visitor))
            result = error = None
            try:
                value = await visitor.unless_gone(session.run(self._tools.call, call, cancellable=True))
                result = value.as_mcp() if isinstance(value, ToolOutcome) else decode(encode(value))
            except ToolCallError as exc:
                error = {"type": exc.error_type, "code": exc.code, "message": str(exc)}
            duration_ms = (time.perf_counter() - began) * 1000
            outcome = {"result": result, "error": error}
            shown = {"name": name, "arguments": arguments, **outcome}
            visitor.called(HistoryEntry.of_call(taken_at, shown, duration_ms=duration_ms))
            return outcome

    async def state(self, visitor: Visitor) -> bytes:
        """Return the state of the episode as JSON; without a session, use a new environment.

        Raises:
            SessionLost: The session is gone.
            NoState: The environment has no state now.
        """
        session = visitor.session
        if session is None and visitor.lost is not None:
            raise SessionLost(visitor.lost)
        try:
            if session is not None:
                return bytes(await visitor.unless_gone(session.run(STATE)))
            async with self._service.manager.borrow() as borrowed:
                return bytes(await borrowed.run(STATE))
        except Exception as exc:
            lost = _lost(session, exc)
            shown = lost or self._service.errors.shown(exc)
            if isinstance(exc, RuntimeError) and not isinstance(exc, OpenEnvError):
                raise NoState(message_of(shown)) from exc
            if shown is exc:
                raise
            raise shown from exc

    async def tools(self) -> list[dict[str, Any]]:
        """List the environment's tools.

        Raises:
            NoTools: It has none.
        """
        async with self._service.manager.borrow() as session:
            described: list[dict[str, Any]] = await session.run(self._tools.list)
            return described

    # -- inside ---------------------------------------------------------------------------------------------------

    def _action(self, fields: Mapping[str, Any]) -> Any:
        action_cls = self._service.action_cls
        if action_cls is None:
            return dict(fields)
        try:
            return deserialize_action_with_preprocessing(fields, action_cls)
        except Exception as exc:  # a validator may raise anything
            raise UnfitAction from exc

    @asynccontextmanager
    async def _turn(self, visitor: Visitor, *, renew: bool = False) -> AsyncIterator[Session]:
        """Act in a visitor's session; watchers see it as busy meanwhile."""
        async with visitor.turn:
            visitor.busy += 1
            session: Session | None = None
            try:
                if visitor.lost is None or renew:
                    visitor.publish_activity()
                session = await visitor.enter(renew=renew)
                yield session
            except (UnfitAction, NoTools):
                raise
            except Exception as exc:
                lost = _lost(session, exc)
                if lost is not None:
                    if visitor.session is session and session is not None:
                        visitor.lose(lost.reason)
                    raise lost from None
                shown = self._service.errors.shown(exc)
                code = shown.code if isinstance(shown, OpenEnvError) else ExecutionError.code
                visitor.publish_error(message_of(shown), code)
                if shown is exc:
                    raise
                raise shown from exc
            finally:
                visitor.busy -= 1
                visitor.touch()
                visitor.publish_activity()

    async def _scene(self, visitor: Visitor, session: Session, outcome: EncodedObservation) -> _Scene:
        """Read the state and the environment's picture, in two more calls. If they fail, the step still counts."""
        episode_id = count = None
        try:
            state = decode(await visitor.unless_gone(session.run(STATE)))
            episode_id, count = state.get("episode_id"), state.get("step_count")
        except Exception as exc:  # some environments do not always have a state
            if _lost(session, exc) is not None:
                raise
            logger.debug("session %s: the state cannot be read", session.id, exc_info=True)
        render = Render()
        try:
            if _draws(class_of(session.env)):
                render = await visitor.unless_gone(session.run(RENDER, Scenery(outcome, visitor.theme)))
        except Exception as exc:
            if _lost(session, exc) is not None:
                raise
            logger.warning("session %s: the environment's own picture cannot be shown", session.id, exc_info=True)
        if visitor.session is not session or session.is_ending:  # it ended between these calls
            raise SessionLost(client_reason(session.close_reason))
        return _Scene(
            render, None if episode_id is None else str(episode_id), count if isinstance(count, int) else None
        )

    def _events(self, visitor: Visitor) -> ToolEvents:
        def on_progress(progress: float, total: float | None, message: str | None) -> None:
            data = {"event": "progress", "progress": progress, "total": total, "message": message}
            visitor.publish_event(data, self._now().isoformat())

        def on_log(level: str, name: str | None, data: Any) -> None:
            message = {"event": "log", "level": level, "logger": name, "data": data}
            visitor.publish_event(message, self._now().isoformat())

        return ToolEvents(on_progress, on_log)


def _draws(env_cls: type[Any]) -> bool:
    """Return whether an environment class overrides `render_web` or `web_actions`."""
    return any(
        getattr(env_cls, hook, None) is not getattr(Environment, hook) and hasattr(env_cls, hook)
        for hook in ("render_web", "web_actions")
    )


def _lost(session: Session | None, exc: Exception) -> SessionLost | None:
    """Return the session's end if that is why a call failed.

    An environment may be a client itself and raise the same classes: then its session goes on.
    """
    if isinstance(exc, SessionLost) and session is None:
        return exc
    if session is not None and session.is_ending and isinstance(exc, (SessionClosedError, SessionLost)):
        return SessionLost(client_reason(session.close_reason))
    return None


def _action_json(action: Any) -> bytes:
    fields = decode(encode(action))
    if isinstance(fields, dict):
        fields.pop("metadata", None)
    return encode(fields)
