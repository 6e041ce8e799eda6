"""`/reset`, `/step` and `/state` over HTTP: stateful when asked, as in the contract otherwise.

`X-OpenEnv-Session: new` on `/reset` opens a session and names it in the same header of the answer; requests that send
the name continue it. A plain `/reset` sets a cookie for a soft session; a plain call without cookie runs on an
environment of its own. Knows HTTP; everything about environments is the session manager's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import (
    EnvironmentFactoryError,
    OpenEnvError,
    SessionCapacityError,
    SessionClosedError,
    SessionLost,
    SessionNotFoundError,
    message_of,
)
from ..protocol.codec import encode_state, split_observation
from ..protocol.server import error_list
from ..sessions.operations import Operation, StepInput, build_operations
from ..sessions.session import Session, SessionKind
from ..types import ResetRequest, StepRequest
from .asgi import (
    BodyTooLarge,
    ClientGone,
    HeaderList,
    Receive,
    Scope,
    Send,
    cookie,
    header,
    read_body,
    respond,
    while_connected,
)
from .asgi import respond_json as answer
from .service import EnvService

logger = logging.getLogger(__name__)

SESSION_HEADER = "X-OpenEnv-Session"
SESSION_COOKIE = "openenv_session"
_HEADER = SESSION_HEADER.lower().encode()
_NEW = "new"
_UNANSWERED = "the first reset was not answered"
_STATUS: Mapping[type[OpenEnvError], int] = {
    SessionNotFoundError: 404,
    SessionLost: 410,
    SessionClosedError: 410,
    SessionCapacityError: 503,
    EnvironmentFactoryError: 500,
}


def names_session(scope: Scope) -> bool:
    """Say whether a request is for a session of its own; all that can happen there is answered here."""
    return header(scope, _HEADER) is not None


def observation_body(observation: Any) -> bytes:
    """Encode an observation as `ResetResponse` and `StepResponse` show it: the reward as a float, metadata or null."""
    parts = split_observation(observation)
    reward = "null"
    if parts.reward is not None:
        value = float(parts.reward)
        reward = repr(value) if math.isfinite(value) else "null"
    done = "true" if parts.done else "false"
    tail = f',"reward":{reward},"done":{done},"metadata":'.encode()
    return b'{"observation":' + parts.fields + tail + (parts.metadata or b"null") + b"}"


class GymRoutes:
    """The ASGI handlers of the three Gym routes."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager
        self._operations = build_operations(observation_body, encode_state)

    async def reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /reset`."""
        body = await self._body(receive, send)
        if body is None:
            return
        try:
            request = ResetRequest.model_validate_json(body) if body.strip() else ResetRequest()
        except ValidationError as exc:
            await _unprocessable(send, exc, prefix=("body",))
            return
        kwargs = request.model_dump(exclude_unset=True)
        await self._run(scope, receive, send, self._operations.reset, kwargs, begins=True)

    async def step(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /step`."""
        body = await self._body(receive, send)
        if body is None:
            return
        if not body.strip():
            problem = {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
            await answer(send, 422, {"detail": [problem]})
            return
        try:
            request = StepRequest.model_validate_json(body)
        except ValidationError as exc:
            await _unprocessable(send, exc, prefix=("body",))
            return
        try:
            action = self._service.protocol.action(request.action)
        except Exception as exc:  # a validator may raise anything
            await _unprocessable(send, exc, prefix=())
            return
        kwargs = dict(request.model_extra or {})
        for name in request.model_fields_set - {"action"}:
            kwargs.setdefault(name, getattr(request, name))
        await self._run(scope, receive, send, self._operations.step_with, StepInput(action, kwargs))

    async def state(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /state`."""
        await self._run(scope, receive, send, self._operations.state, None)

    async def describe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        try:
            session = self._manager.find(session_id)
        except OpenEnvError as exc:
            await _refuse(send, exc)
            return
        info = self._manager.info(session_id)
        assert info is not None
        shown = {**info.model_dump(), "state": session.state.value, "episode": asdict(session.episode)}
        await answer(send, 200, shown)

    async def close(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `DELETE /sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        try:
            self._manager.find(session_id).close("closed by the client")
        except OpenEnvError as exc:
            await _refuse(send, exc)
        else:
            await answer(send, 200, {"session_id": session_id, "closed": True})

    async def _body(self, receive: Receive, send: Send) -> bytes | None:
        try:
            return await read_body(receive, self._service.options.max_message_bytes)
        except BodyTooLarge as exc:
            await answer(send, 413, {"detail": str(exc), "code": "BODY_TOO_LARGE", "limit_bytes": exc.limit})
        except ClientGone:
            pass
        return None

    async def _run(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        operation: Operation,
        argument: Any,
        *,
        begins: bool = False,
    ) -> None:
        """Find out whose environment this is for, run there, answer."""
        named = header(scope, _HEADER)
        try:
            if named is not None and named.strip().lower() == _NEW:
                await self._run_new(receive, send, operation, argument, begins=begins)
                return
            if named is not None:
                await self._run_named(self._manager.find(named), send, operation, argument)
                return
            soft = self._soft_session(scope, begins=begins)
            if soft is not None:
                await respond(send, 200, await soft.run(operation, argument))
                return
        except OpenEnvError as exc:
            await _refuse(send, exc, forget_cookie=named is None)
            return
        await self._run_plain(send, operation, argument, begins=begins)

    async def _run_named(self, session: Session, send: Send, operation: Operation, argument: Any) -> None:
        try:
            result = await session.run(operation, argument)
        except OpenEnvError:
            raise
        except Exception as exc:
            logger.exception("session %s: %s failed", session.id, operation.kind)
            await answer(send, 500, _failure(exc), _name(session))
        else:
            await respond(send, 200, result, _name(session))

    async def _run_new(
        self, receive: Receive, send: Send, operation: Operation, argument: Any, *, begins: bool
    ) -> None:
        """Open a session with its first reset; it stays if that went well and its client is there to learn its name."""
        if not begins:
            raise SessionNotFoundError(_NEW, f"'{SESSION_HEADER}: new' opens a session on POST /reset only.")
        try:
            session, result = await while_connected(receive, self._begin(operation, argument))
        except ClientGone:
            logger.info("a client left before its new session was ready")
        except OpenEnvError:
            raise
        except Exception as exc:
            logger.exception("a new session: %s failed", operation.kind)
            await answer(send, 500, _failure(exc))
        else:
            try:
                await respond(send, 200, result, _name(session))
            except BaseException:
                session.close(_UNANSWERED)
                raise

    async def _begin(self, operation: Operation, argument: Any) -> tuple[Session, Any]:
        session = await self._manager.open(SessionKind.HTTP)
        try:
            return session, await session.run(operation, argument)
        except BaseException:
            session.close(_UNANSWERED)
            raise

    def _soft_session(self, scope: Scope, *, begins: bool) -> Session | None:
        """The session that a cookie names. One that is gone is an error, except for a reset, which begins anew."""
        name = cookie(scope, SESSION_COOKIE)
        if name is None:
            return None
        try:
            return self._manager.find(name)
        except (SessionNotFoundError, SessionLost):
            if begins:
                return None
            raise

    async def _run_plain(self, send: Send, operation: Operation, argument: Any, *, begins: bool) -> None:
        """Run on an environment of its own. What it raises goes to the application, as for any route."""
        headers: HeaderList = ()
        try:
            async with self._manager.borrow() as session:
                result = await session.run(operation, argument)
                if begins and self._manager.keep_soft(session):
                    headers = [_cookie(session.id)]
        except EnvironmentFactoryError as exc:
            cause = exc.__cause__  # an exit that a constructor asks for is not the server's
            raise (cause if isinstance(cause, Exception) else exc) from None
        except OpenEnvError as exc:
            await _refuse(send, exc)
            return
        await respond(send, 200, result, headers)


def _failure(exc: Exception) -> dict[str, Any]:
    return {"detail": message_of(exc), "code": "EXECUTION_ERROR"}


def _name(session: Session) -> HeaderList:
    return [(_HEADER, session.id.encode())]


def _cookie(value: str, *, expired: bool = False) -> tuple[bytes, bytes]:
    life = "; Max-Age=0" if expired else ""
    return b"set-cookie", f"{SESSION_COOKIE}={value}; Path=/; HttpOnly; SameSite=Lax{life}".encode()


async def _refuse(send: Send, exc: OpenEnvError, *, forget_cookie: bool = False) -> None:
    headers = [_cookie("", expired=True)] if forget_cookie else []
    status = _STATUS.get(type(exc), 500)
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await answer(send, status, {"detail": str(exc), "code": exc.code, **exc.details}, headers)


async def _unprocessable(send: Send, exc: Exception, *, prefix: tuple[str, ...]) -> None:
    errors: list[dict[str, Any]] | list[ErrorDetails] = error_list(exc)
    if prefix:
        errors = [{**error, "loc": [*prefix, *error.get("loc", ())]} for error in errors]
    await answer(send, 422, {"detail": errors})
