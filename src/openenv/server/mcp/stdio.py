"""MCP over standard input and output: one client, one process, one session, one JSON message per line.

The first request decides the era. The output of environments goes to standard error. Knows lines and tasks; `methods`
knows the meaning of requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from openenv.errors import OpenEnvError
from openenv.protocol.json_values import decode, encode
from openenv.protocol.jsonrpc import (
    META_VERSION,
    JsonRpcErrorCode,
    McpError,
    McpMessage,
    check_modern,
    error_message,
    invalid_request,
    negotiated_version,
    read_message,
    result_message,
)

from ..service import EnvService
from ..sessions.session import Session, SessionKind
from .mcp_sessions import McpSession, McpSessions
from .methods import McpExchange, McpMethods, mcp_error
from .tool_calls import NoTools

logger = logging.getLogger(__name__)

_GRACE_S = 1.5  # clients wait about two seconds before they end the process
Write = Callable[[Mapping[str, Any]], None]


class StdioConversation:
    """Answers the messages of one client."""

    def __init__(self, service: EnvService, write: Write) -> None:
        self._methods = McpMethods(service)
        self._sessions = McpSessions(service)
        self._errors = service.errors
        self._write = write
        self._client: McpSession | None = None
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._running: dict[str | int, asyncio.Task[None]] = {}

    def take(self, line: bytes) -> None:
        """Start to answer one line."""
        try:
            message = read_message(decode(line))
        except ValueError as exc:
            problem = McpError(JsonRpcErrorCode.PARSE_ERROR.value, f"Parse error: {exc}")
            self._write(error_message(None, problem))
        except McpError as exc:
            self._write(error_message(None, exc))
        else:
            if message.id is not None and message.method is not None:
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._running[message.id] = task
                task.add_done_callback(lambda _: self._running.pop(message.id or "", None))
            elif message.method == "notifications/cancelled":
                self._cancel(message.params.get("requestId"))

    async def finish(self) -> None:
        """Give running requests a moment to end, then cancel them."""
        tasks = list(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, request_id: Any) -> None:
        task = self._running.get(request_id) if isinstance(request_id, (str, int)) else None
        if task is not None:
            task.cancel()

    async def _answer(self, message: McpMessage) -> None:
        try:
            result = await self._result(message)
        except Exception as exc:
            if not isinstance(exc, (McpError, NoTools, OpenEnvError)):
                logger.exception("MCP %s failed", message.method)
            self._write(error_message(message.id, mcp_error(exc, self._errors)))
        else:
            self._write(result_message(message.id, result))

    async def _result(self, message: McpMessage) -> dict[str, Any]:
        if message.method == "initialize":
            version = negotiated_version(message.params)
            async with self._opening:
                if self._client is None:
                    self._client = await self._sessions.begin(version, None, kind=SessionKind.SOCKET)
            return self._methods.initialized(self._client)
        if META_VERSION in message.meta:
            check_modern({}, message)
            session = await self._own_session() if self._methods.needs_session(message.method) else self._session
            return await self._methods.answer(message, McpExchange("modern", session, self._write))
        async with self._opening:  # a handshake may still be running
            client = self._client
        if client is None:
            raise invalid_request("Begin with initialize, or name a version in _meta")
        return await self._methods.answer(message, McpExchange("handshake", client.session, self._write, client))

    async def _own_session(self) -> Session:
        """Return the session of the process; the first call that needs it opens it."""
        async with self._opening:
            if self._session is None:
                self._session = await self._sessions.open(SessionKind.SOCKET)
            return self._session


async def converse(service: EnvService, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Serve a client until it ends its side."""

    def write(message: Mapping[str, Any]) -> None:
        outgoing.write(encode(message) + b"\n")
        outgoing.flush()

    loop = asyncio.get_running_loop()
    conversation = StdioConversation(service, write)
    ended = asyncio.Event()

    def read() -> None:
        for line in incoming:
            if line.strip():
                loop.call_soon_threadsafe(conversation.take, line)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, name="openenv-stdin", daemon=True).start()
    try:
        await ended.wait()
        await conversation.finish()
    finally:
        await service.manager.drain()


def serve_stdio(service: EnvService) -> None:
    """Serve on standard input and output."""
    sys.stdout.flush()
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of environments must not mix with the protocol
    asyncio.run(converse(service, sys.stdin.buffer, outgoing))
