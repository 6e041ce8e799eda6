"""`/reset`, `/step`, `/state` and `/sessions`, copies of them too, over HTTP (docs/reference/protocol.md, HTTP).

    X-OpenEnv-Session: new  on POST /reset --> opens a session; its name comes back in the same header
    X-OpenEnv-Session: NAME               --> continues that session; 404 unknown, 410 ended
    cookie openenv_session                --> a soft session, kept since a plain /reset while slots are free
    none of these                         --> a new environment for this one call, as in the published package

An `Idempotency-Key` makes a request repeatable: a second request with the same key gets the first reply and does not
run.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from openenv.errors import (
    EnvironmentFactoryError,
    NotForkable,
    OpenEnvError,
    RequestValidationError,
    SessionCapacityError,
    SessionClosedError,
    SessionElsewhere,
    SessionLost,
    SessionNotFoundError,
    StaleRequest,
    message_of,
)
from openenv.protocol.json_values import TooManyValues, encode, encode_state, encode_with_null, split_observation
from openenv.protocol.server_v1 import ECHO_LIMIT, error_list
from openenv.protocol.server_v2 import NONCE_CHARS
from openenv.types import ResetRequest, StepRequest, WSErrorCode

from .asgi import (
    BODY_TOO_LARGE,
    BodyTooLarge,
    ClientGone,
    HeaderList,
    Receive,
    Scope,
    Send,
    cookie,
    header,
    origin_of,
    read_body,
    respond,
    respond_too_large,
    set_cookie,
    while_connected,
)
from .asgi import respond_json as answer
from .author_frames import author_exc_info
from .service import EnvService
from .sessions.events import RequestOrigin
from .sessions.ledger import LedgerEntry
from .sessions.lifetime import CLOSED_BY_CLIENT, UNANSWERED
from .sessions.manager import SessionManager
from .sessions.operations import FORK, RESTORE, Operation, StepInput, build_operations
from .sessions.session import Session, SessionKind, with_hint

logger = logging.getLogger(__name__)
RequestT = TypeVar("RequestT", bound=BaseModel)

SESSION_HEADER = "X-OpenEnv-Session"
SESSION_COOKIE = "openenv_session"
_HEADER = SESSION_HEADER.lower().encode()
KEY_HEADER = b"idempotency-key"
BODY = "openenv.body"
_NEW = "new"
_HOW_TO_CONTINUE = f"send the cookie of POST /reset along, or {SESSION_HEADER}, for a session"
_STATUS: Mapping[type[OpenEnvError], int] = {
    SessionNotFoundError: 404,
    SessionElsewhere: 421,  # RFC 9110, 15.5.20: misdirected; another connection may reach the right process
    SessionLost: 410,
    SessionClosedError: 410,
    StaleRequest: 409,
    SessionCapacityError: 503,
    NotForkable: 409,
    RequestValidationError: 422,
    EnvironmentFactoryError: 500,
}


def names_session(scope: Scope) -> bool:
    """Return whether a request names a session. Then this module answers all failures; none reaches the application."""
    return header(scope, _HEADER) is not None


def observation_body(observation: Any) -> bytes:
    """Encode an observation as `ResetResponse` and `StepResponse` do: the reward as a float, metadata or null.

    Raises:
        NonFiniteReward: The reward is not a finite number; `reply` has the body with null.
    """
    return encode_with_null(_observation_body, observation)


def _observation_body(observation: Any, *, null_reward: bool = False) -> bytes:
    parts = split_observation(observation, null_reward=null_reward)
    reward = "null"
    if parts.reward is not None:
        value = float(parts.reward)
        reward = repr(value) if math.isfinite(value) else "null"
    done = "true" if parts.done else "false"
    tail = f',"reward":{reward},"done":{done},"metadata":'.encode()
    return b'{"observation":' + parts.fields + tail + (parts.metadata or b"null") + b"}"


@dataclass(slots=True)
class GymCall:
    """The operation of one request, and the key for repeating it."""

    operation: Operation
    argument: Any
    key: RequestKey | None
    origin: RequestOrigin | None

    @property
    def begins(self) -> bool:
        """Whether it begins an episode."""
        return self.operation.kind == "reset"

    async def run(self, session: Session) -> Any:
        """Run it in a session; that of a single request ends with it, unless a reset makes it a soft one."""
        is_last = session.kind is SessionKind.ONCE and not self.begins
        return await session.run(self.operation, self.argument, is_last=is_last, origin=self.origin)


class GymRoutes:
    """The ASGI handlers of the three Gym routes, and of copies of a session."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager
        self._operations = build_operations(observation_body, encode_state)

    async def reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /reset`."""
        send = echoing(scope, send)
        body = await _body(self._service, receive, send)
        if body is None:
            return
        scope[BODY] = body
        try:
            request = ResetRequest.model_validate_json(body) if body.strip() else ResetRequest()
        except ValidationError as exc:
            await self._refuse_body(send, exc, prefix=("body",), size=len(body))
            return
        await self._run(scope, receive, send, self._operations.reset, request.model_dump(exclude_unset=True))

    async def step(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /step`."""
        send = echoing(scope, send)
        body = await _body(self._service, receive, send)
        if body is None:
            return
        scope[BODY] = body
        if not body.strip():
            problem = {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
            self._manager.report_error(WSErrorCode.VALIDATION_ERROR.value)
            await answer(send, 422, {"detail": [problem]})
            return
        try:
            request = StepRequest.model_validate_json(body)
        except ValidationError as exc:
            await self._refuse_body(send, exc, prefix=("body",), size=len(body))
            return
        try:
            action = self._service.protocol.action(request.action)
        except Exception as exc:  # a validator may raise anything
            await self._refuse_body(send, exc, prefix=(), size=len(body))
            return
        kwargs = dict(request.model_extra or {})
        for name in request.model_fields_set - {"action"}:
            kwargs.setdefault(name, getattr(request, name))
        await self._run(scope, receive, send, self._operations.step_with, StepInput(action, kwargs))

    async def state(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /state`."""
        await self._run(scope, receive, echoing(scope, send), self._operations.state, None)

    async def fork(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /sessions/{session_id}/fork`."""

        def work(session: Session, request: ForkRequest) -> Callable[[], Awaitable[bytes]]:
            forking = self._manager.forking(session, request.n, kind=SessionKind.HTTP, wait_s=request.wait_s)

            async def fork() -> bytes:
                token = self._manager.attachments.token
                return encode({"sessions": [{"session_id": one.id, "token": token(one)} for one in await forking()]})

            return fork

        await self._run_copying(scope, receive, send, ForkRequest, FORK, work)

    async def restore(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /sessions/{session_id}/restore`."""

        def work(session: Session, request: RestoreRequest) -> Callable[[], Awaitable[bytes]]:
            restoring = self._manager.restoring(session, request.token)

            async def restore() -> bytes:
                await restoring()
                return encode({"session_id": session.id, "restored": True})

            return restore

        await self._run_copying(scope, receive, send, RestoreRequest, RESTORE, work)

    async def _run_copying(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        model: type[RequestT],
        operation: Operation,
        work: Callable[[Session, RequestT], Callable[[], Awaitable[bytes]]],
    ) -> None:
        send = echoing(scope, send)
        body = await _body(self._service, receive, send)
        if body is None:
            return
        scope[BODY] = body
        try:
            request = model.model_validate_json(body or b"{}")
            session = self._manager.find(scope["path_params"]["session_id"])
        except ValidationError as exc:
            await self._refuse_body(send, exc, prefix=("body",), size=len(body))
        except OpenEnvError as exc:
            await refuse(send, exc)
        else:
            call = GymCall(operation, work(session, request), request_key(scope), None)
            status, reply = await self._run_once(session, call)
            await respond(send, status, reply, _name(session))

    async def _refuse_body(self, send: Send, exc: Exception, *, prefix: tuple[str, ...], size: int = 0) -> None:
        self._manager.report_error(WSErrorCode.VALIDATION_ERROR.value)
        await unprocessable(send, exc, prefix=prefix, echo_input=size <= ECHO_LIMIT)

    async def _run(self, scope: Scope, receive: Receive, send: Send, operation: Operation, argument: Any) -> None:
        """Find the request's session, run the operation there, answer."""
        key = None if operation.kind == "state" else request_key(scope, argument)  # reading the state needs no key
        origin = origin_of(scope, _key_name(scope, argument)) if self._manager.wants_origins else None
        call = GymCall(operation, argument, key, origin)
        named = header(scope, _HEADER)
        try:
            if named is not None and named.strip().lower() == _NEW:
                await self._run_new(call, receive, send)
                return
            if named is not None:
                session = self._manager.find(named)
                status, body = await self._run_once(session, call)
                await respond(send, status, body, _name(session))
                return
            soft = self._soft_session(scope, call)
            if soft is not None:
                await respond(send, 200, await call.run(soft))
                return
        except OpenEnvError as exc:
            is_gone = named is None and not isinstance(exc, SessionElsewhere)
            await refuse(send, self._service.errors.shown(exc), forget_cookie=is_gone)
            return
        await self._run_plain(call, send)

    async def _run_once(self, session: Session, call: GymCall) -> tuple[int, bytes]:
        """Run a request, or return the first reply if its key is a repetition."""
        if call.key is None:
            return await self._outcome(session, call)
        try:
            entry = kept_entry(self._manager, session, call.key)
        except KeyReused as exc:
            return 422, encode(described(exc))
        if entry is not None:
            return await kept_reply(entry)
        entry = session.ledger.begin(call.key.name, call.key.digest)
        # Run in a separate task: the first request may be cancelled while repetitions wait for the same result.
        return await asyncio.shield(asyncio.ensure_future(self._finish(entry, session, call)))

    async def _finish(self, entry: LedgerEntry, session: Session, call: GymCall) -> tuple[int, bytes]:
        status, body = await self._outcome(session, call)
        session.ledger.finish(entry, (status, body), len(body))
        return status, body

    async def _outcome(self, session: Session, call: GymCall) -> tuple[int, bytes]:
        try:
            return 200, await call.run(session)
        except OpenEnvError as exc:  # the session has ended, or the environment is a client itself
            shown = self._service.errors.shown(exc)
            return _STATUS.get(type(shown), 500), encode(described(shown))
        except Exception as exc:
            kind = call.operation.kind
            logger.error("session %s: %s failed", session.id, kind, exc_info=author_exc_info(exc))
            return 500, encode(_failure(with_hint(self._service.errors.shown(exc), session, kind)))

    async def _run_new(self, call: GymCall, receive: Receive, send: Send) -> None:
        """Open a session with its first reset. Keep it if the reset succeeds and the client receives its name."""
        if not call.begins:
            self._manager.report_error(SessionNotFoundError.code)
            raise SessionNotFoundError(_NEW, f"'{SESSION_HEADER}: new' opens a session on POST /reset only.")
        if call.key is not None:
            await self._run_new_once(call, call.key, receive, send)
            return
        try:
            session, result = await while_connected(receive, self._begin(call))
        except ClientGone:
            logger.info("a client left before its new session was ready")
        except OpenEnvError:
            raise
        except Exception as exc:
            logger.error("a new session: reset failed", exc_info=author_exc_info(exc))
            await answer(send, 500, _failure(self._service.errors.shown(exc)))
        else:
            try:
                await respond(send, 200, result, _name(session))
            except BaseException:
                session.close(UNANSWERED)
                raise

    async def _run_new_once(self, call: GymCall, key: RequestKey, receive: Receive, send: Send) -> None:
        """Open a session with a key: a client that repeats the request gets the same session."""
        try:
            opening = self._manager.open_once(SessionKind.HTTP, nonce_of(key.name))
            session = await while_connected(receive, opening)
        except ClientGone:
            return
        except GuessableKey as exc:
            await self._refuse_body(send, exc, prefix=("header",))
            return
        status, body = await self._run_once(session, call)
        if status not in (200, 422):  # an invalid request says nothing about the session
            session.close(UNANSWERED)
        await respond(send, status, body, _name(session) if status == 200 else ())

    async def _begin(self, call: GymCall) -> tuple[Session, Any]:
        session = await self._manager.open(SessionKind.HTTP)
        try:
            return session, await call.run(session)
        except BaseException:
            session.close(UNANSWERED)
            raise

    def _soft_session(self, scope: Scope, call: GymCall) -> Session | None:
        """Return the session named in the cookie; a lost session is an error, except for a reset."""
        name = cookie(scope, SESSION_COOKIE)
        if name is None:
            return None
        try:
            return self._manager.find(name)
        except (SessionNotFoundError, SessionLost):
            if call.begins:
                return None
            raise

    async def _run_plain(self, call: GymCall, send: Send) -> None:
        """Run on a new environment. Exceptions go to the application, as for any route."""
        headers: HeaderList = ()
        try:
            async with self._manager.borrow(is_built=False) as session:
                result = await call.run(session)
                if call.begins and self._manager.keep_soft(session):
                    headers = [set_cookie(SESSION_COOKIE, session.id)]
        except EnvironmentFactoryError as exc:
            cause = exc.__cause__  # `sys.exit` in a constructor must not end the server
            raise (cause if isinstance(cause, Exception) else exc) from None
        except OpenEnvError as exc:
            await refuse(send, self._service.errors.shown(exc))
            return
        except Exception:
            if not call.begins:
                text = "%s failed on a new environment that was never reset: %s"
                logger.warning(text, call.operation.kind, _HOW_TO_CONTINUE)
            raise
        await respond(send, 200, result, headers)


async def _body(service: EnvService, receive: Receive, send: Send) -> bytes | None:
    """Read a request's body; None if it is too large, which is answered here, or if the client is gone."""
    try:
        body = await read_body(receive, service.options.max_message_bytes)
        try:
            service.value_limit.check(body)
        except TooManyValues as exc:
            raise BodyTooLarge(service.options.max_message_bytes, f"The body holds {exc}") from None
        return body
    except BodyTooLarge as exc:
        service.manager.report_error(BODY_TOO_LARGE)
        await respond_too_large(send, exc)
    except ClientGone:
        pass
    return None


class KeyReused(OpenEnvError):
    """A different request reuses an idempotency key. The first reply would look like an answer to it."""

    code = "KEY_REUSED"

    def __init__(self) -> None:
        super().__init__("The key is that of another request of this session: each request that differs needs its own.")


def kept_entry(manager: SessionManager, session: Session, key: RequestKey) -> LedgerEntry | None:
    """Return the first request with a key, or None for a new one.

    Raises:
        KeyReused: The first request was a different one.
        StaleRequest: The reply is no longer stored.
    """
    try:
        entry = session.ledger.find(key.name)
        if entry is not None and entry.request != key.digest:
            raise KeyReused
    except (KeyReused, StaleRequest) as exc:
        manager.report_error(exc.code, session)
        raise
    return entry


async def kept_reply(entry: LedgerEntry) -> tuple[int, bytes]:
    """Return status and body of the first reply to a key; wait for it if the request still runs."""
    reply: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
    entry.on_reply(lambda kept: None if reply.done() else reply.set_result(kept))
    return await reply


class GuessableKey(ValueError):
    """The key of a request for a session is too short: another client could guess it and get the session."""


def nonce_of(key: str | None) -> str | None:
    """Return the nonce for opening a session, from the key of the request.

    Raises:
        GuessableKey: The key is too short or too long.
    """
    shortest, longest = NONCE_CHARS
    if key is not None and not shortest <= len(key) <= longest:
        raise GuessableKey(f"Idempotency-Key: expected {shortest} to {longest} characters that cannot be guessed")
    return None if key is None else f"http {key}"


class RequestKey(NamedTuple):
    """The client's idempotency key, and a digest of the request to detect a reused key."""

    name: str
    digest: bytes


def request_key(scope: Scope, argument: Any = None) -> RequestKey | None:
    """Return the key of a request, if it has one; the scope must contain its body."""
    name = _key_name(scope, argument)
    if name is None:
        return None
    return RequestKey(name, hashlib.sha256(scope["path"].encode() + b"\n" + scope.get(BODY, b"")).digest())


def _key_name(scope: Scope, argument: Any) -> str | None:
    named = header(scope, KEY_HEADER)
    if named is None and isinstance(argument, StepInput):
        request_id = argument.kwargs.get("request_id")
        return request_id if isinstance(request_id, str) else None
    return named


def echoing(scope: Scope, send: Send) -> Send:
    """Return a `send` that adds the request's key to the reply, so that a client can match them."""
    key = header(scope, KEY_HEADER)
    if key is None:
        return send
    named = (KEY_HEADER, key.encode("latin-1"))

    async def send_named(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], named]
        await send(message)

    return send_named


def _name(session: Session) -> HeaderList:
    return [(_HEADER, session.id.encode())]


def described(exc: OpenEnvError) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"detail": str(exc), "code": exc.code, **exc.details}


def _failure(shown: BaseException) -> dict[str, Any]:
    details = shown.details if isinstance(shown, OpenEnvError) else {}
    return {"detail": message_of(shown), "code": "EXECUTION_ERROR", **details}


async def refuse(send: Send, exc: OpenEnvError, *, forget_cookie: bool = False, retry_after_s: int = 1) -> None:
    """Answer with a framework error."""
    headers = [set_cookie(SESSION_COOKIE, None)] if forget_cookie else []
    status = _STATUS.get(type(exc), 500)
    if status == 503:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await answer(send, status, described(exc), headers)


async def unprocessable(send: Send, exc: Exception, *, prefix: tuple[str, ...], echo_input: bool = True) -> None:
    """Answer 422 for an invalid body or header."""
    errors: list[dict[str, Any]] | list[ErrorDetails] = error_list(exc, echo_input=echo_input)
    if prefix:
        errors = [{**error, "loc": [*prefix, *error.get("loc", ())]} for error in errors]
    await answer(send, 422, {"detail": errors})


class OpenRequest(BaseModel):
    """How to open a session.

    Args:
        wait_s: How long to wait for a slot, in seconds.
        key: Accepted, and without effect.
    """

    model_config = ConfigDict(extra="forbid")

    wait_s: float = Field(default=0.0, ge=0.0, le=86_400.0)
    key: str | None = Field(default=None, max_length=255)


class SessionOpened(BaseModel):
    """A new session; clients with the token can attach to it over WebSocket."""

    session_id: str
    token: str


class ForkRequest(BaseModel):
    """How to copy a session.

    Args:
        n: The number of copies.
        wait_s: How long to wait for their slots, in seconds.
    """

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=1, ge=1, le=10_000)
    wait_s: float = Field(default=0.0, ge=0.0, le=86_400.0)


class SessionForked(BaseModel):
    """Copies of a session, at the same point of the episode."""

    sessions: list[SessionOpened]


class RestoreRequest(BaseModel):
    """The token of the session to copy the state from."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=1024)


class SessionRestored(BaseModel):
    """A session that has taken over the state of another one."""

    session_id: str
    restored: bool


class SessionRoutes:
    """The ASGI handlers of `/sessions`."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager

    async def open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /sessions`."""
        send = echoing(scope, send)
        body = await _body(self._service, receive, send)
        if body is None:
            return
        try:
            options = OpenRequest.model_validate_json(body) if body.strip() else OpenRequest()
            nonce = nonce_of(header(scope, KEY_HEADER))
            opening = self._manager.open_once(SessionKind.HTTP, nonce, wait_s=options.wait_s)
            session = await while_connected(receive, opening)
        except ClientGone:
            return
        except (ValidationError, GuessableKey) as exc:
            self._manager.report_error(WSErrorCode.VALIDATION_ERROR.value)
            await unprocessable(send, exc, prefix=("body" if isinstance(exc, ValidationError) else "header",))
        except OpenEnvError as exc:
            await refuse(send, exc, retry_after_s=int(self._manager.retry_after_s))
        else:
            opened = {"session_id": session.id, "token": self._manager.attachments.token(session)}
            await answer(send, 201, opened, _name(session))

    async def describe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        try:
            session = self._manager.abandoned.get(session_id) or self._manager.find(session_id)
        except OpenEnvError as exc:
            await refuse(send, exc)
            return
        info = self._manager.info(session_id)
        assert info is not None
        shown = {**info.model_dump(), "state": session.state.value, "episode": session.episode.fields()}
        await answer(send, 200, shown)

    async def close(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `DELETE /sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        try:
            self._manager.find(session_id).close(CLOSED_BY_CLIENT)
        except OpenEnvError as exc:
            await refuse(send, exc)
        else:
            await answer(send, 200, {"session_id": session_id, "closed": True})
