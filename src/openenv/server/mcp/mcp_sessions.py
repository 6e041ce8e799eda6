"""Sessions as MCP clients have them: opened by `initialize` or by a first call, or attached to one that somebody else
has prepared.

An MCP session is one environment session, counted, leased and closed like any other. One that a client opens itself
begins with a `reset`, so that its tools work on a real episode; an attached one is left as its owner has prepared it.
Knows the session manager; must not know requests.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from ...errors import SessionNotFoundError
from ...sessions.lifetime import CLOSED_BY_CLIENT, NOT_BEGUN
from ...sessions.operations import build_operations
from ...sessions.session import Account, Session, SessionKind, SessionState
from ...sessions.slots import NO_ACCOUNT
from ...types import ServerMode
from ..service import EnvService
from .tool_calls import tools_of

MOST_ATTACHED = 64  # clients that one session is shown to; of more, those that do nothing are forgotten


@dataclass(slots=True)
class McpSession:
    """What a client of the handshake era has.

    Args:
        id: The name in its `Mcp-Session-Id` header.
        session: The environment session behind.
        is_owner: Whether the client opened that session, and ends it.
        version: The protocol version of the handshake.
        log_level: The least level of log messages that the client wants, if any.
        running: Requests under way, by id.
        stream_ended: Set when the stream of a GET shall end; None while there is no such stream.
    """

    id: str
    session: Session
    is_owner: bool
    version: str
    log_level: str | None = None
    running: dict[str | int, asyncio.Future[Any]] = field(default_factory=dict)
    stream_ended: asyncio.Event | None = None


class Episodes:
    """Opens and finds the sessions of MCP clients."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager
        self._known: dict[str, McpSession] = {}
        self._plain = build_operations(_same, _same)

    async def open(self, kind: SessionKind, account: Account = NO_ACCOUNT) -> Session:
        """Open a session that counts for somebody, and begin its episode.

        Raises:
            OpenEnvError: There is no room, or the environment could not be built.
            NoTools: The environment has no tools.
        """
        session = await self._manager.open(kind, account=account)
        try:
            tools_of(session.env, self._service.action_cls)
            if self._service.mode is ServerMode.SIMULATION:
                await session.run(self._plain.reset, {})
        except BaseException:
            session.close(NOT_BEGUN)
            raise
        return session

    async def begin(
        self,
        version: str,
        handle: str | None,
        *,
        kind: SessionKind = SessionKind.HTTP,
        account: Account = NO_ACCOUNT,
    ) -> McpSession:
        """Answer a handshake with a session; `handle` names one that exists already. Raises as `open` and `find` do."""
        self._forget_ended()
        if handle is None:
            session = await self.open(kind, account)
            known = McpSession(session.id, session, is_owner=True, version=version)
        else:
            session = self._manager.find(handle)
            tools_of(session.env, self._service.action_cls)
            self._make_room(session)
            known = McpSession(str(uuid.uuid4()), session, is_owner=False, version=version)
        self._known[known.id] = known
        return known

    def find(self, mcp_session_id: str) -> McpSession:
        """Return a client's session.

        Raises:
            SessionLost: It has ended.
            SessionNotFoundError: There never was one.
        """
        known = self._known.get(mcp_session_id)
        if known is None:
            self._manager.find(mcp_session_id)  # says how it ended, if there was one
            raise SessionNotFoundError(mcp_session_id)
        if known.session.is_ending:
            self._drop(known)
            self._manager.find(known.session.id)
        return known

    def end(self, known: McpSession) -> None:
        """End a client's session; an attached one goes on without it."""
        self._drop(known)
        for task in list(known.running.values()):
            task.cancel()
        if known.is_owner:
            known.session.close(CLOSED_BY_CLIENT)

    def end_streams(self) -> None:
        """End every open stream, for a server that shuts down."""
        for known in self._known.values():
            if known.stream_ended is not None:
                known.stream_ended.set()

    def _drop(self, known: McpSession) -> None:
        self._known.pop(known.id, None)
        if known.stream_ended is not None:
            known.stream_ended.set()

    def _make_room(self, session: Session) -> None:
        """Forget clients that have attached to a session long ago and do nothing, where there are many."""
        attached = [known for known in self._known.values() if known.session is session and not known.is_owner]
        idle = (known for known in attached if not known.running and known.stream_ended is None)
        for known in list(idle)[: max(0, len(attached) - MOST_ATTACHED + 1)]:
            self._drop(known)

    def _forget_ended(self) -> None:
        for known in list(self._known.values()):
            if known.session.state is SessionState.CLOSED:
                self._drop(known)


def _same(value: Any) -> Any:
    return value
