"""Where the answers of one v2 connection go: alone, as they come, or all of a batch together.

Knows replies, ledgers and groups of steps; must not know sockets or how requests are read.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..protocol.v2.server import Refused, Reply, Request, Writer
from ..sessions.group import StepGroup
from ..sessions.ledger import Entry
from ..sessions.session import Session


class Answering(Protocol):
    """A connection, as far as answers are concerned."""

    writer: Writer

    def send_reply(self, reply: Reply, request: Request | Refused) -> None:
        """Send an answer alone."""
        ...

    def send_soon(self, reply: Reply, request: Request | Refused) -> None:
        """Send an answer together with others that are ready in the same moment."""
        ...

    def send_batch(self, replies: list[bytes], batch_id: int | None) -> None:
        """Send answers together."""
        ...

    def written(self, reply: Reply, request: Request | Refused) -> bytes:
        """Write an answer."""
        ...

    def failure(self, error: BaseException, session: Session, request_id: int, kind: str) -> Reply:
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

    def answer(self, reply: Reply) -> None:
        """Take it."""
        raise NotImplementedError


def answer_again(entry: Entry, session: Session, target: Target) -> None:
    """Answer a request that was sent once more; of a step in a group the whole message is kept."""

    def answer(kept: Reply | bytes) -> None:
        writer: Writer = entry.asked.message.writer
        target.answer(writer.opened(kept, int(entry.key), session.id) if isinstance(kept, bytes) else kept)

    entry.tell(answer)


class Single(Target):
    """An answer that is sent alone."""

    __slots__ = ("_connection", "_request")

    def __init__(self, connection: Answering, request: Request) -> None:
        self._connection = connection
        self._request = request

    def answer(self, reply: Reply) -> None:
        self._connection.send_reply(reply, self._request)


class Each(Target):
    """An answer of a batch whose answers are sent as they come."""

    __slots__ = ("_connection", "_request")

    def __init__(self, connection: Answering, request: Request | Refused) -> None:
        self._connection = connection
        self._request = request

    def answer(self, reply: Reply) -> None:
        self._connection.send_soon(reply, self._request)


class Collected:
    """The answers of a batch that is answered as a whole."""

    __slots__ = ("_batch_id", "_connection", "_missing", "_replies")

    def __init__(self, connection: Answering, batch_id: int, count: int) -> None:
        self._connection = connection
        self._batch_id = batch_id
        self._replies: list[bytes] = [b""] * count
        self._missing = count

    def put(self, place: int, reply: Reply, request: Request | Refused) -> None:
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

    def __init__(self, collected: Collected, place: int, request: Request | Refused) -> None:
        self._collected = collected
        self._place = place
        self._request = request

    def answer(self, reply: Reply) -> None:
        self._collected.put(self._place, reply, self._request)


class Outcome:
    """A call under way: turns its outcome into the reply that the ledger keeps."""

    __slots__ = ("_connection", "_entry", "_request", "_session")

    def __init__(self, connection: Answering, session: Session, request: Request, entry: Entry) -> None:
        self._connection = connection
        self._session = session
        self._request = request
        self._entry = entry

    def done(self, result: Any, error: BaseException | None) -> None:
        """Take the outcome."""
        writer = self._connection.writer
        if error is None:
            kind = "state" if self._request.type == "state" else "observation"
            reply = Reply(kind, result, writer)
        else:
            reply = self._connection.failure(error, self._session, self._request.id, self._request.type)
        self._session.ledger.finish(self._entry, reply, len(reply.data))
        self._connection.finished(self._session, self._request)
