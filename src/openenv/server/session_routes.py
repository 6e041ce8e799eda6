"""`/sessions`: open a session over HTTP, look at it, end it. Knows HTTP; sessions themselves are the manager's."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import OpenEnvError
from ..sessions.account import Account
from ..sessions.endings import CLOSED_BY_CLIENT
from ..sessions.session import SessionKind
from ..types import WSErrorCode
from .asgi import BODY_TOO_LARGE, BodyTooLarge, ClientGone, Receive, Scope, Send, header, read_body, while_connected
from .asgi import respond_json as answer
from .http import KEY_HEADER, SESSION_HEADER, GuessableKey, echoing, nonce_of, refuse, unprocessable
from .service import EnvService


class OpenRequest(BaseModel):
    """How to open a session.

    Args:
        wait_s: How long to wait for a slot, in seconds.
        key: Whom the session counts for, where the server limits sessions per key.
    """

    model_config = ConfigDict(extra="forbid")

    wait_s: float = Field(default=0.0, ge=0.0, le=86_400.0)
    key: str | None = Field(default=None, max_length=255)


class SessionOpened(BaseModel):
    """A session that was opened; the token lets its holder attach to it over WebSocket, from anywhere."""

    session_id: str
    token: str


class SessionRoutes:
    """The ASGI handlers of `/sessions`."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager

    async def open(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST /sessions`."""
        send = echoing(scope, send)
        try:
            body = await read_body(receive, self._service.options.max_message_bytes)
            wanted = OpenRequest.model_validate_json(body) if body.strip() else OpenRequest()
            opening = self._manager.open_once(
                SessionKind.HTTP, nonce_of(header(scope, KEY_HEADER)), wait_s=wanted.wait_s, account=Account(wanted.key)
            )
            session = await while_connected(receive, opening)
        except ClientGone:
            return
        except BodyTooLarge as exc:
            self._manager.report_error(BODY_TOO_LARGE)
            await answer(send, 413, {"detail": str(exc), "code": BODY_TOO_LARGE, "limit_bytes": exc.limit})
        except (ValidationError, GuessableKey) as exc:
            self._manager.report_error(WSErrorCode.VALIDATION_ERROR.value)
            await unprocessable(send, exc, prefix=("body" if isinstance(exc, ValidationError) else "header",))
        except OpenEnvError as exc:
            await refuse(send, exc, retry_after_s=int(self._manager.retry_after_s))
        else:
            name = (SESSION_HEADER.lower().encode(), session.id.encode())
            await answer(
                send, 201, {"session_id": session.id, "token": self._manager.attachments.token(session)}, [name]
            )

    async def describe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        try:
            session = self._manager.find(session_id)
        except OpenEnvError as exc:
            await refuse(send, exc)
            return
        info = self._manager.info(session_id)
        assert info is not None
        shown = {**info.model_dump(), "state": session.state.value, "episode": asdict(session.episode)}
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
