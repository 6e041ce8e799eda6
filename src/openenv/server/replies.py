"""Replies of a v2 connection: requests under way, the batches their replies belong to, and how a repeat is recognised.

Ids make requests idempotent (docs/protocol.md, 2.1 and 4). The session's ledger keeps the last replies as they were
sent, with their envelope:

    request ----> id above last_id? --yes--> PendingReply in the ledger --> runs --> ledger keeps the reply --> sent
                      | no
                      +--> same request, still running ----> waits for the same reply
                      +--> same request, reply kept -------> the kept reply, in this connection's encoding
                      +--> another request with that id ---> VALIDATION_ERROR
                      +--> reply no longer kept -----------> STALE_REQUEST
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ..protocol.server_v2 import Writer
from ..sessions.group import StepGroup
from ..sessions.ledger import LedgerEntry
from ..sessions.session import Cancellable, Session

if TYPE_CHECKING:
    from .ws_v2 import V2Connection

KEPT: Final = 4
KEPT_BYTES: Final = 64 * 1024
_TWO_REQUESTS: Final = math.nan  # not even equal to itself
_NOT_COMPARED: Final = frozenset({"session", "traceparent"})  # a repeat may leave the name out, and is traced by itself


class PendingReply(LedgerEntry):
    """A request of a session that was accepted: its entry in the ledger, and where its reply goes.

    One object on purpose. A step is answered in some 30 microseconds, and every object more costs about one of them.

    Args:
        connection: The connection that the request came on.
        session: Its session.
        request_id: Its id.
        asked: Its type and its message, which tell a repeat from another request.
        name: The session as the request names it; None for the only one.
        slot: Its place in a batch; None for a request of its own.
    """

    __slots__ = ("_connection", "_name", "_slot", "call", "session")

    def __init__(
        self,
        connection: V2Connection,
        session: Session,
        request_id: int,
        asked: Asked,
        *,
        name: str | None,
        slot: ReplySlot | None,
    ) -> None:
        super().__init__(request_id, asked)
        self._connection = connection
        self._name = name
        self._slot = slot
        self.session = session
        self.call: Cancellable | asyncio.Task[None] | None = None  # for `cancel`

    def done(self, result: Any, error: BaseException | None) -> None:
        """Answer with the outcome of a call."""
        kind: str = self.asked[0]
        if error is None:
            self.answer("state" if kind == "state" else "observation", result)
        else:
            self.answer("error", self._connection.failure(error, self.session, int(self.key), kind))

    def answer(self, kind: str, data: bytes) -> None:
        """Keep the reply in the ledger, which sends it through `finish`."""
        connection = self._connection
        message = connection.writer.message(kind, int(self.key), self._name, data)
        self.session.ledger.finish(self, message, len(message))
        connection.finished(self)

    def finish(self, reply: bytes) -> None:
        """Send the reply, here and to those who have repeated the request since."""
        if self._slot is None:
            self._connection.send(reply)
        else:
            self._slot.put(reply)
        super().finish(reply)


class BatchReplies:
    """The replies to one batch: sent together when the last one is there, or with `each` as they come."""

    __slots__ = ("_batch_id", "_connection", "_is_streamed", "_missing", "_replies")

    def __init__(self, connection: V2Connection, batch_id: int, count: int, *, each: bool) -> None:
        self._connection = connection
        self._batch_id = batch_id
        self._is_streamed = each
        self._replies: list[bytes] = [] if each else [b""] * count
        self._missing = count

    def put(self, place: int, reply: bytes) -> None:
        """Take the reply to one request."""
        if self._is_streamed:
            self._connection.send_soon(reply)
            return
        self._replies[place] = reply
        self._missing -= 1
        if not self._missing:
            self.send()

    def put_group(self, group: StepGroup) -> None:
        """Take the replies to steps that ran together, and keep each in its session's ledger."""
        connection, replies, asked = self._connection, self._replies, group.asked
        steps = zip(group.sessions, group.ids, group.places, group.outcomes, strict=True)
        for session, request_id, place, outcome in steps:
            if not isinstance(outcome, bytes):
                session.report_error(outcome)
                data = connection.failure(outcome, session, request_id, "step")
                outcome = connection.writer.message("error", request_id, session.id, data)
            session.ledger.finish_step(request_id, asked, outcome, len(outcome))
            replies[place] = outcome
        connection.finished_group(group)
        self._missing -= len(group.sessions)
        if not self._missing:
            self.send()

    def send(self) -> None:
        """Send them."""
        self._connection.send_batch(self._replies, self._batch_id)


class ReplySlot:
    """The place of one reply in a batch."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: BatchReplies, place: int) -> None:
        self._batch = batch
        self._place = place

    def put(self, reply: bytes) -> None:
        """Take the reply."""
        self._batch.put(self._place, reply)


class SentMessage:
    """A message from a client, with one request or many, kept as it came.

    It is decoded again only when an id is seen a second time: a client that gives an id away twice must not take the
    reply to one request for the reply to the other.
    """

    __slots__ = ("_binary", "_contents", "_payload", "writer")

    def __init__(self, writer: Writer, payload: bytes | None, binary: bool) -> None:
        self.writer = writer
        self._payload = payload
        self._binary = binary
        self._contents: dict[tuple[int, str | None], Any] | None = None

    def forget(self) -> None:
        """Keep the message no longer."""
        self._payload = self._contents = None

    def differs(self, other: SentMessage, request_id: int, session: str) -> bool:
        """Whether the request with that id certainly differs from the one in another message."""
        if self.writer is not other.writer:
            return False  # values may look different in another encoding
        here, there = self._content(request_id, session), other._content(request_id, session)
        return here is not None and there is not None and _certainly_differ(here, there)

    def _content(self, request_id: int, session: str) -> Any:
        contents = self._contents
        if contents is None:  # decoded once, however many of its requests are repeated
            contents = self._contents = {}
            for key, content in self._requests():
                known = contents.setdefault(key, content)
                if known is not content and _certainly_differ(known, content):
                    contents[key] = _TWO_REQUESTS
        return contents.get((request_id, session), contents.get((request_id, None)))

    def _requests(self) -> Iterator[tuple[tuple[int, str | None], Any]]:
        if self._payload is None:
            return
        try:
            message = self.writer.codec.decode(self._payload, binary=self._binary, max_bytes=64 * KEPT_BYTES)
        except ValueError:
            return
        for request in message["requests"] if message.get("type") == "batch" else (message,):
            request_id, session = (request.get("id"), request.get("session")) if isinstance(request, dict) else (0, 0)
            if isinstance(request_id, int) and (session is None or isinstance(session, str)):  # else it was refused
                yield (request_id, session), {key: request[key] for key in request if key not in _NOT_COMPARED}


Asked = tuple[str, SentMessage]
"""What a ledger keeps of a request: its type and its message. A plain tuple, and one for all steps of a batch."""


def _certainly_differ(here: Any, there: Any) -> bool:
    try:
        return bool(here != there)
    except Exception:  # arrays do not tell whether they are equal
        return False


class RecentMessages:
    """The last messages of one connection; of those over 64 KiB only that they came."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._messages: deque[SentMessage] = deque()

    def add(self, payload: bytes, binary: bool) -> SentMessage:
        """Note a message, and forget the oldest."""
        message = SentMessage(self._writer, payload if len(payload) <= KEPT_BYTES else None, binary)
        self._messages.append(message)
        if len(self._messages) > KEPT:
            self._messages.popleft().forget()
        return message
