"""Sessions of MCP clients: opened by `initialize` or a first call, or attached to a session that another client opened.

An MCP session is one environment session, counted, leased and closed like any other. Knows the session manager; must
not know requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from openenv.errors import SessionCapacityError
from openenv.types import ServerMode

from ..service import EnvService
from ..sessions.lifetime import CLOSED_BY_CLIENT, NOT_BEGUN
from ..sessions.peers import not_found
from ..sessions.session import Session, SessionKind, SessionState
from .tool_calls import RESET, tools_of

MAX_ATTACHED = 64  # clients of one session; beyond that, the oldest idle ones are dropped, or newcomers refused


@dataclass(slots=True)
class McpSession:
    """The session of one client of the handshake era.

    Args:
        id: The value of its `Mcp-Session-Id` header.
        session: The environment session behind it.
        is_owner: Whether the client opened that session and ends it.
        version: The protocol version of the handshake.
        log_level: The lowest level of log messages to send, if the client has set one.
        running: Running requests, by id.
        stream_ended: Ends the open GET stream; None without a stream.
    """

    id: str
    session: Session
    is_owner: bool
    version: str
    log_level: str | None = None
    running: dict[str | int, asyncio.Future[Any]] = field(default_factory=dict)
    stream_ended: asyncio.Event | None = None


class McpSessions:
    """Opens and finds the sessions of MCP clients."""

    def __init__(self, service: EnvService) -> None:
        self._service = service
        self._manager = service.manager
        self._known: dict[str, McpSession] = {}

    async def open(self, kind: SessionKind, *, by_agent: bool = False) -> Session:
        """Open a session and reset it, so that its tools work on a real episode.

        Raises:
            OpenEnvError: All slots are in use, or the environment could not be built.
            NoTools: The environment has no tools.
        """
        session = await self._manager.open(kind, by_agent=by_agent)
        try:
            tools_of(session.env, self._service.action_cls)
            if self._service.mode is ServerMode.SIMULATION:
                await session.run(RESET, {})
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
        by_agent: bool = False,
    ) -> McpSession:
        """Return the session of a new handshake.

        A session that `handle` names is attached as its owner has prepared it, without a reset. Raises as `open` and
        the manager's `find` do; `SessionCapacityError` for a session that has as many clients as it may.
        """
        self._forget_ended()
        if handle is None:
            session = await self.open(kind, by_agent=by_agent)
            client = McpSession(session.id, session, is_owner=True, version=version)
        else:
            session = self._manager.find(handle)
            tools_of(session.env, self._service.action_cls)
            self._make_room(session)
            client = McpSession(self._manager.peers.new_id(), session, is_owner=False, version=version)
        self._known[client.id] = client
        return client

    def find(self, mcp_session_id: str) -> McpSession:
        """Return a client's session.

        Raises:
            SessionLost: It has ended.
            SessionNotFoundError: There was none.
        """
        client = self._known.get(mcp_session_id)
        if client is None:
            self._manager.find(mcp_session_id)  # raises SessionLost with the reason, if there was one
            raise not_found(self._manager.peers, mcp_session_id)
        if client.session.is_ending:
            self._drop(client)
            self._manager.find(client.session.id)
        return client

    def end(self, client: McpSession) -> None:
        """End a client's session; the environment session of an attached client continues."""
        self._drop(client)
        for task in list(client.running.values()):
            task.cancel()
        if client.is_owner:
            client.session.close(CLOSED_BY_CLIENT)

    def end_streams(self) -> None:
        """End every open stream, so that the server can shut down."""
        for client in self._known.values():
            if client.stream_ended is not None:
                client.stream_ended.set()

    def _drop(self, client: McpSession) -> None:
        self._known.pop(client.id, None)
        if client.stream_ended is not None:
            client.stream_ended.set()

    def _make_room(self, session: Session) -> None:
        """Drop the oldest idle clients of a session with too many clients."""
        attached = [client for client in self._known.values() if client.session is session and not client.is_owner]
        idle = [client for client in attached if not client.running and client.stream_ended is None]
        too_many = max(0, len(attached) - MAX_ATTACHED + 1)
        if len(idle) < too_many:
            raise SessionCapacityError(len(attached), MAX_ATTACHED, "The session has as many clients as it may.")
        for client in idle[:too_many]:
            self._drop(client)

    def _forget_ended(self) -> None:
        for client in list(self._known.values()):
            if client.session.state in (SessionState.CLOSED, SessionState.ABANDONED):
                self._drop(client)
