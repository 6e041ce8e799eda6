"""Where the answers of one v2 connection go: alone, as they come, or all of a batch together.

Knows replies, ledgers and groups of steps; must not know sockets or how requests are read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

from ..protocol.server_v2 import EncodedReply, RefusedRequest, Request, Writer
from ..sessions.group import StepGroup
from ..sessions.ledger import LedgerEntry
from ..sessions.session import Session


class Answering(Protocol):
    """A connection, as far as answers are concerned."""

    writer: Writer

    def send_reply(self, reply: EncodedReply, request: Request | RefusedRequest) -> None:
        """Send an answer alone."""
        ...

    def send_soon(self, reply: EncodedReply, request: Request | RefusedRequest) -> None:
        """Send an answer together with others that are ready in the same moment."""
        ...

    def send_batch(self, replies: list[bytes], batch_id: int | None) -> None:
        """Send answers together."""
        ...

    def written(self, reply: EncodedReply, request: Request | RefusedRequest) -> bytes:
        """Write an answer."""
        ...

    def failure(self, error: BaseException, session: Session, request_id: int, kind: str) -> EncodedReply:
        """Say why a request of that kind failed."""
        ...

    def finished(self, session: Session, request: Request) -> None:
        """Forget a call that is done."""
        ...

    def finished_together(self, group: StepGroup) -> None:
        """Forget a group that is done."""
        ...


class Target:
    """Where an answer goes."""

    def answer(self, reply: EncodedReply) -> None:
        """Take it."""
        raise NotImplementedError


def answer_again(entry: LedgerEntry, session: Session, target: Target) -> None:
    """Answer a request that was sent once more; of a step in a group the whole message is kept."""

    def answer(kept: EncodedReply | bytes) -> None:
        writer: Writer = entry.asked.message.writer
        target.answer(writer.opened(kept, int(entry.key), session.id) if isinstance(kept, bytes) else kept)

    entry.tell(answer)


class Single(Target):
    """An answer that is sent alone."""

    __slots__ = ("_connection", "_request")

    def __init__(self, connection: Answering, request: Request) -> None:
        self._connection = connection
        self._request = request

    def answer(self, reply: EncodedReply) -> None:
        self._connection.send_reply(reply, self._request)


class Each(Target):
    """An answer of a batch whose answers are sent as they come."""

    __slots__ = ("_connection", "_request")

    def __init__(self, connection: Answering, request: Request | RefusedRequest) -> None:
        self._connection = connection
        self._request = request

    def answer(self, reply: EncodedReply) -> None:
        self._connection.send_soon(reply, self._request)


class Collected:
    """The answers of a batch that is answered as a whole."""

    __slots__ = ("_batch_id", "_connection", "_missing", "_replies")

    def __init__(self, connection: Answering, batch_id: int, count: int) -> None:
        self._connection = connection
        self._batch_id = batch_id
        self._replies: list[bytes] = [b""] * count
        self._missing = count

    def put(self, place: int, reply: EncodedReply, request: Request | RefusedRequest) -> None:
        """Keep an answer at its place; the last one sends them all."""
        self._replies[place] = self._connection.written(reply, request)
        self._missing -= 1
        if not self._missing:
            self.send()

    def take(self, group: StepGroup) -> None:
        """Keep the answers of steps that ran together, each in its session's ledger too."""
        connection, replies, asked = self._connection, self._replies, group.asked
        told = zip(group.sessions, group.ids, group.places, group.outcomes, strict=True)
        for session, request_id, place, outcome in told:
            if not isinstance(outcome, bytes):
                session.report_error(outcome)
                reply = connection.failure(outcome, session, request_id, "step")
                outcome = connection.writer.reply(reply, request_id, session.id)
            session.ledger.finish_step(request_id, asked, outcome, len(outcome))
            replies[place] = outcome
        connection.finished_together(group)
        self._missing -= len(group.sessions)
        if not self._missing:
            self.send()

    def send(self) -> None:
        """Send them."""
        self._connection.send_batch(self._replies, self._batch_id)


class Place(Target):
    """One place among collected answers."""

    __slots__ = ("_collected", "_place", "_request")

    def __init__(self, collected: Collected, place: int, request: Request | RefusedRequest) -> None:
        self._collected = collected
        self._place = place
        self._request = request

    def answer(self, reply: EncodedReply) -> None:
        self._collected.put(self._place, reply, self._request)


class Outcome:
    """A call under way: turns its outcome into the reply that the ledger keeps."""

    __slots__ = ("_connection", "_entry", "_request", "_session")

    def __init__(self, connection: Answering, session: Session, request: Request, entry: LedgerEntry) -> None:
        self._connection = connection
        self._session = session
        self._request = request
        self._entry = entry

    def done(self, result: Any, error: BaseException | None) -> None:
        """Take the outcome."""
        writer = self._connection.writer
        if error is None:
            kind = "state" if self._request.type == "state" else "observation"
            reply = EncodedReply(kind, result, writer)
        else:
            reply = self._connection.failure(error, self._session, self._request.id, self._request.type)
        self._session.ledger.finish(self._entry, reply, len(reply.data))
        self._connection.finished(self._session, self._request)


# A repeated request is told from another one with the same id by the message that the first one came in: the last few
# messages of each connection are kept as they came, while they are small, and are only read when an id is seen again.


KEPT: Final = 4
KEPT_BYTES: Final = 64 * 1024
_TWO_REQUESTS: Final = math.nan  # which is not even equal to itself
_BESIDE: Final = frozenset({"session", "traceparent"})  # what may differ: how it is named, and on whose behalf


class Message:
    """A message that has come, with one request or many."""

    __slots__ = ("_binary", "_contents", "_payload", "writer")

    def __init__(self, writer: Writer, payload: bytes | None, binary: bool) -> None:
        self.writer = writer
        self._payload = payload
        self._binary = binary
        self._contents: dict[tuple[int, str | None], Any] | None = None

    def forget(self) -> None:
        """Keep the message no longer."""
        self._payload = self._contents = None

    def differs(self, other: Message, request_id: int, session: str) -> bool:
        """Whether the request with that id certainly asks for something else in another message."""
        if self.writer is not other.writer:
            return False  # values may look different in another encoding
        here, there = self._content(request_id, session), other._content(request_id, session)
        return here is not None and there is not None and _certainly_differ(here, there)

    def _content(self, request_id: int, session: str) -> Any:
        found = self._contents
        if found is None:  # read once, however many of its requests are repeated
            found = self._contents = {}
            for key, content in self._read():
                known = found.setdefault(key, content)
                if known is not content and _certainly_differ(known, content):
                    found[key] = _TWO_REQUESTS
        return found.get((request_id, session), found.get((request_id, None)))

    def _read(self) -> Iterator[tuple[tuple[int, str | None], Any]]:
        if self._payload is None:
            return
        try:
            message = self.writer.codec.decode(self._payload, binary=self._binary, max_bytes=64 * KEPT_BYTES)
        except ValueError:
            return
        for request in message["requests"] if message.get("type") == "batch" else (message,):
            request_id, session = (request.get("id"), request.get("session")) if isinstance(request, dict) else (0, 0)
            if isinstance(request_id, int) and (session is None or isinstance(session, str)):  # else it was refused
                yield (request_id, session), {key: request[key] for key in request if key not in _BESIDE}


def _certainly_differ(here: Any, there: Any) -> bool:
    try:
        return bool(here != there)
    except Exception:  # arrays do not tell whether they are equal
        return False


class Asked(NamedTuple):
    """What a ledger keeps of a request, to tell others with its id from it; the same for all steps of a batch."""

    kind: str
    message: Message


class Recent:
    """The last messages of one connection."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._messages: deque[Message] = deque()

    def add(self, payload: bytes, binary: bool) -> Message:
        """Note a message; the oldest is let go of."""
        message = Message(self._writer, payload if len(payload) <= KEPT_BYTES else None, binary)
        self._messages.append(message)
        if len(self._messages) > KEPT:
            self._messages.popleft().forget()
        return message
