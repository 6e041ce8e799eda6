"""How sessions come to a v2 connection: opened anew, perhaps after waiting, or resumed with their token.

A request that is repeated, on this connection or on another one, gets the session that it has opened. Knows the
manager and requests; must not know sockets or encodings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import (
    Forbidden,
    OpenEnvError,
    RequestCancelled,
    SessionCapacityError,
    StaleRequest,
)
from ..protocol.v2.server import Request
from ..runners import Hub
from ..sessions.endings import DISCONNECTED
from ..sessions.session import Holder, Session, SessionKind
from .access import Role, account_of
from .service import EnvService

logger = logging.getLogger(__name__)

_MOST_OPENED = 1024  # whose ids are kept


class Entering(Holder, Protocol):
    """A connection, as far as its sessions are concerned."""

    sessions: dict[str, Session]

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        ...

    @property
    def has_said_goodbye(self) -> bool:
        """Whether the client has ended it itself."""
        ...

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send something that is no answer to a call."""
        ...

    def send_error(self, request: Request, exc: BaseException) -> None:
        """Say that a request failed."""
        ...


class Entrance:
    """Answers `open` on one connection."""

    def __init__(self, connection: Entering, service: EnvService, hub: Hub, role: Role) -> None:
        self._connection = connection
        self._service = service
        self._manager = service.manager
        self._hub = hub
        self._role = role
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._opened_as: dict[int, str] = {}

    def is_opening(self, request_id: int) -> bool:
        """Whether a session is being opened for a request."""
        return request_id in self._opening

    def cancel(self, request_id: int) -> bool:
        """Give up a session that is being opened."""
        return self._opening[request_id].cancel()

    def leave(self) -> None:
        """Give up all that are being opened: the connection is gone."""
        for task in self._opening.values():
            task.cancel()

    def open(self, request: Request) -> None:
        """Resume a session, or open one; the answer comes when it is there.

        Raises:
            OpenEnvError: That cannot be.
        """
        given = request.extra or {}
        resume = given.get("resume")
        if isinstance(resume, str):
            session = self._manager.attachments.claimed(resume)
            if self._role is Role.AGENT and not session.account.is_agent:
                raise Forbidden(self._role.value)  # the replies that are kept for its owner show rewards
            self._manager.attachments.reattach(session, self._connection)
            self._connection.sessions[session.id] = session
            self._opened(request, session, resumed=True)
            return
        if request.id in self._opening:  # sent twice: one answer is for both
            return
        if request.id in self._opened_as:
            self._open_again(request)
            return
        known = self._manager.openings.find(self._nonce(given))
        if known is not None:
            self._hold(request, known)
            return
        task = self._hub.loop.create_task(self._open_new(request, given))
        self._opening[request.id] = task
        task.add_done_callback(lambda task: self._ended(request, task))

    def _ended(self, request: Request, task: asyncio.Task[None]) -> None:
        self._opening.pop(request.id, None)
        if task.cancelled() and not self._connection.is_lost:  # before it had begun, or it would have said so itself
            self._connection.send_error(request, RequestCancelled())

    def _nonce(self, given: Mapping[str, Any]) -> str | None:
        """What a client calls its session before it knows the token; an agent cannot mean an orchestrator's."""
        nonce = given.get("nonce")
        return f"{self._role.value} {nonce}" if isinstance(nonce, str) else None

    async def _open_new(self, request: Request, given: Mapping[str, Any]) -> None:
        wait_s, key = given.get("wait_s"), given.get("key")
        connection = self._connection
        told: list[int] = []

        def on_position(position: int) -> None:
            if not told or told[-1] != position:
                told.append(position)
                connection.send_message({"type": "event", "id": request.id, "event": "queued", "position": position})

        opening = self._manager.openings.begin(
            self._nonce(given),
            lambda opening: self._manager.open_in_turn(
                SessionKind.RESUMABLE,
                wait_s=float(wait_s) if isinstance(wait_s, (int, float)) else 0.0,
                account=account_of(self._role, key if isinstance(key, str) else None),
                on_position=opening.tell_position,
                on_reserved=opening.reserved,
            ),
        )
        try:
            session = await opening.wait(on_position)
        except asyncio.CancelledError:
            opening.leave(is_final=not connection.is_lost or connection.has_said_goodbye)
            if not connection.is_lost:
                connection.send_error(request, RequestCancelled())
                return
            raise
        except SessionCapacityError as exc:
            later = self._manager.retry_after_s
            told_when = SessionCapacityError(exc.active_sessions, exc.max_sessions, str(exc), retry_after_s=later)
            connection.send_error(request, told_when)
            return
        except OpenEnvError as exc:
            connection.send_error(request, exc)
            return
        except Exception as exc:  # whatever it is, whoever waits must be told
            logger.exception("a session could not be opened")
            connection.send_error(request, self._service.errors.shown(exc))
            return
        if connection.is_lost:
            if not opening.is_kept:  # nobody has learnt its token
                session.close(DISCONNECTED)
            return
        self._hold(request, session)

    def _hold(self, request: Request, session: Session) -> None:
        """Answer with a session that was opened by this request, here or on a connection that is gone."""
        if session.holder is None and not session.ledger.last_id:
            self._manager.attachments.hold(session, self._connection)
        else:
            self._manager.attachments.reattach(session, self._connection)
        self._connection.sessions[session.id] = session
        self._opened_as[request.id] = session.id
        if len(self._opened_as) > _MOST_OPENED:
            del self._opened_as[next(iter(self._opened_as))]
        self._opened(request, session, resumed=False)

    def _open_again(self, request: Request) -> None:
        """Answer a repeated request with the session that it has opened."""
        session = self._connection.sessions.get(self._opened_as[request.id])
        if session is None:
            raise StaleRequest(request.id, max(self._opened_as))
        self._opened(request, session, resumed=False)

    def _opened(self, request: Request, session: Session, *, resumed: bool) -> None:
        message = {
            "type": "opened",
            "id": request.id,
            "session": session.id,
            "token": self._manager.attachments.token(session),
            "resumed": resumed,
            "last_id": session.ledger.last_id,
            "grace_s": self._manager.limits.grace_s,
        }
        self._connection.send_message(message)
