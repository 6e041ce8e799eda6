"""`open` of protocol v2 (docs/protocol.md, 4 and 5): opens a session, perhaps after waiting, or resumes one.

Separate from `ws_v2.py` because steps do not pass here. The replies to an `open`:

    open ---- resume=TOKEN -----> attached to its session: resumed
          |-- a repeated id ----> the same reply again (or none, while the first request runs)
          |-- a repeated nonce -> the session that was opened on an earlier connection
          +-- otherwise --------> queued events while it waits for a slot --> opened, or an error
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openenv.errors import Forbidden, OpenEnvError, RequestCancelled, SessionCapacityError, StaleRequest
from openenv.protocol.server_v2 import Request

from .access import Role
from .sessions.lifetime import DISCONNECTED
from .sessions.session import Session, SessionKind

if TYPE_CHECKING:
    from .ws_v2 import V2Connection

logger = logging.getLogger(__name__)

_MOST_OPENED = 1024  # ids of `open` requests to remember


class SessionOpener:
    """Answers the `open` requests of one connection.

    A repeated `open` gets the session of the first one. The same connection recognizes it by its id, another connection
    by its nonce (docs/protocol.md, 4.1).
    """

    def __init__(self, connection: V2Connection) -> None:
        self._connection = connection
        self._manager = connection.manager
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._opened_as: dict[int, str] = {}

    def is_opening(self, request_id: int) -> bool:
        """Return whether a session is being opened for a request."""
        return request_id in self._opening

    def cancel(self, request_id: int) -> bool:
        """Cancel the opening of a session."""
        return self._opening[request_id].cancel()

    def cancel_all(self) -> None:
        """Cancel every opening: the connection is gone."""
        for task in self._opening.values():
            task.cancel()

    def open(self, request: Request) -> None:
        """Resume a session, or open one; send the reply when it is ready.

        Raises:
            OpenEnvError: The session cannot be resumed.
        """
        options = request.extra or {}
        token = options.get("resume")
        if token is not None:
            session = self._manager.attachments.claimed(token)
            if self._connection.role is Role.AGENT and not session.by_agent:
                raise Forbidden(self._connection.role.value)  # the owner's replies contain rewards
            self._manager.attachments.reattach(session, self._connection)
            self._connection.sessions[session.id] = session
            self._reply(request, session, resumed=True)
            return
        if request.id in self._opening:  # sent twice: one reply answers both
            return
        if request.id in self._opened_as:
            self._reply_again(request)
            return
        earlier = self._manager.openings.find(self._nonce(options))
        if earlier is not None:
            self._hold(request, earlier)
            return
        task = self._connection.dispatcher.loop.create_task(self._open_new(request, options))
        self._opening[request.id] = task
        task.add_done_callback(lambda task: self._end(request, task))

    def _end(self, request: Request, task: asyncio.Task[None]) -> None:
        self._opening.pop(request.id, None)
        if task.cancelled() and not self._connection.is_lost:  # it had not begun; a running task answers by itself
            self._connection.send_error(request, RequestCancelled())

    def _nonce(self, options: Mapping[str, Any]) -> str | None:
        """Return the client's name for its session; the role keeps agents from reusing an orchestrator's name."""
        nonce = options.get("nonce")
        return f"{self._connection.role.value} {nonce}" if isinstance(nonce, str) else None

    async def _open_new(self, request: Request, options: Mapping[str, Any]) -> None:
        wait_s = options.get("wait_s")
        connection = self._connection
        last_position = -1

        def on_position(position: int) -> None:
            nonlocal last_position
            if position != last_position:
                last_position = position
                connection.send_message({"type": "event", "id": request.id, "event": "queued", "position": position})

        opening = self._manager.openings.begin(
            self._nonce(options),
            lambda opening: self._manager.open(
                SessionKind.RESUMABLE,
                wait_s=float(wait_s) if isinstance(wait_s, (int, float)) else 0.0,
                by_agent=connection.role is Role.AGENT,
                on_position=opening.report_position,
                on_reserved=opening.reserved,
            ),
        )
        try:
            session = await opening.wait(on_position)
        except asyncio.CancelledError:
            opening.leave(is_final=not connection.is_lost or connection.is_closed_by_client)
            if not connection.is_lost:
                connection.send_error(request, RequestCancelled())
                return
            raise
        except Exception as exc:  # the client needs a reply in any case
            refusal: BaseException = exc
            if isinstance(exc, SessionCapacityError):
                retry_s = self._manager.retry_after_s
                refusal = SessionCapacityError(exc.active_sessions, exc.max_sessions, str(exc), retry_after_s=retry_s)
            elif not isinstance(exc, OpenEnvError):
                logger.exception("a session could not be opened")
                refusal = connection.service.errors.shown(exc)
            connection.send_error(request, refusal)
            return
        if connection.is_lost:
            if not opening.is_kept:  # no client has the session's token
                session.close(DISCONNECTED)
            return
        self._hold(request, session)

    def _hold(self, request: Request, session: Session) -> None:
        """Answer with the session that this request opened, on this or an earlier connection."""
        if session.holder is None and not session.ledger.last_id:
            session.attach(self._connection)
        else:
            self._manager.attachments.reattach(session, self._connection)
        self._connection.sessions[session.id] = session
        self._opened_as[request.id] = session.id
        if len(self._opened_as) > _MOST_OPENED:
            del self._opened_as[next(iter(self._opened_as))]
        self._reply(request, session, resumed=False)

    def _reply_again(self, request: Request) -> None:
        session = self._connection.sessions.get(self._opened_as[request.id])
        if session is None:
            raise StaleRequest(request.id, max(self._opened_as))
        self._reply(request, session, resumed=False)

    def _reply(self, request: Request, session: Session, *, resumed: bool) -> None:
        message = {
            "type": "opened",
            "id": request.id,
            "session": session.id,
            "token": self._manager.attachments.token(session),
            "resumed": resumed,
            "last_id": session.ledger.last_id,
            "grace_s": self._manager.limits.grace_s,
            "max_batch": self._connection.service.options.max_batch,
            **self._connection.columns.offer(session),
        }
        self._connection.send_message(message)
