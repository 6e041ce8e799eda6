"""`/web/sessions`: all sessions of a server, for whoever looks after it.

Knows the session manager and visitors; shows no tokens.
"""

from __future__ import annotations

from typing import Any

from ..errors import SessionNotFoundError
from ..server.asgi import HeaderList, Receive, Scope, Send, cookie, respond_json
from ..sessions.manager import SessionManager
from ..sessions.session import Session, SessionKind, SessionState
from .visitors import COOKIE, Visitors

ENDED_BY_OPERATOR = "ended by an operator"
_NO_STORE: HeaderList = ((b"cache-control", b"no-store"),)


class OperatorRoutes:
    """The ASGI handlers."""

    def __init__(self, manager: SessionManager, visitors: Visitors) -> None:
        self._manager = manager
        self._visitors = visitors

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /web/sessions`."""
        manager = self._manager
        mine = self._visitors.find(cookie(scope, COOKIE) or None).session
        capacity = {
            "max": manager.max_sessions,
            "active": manager.active,
            "queued": len(manager.queue),
            "draining": manager.is_draining,
        }
        shown = [self._shown(session, is_mine=session is mine) for session in manager.sessions()]
        known = [session for session in shown if session is not None]
        await respond_json(send, 200, {"capacity": capacity, "sessions": known}, _NO_STORE)

    async def end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `DELETE /web/sessions/{session_id}`."""
        session_id = scope["path_params"]["session_id"]
        found = next((session for session in self._manager.sessions() if session.id == session_id), None)
        if found is None or found.is_ending:
            missing = SessionNotFoundError(session_id)
            self._manager.report_error(missing.code)
            await respond_json(send, 404, {"detail": str(missing), "code": missing.code})
            return
        found.close(ENDED_BY_OPERATOR)
        player = self._visitors.player(session_id)
        if player is not None:  # he need not wait until it has ended
            player.lose(ENDED_BY_OPERATOR)
        await respond_json(send, 200, {"session_id": session_id, "closed": True})

    def _shown(self, session: Session, *, is_mine: bool) -> dict[str, Any] | None:
        info = self._manager.info(session.id)
        if info is None:  # it has just ended
            return None
        player = self._visitors.player(session.id)
        detached = session.kind is SessionKind.RESUMABLE and not session.is_attached and session.is_idle
        idle_s = session.unused_s if player is None else player.unused_s
        return {
            "session_id": session.id,
            "state": "detached" if detached else session.state.value,
            "kind": "page" if player is not None else session.kind.value,
            "episode_id": None if player is None else player.episode.episode_id,
            "step_count": session.step_count,
            "created_at": info.created_at,
            "last_activity_at": info.last_activity_at,
            "age_s": max(0.0, info.last_activity_at - info.created_at + session.unused_s),
            "idle_s": 0.0 if session.state is SessionState.BUSY else idle_s,
            "is_mine": is_mine,
        }
