"""Tool calls under an `Idempotency-Key`: one that is repeated is answered as it was before, and not run again.

Knows a session's ledger and how answers are worded; must not know what tools do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import StaleRequest
from ...protocol.json_values import encode
from ...protocol.jsonrpc import JsonRpcErrorCode
from ...protocol.mcp import McpError, Message, error_message
from ...sessions.ledger import Entry
from ...sessions.manager import SessionManager
from ...sessions.session import Session
from ..asgi import HeaderList, Scope, Send, respond
from ..http_routes import KEY_REUSED, KEY_REUSED_TEXT, RequestKey, kept_reply, request_key


class Once:
    """One call under its key: the first of its kind, or a repetition."""

    def __init__(self, manager: SessionManager, session: Session, key: RequestKey, message: Message) -> None:
        self._session = session
        self._refusal: tuple[int, bytes] | None = None
        self._entry: Entry | None = None
        try:
            self._entry = session.ledger.find(key.name)
            self.is_repeated = self._entry is not None
            if self._entry is not None and self._entry.asked != key.asked:  # or it would get another's reply
                self._refuse(manager, message, 422, KEY_REUSED, KEY_REUSED_TEXT)
        except StaleRequest as exc:
            self.is_repeated = True
            self._refuse(manager, message, 409, exc.code, str(exc))
        if not self.is_repeated:
            self._entry = session.ledger.begin(key.name, key.asked)

    @classmethod
    def of(cls, manager: SessionManager, scope: Scope, message: Message, session: Session | None) -> Once | None:
        """Return the call that a request is; None where it has no key, or calls no tool of a session."""
        if session is None or message.method != "tools/call":
            return None
        key = request_key(scope)
        return None if key is None else cls(manager, session, key, message)

    def _refuse(self, manager: SessionManager, message: Message, status: int, code: str, text: str) -> None:
        manager.report_error(code, self._session)
        problem = McpError(JsonRpcErrorCode.INVALID_REQUEST.value, text, {"code": code})
        self._refusal = status, encode(error_message(message.id, problem))

    def finish(self, status: int, told: Mapping[str, Any]) -> None:
        """Keep the answer to the first call, and tell those who have asked again meanwhile."""
        assert self._entry is not None
        body = encode(told)
        self._session.ledger.finish(self._entry, (status, body), len(body))

    async def answer_again(self, send: Send, headers: HeaderList) -> None:
        """Answer a repetition; waits where the call still runs."""
        if self._refusal is None:
            assert self._entry is not None
            status, body = await kept_reply(self._entry)
        else:
            status, body = self._refusal
        await respond(send, status, body, headers)
