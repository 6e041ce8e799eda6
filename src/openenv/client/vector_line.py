"""Slots and lines of a `VectorEnv`: a slot is a session that is wanted, a line is the way to some of them.

A line is one connection at a time; when it breaks another one takes its place, and the sessions are resumed on it
where the server can do that. Knows requests of protocol v2 and their ids; must not know episodes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import AccessDenied, ConnectFailed, OpenEnvError
from .connecting import Attempts
from .link import Reconnecting
from .url import Address
from .vector_connection import ConnectionBroken, VectorConnection
from .wire import ConnectionOptions

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_BATCHES_KEPT: Final = 64
_DIALLED_AT_ONCE: Final = 16

Unreachable = ConnectFailed | AccessDenied


@dataclass(slots=True, eq=False)
class Slot:
    """A session that is wanted, and the request that it has not answered yet."""

    index: int
    line: Line
    session: str | None = None
    token: str | None = None
    last_id: int = 0
    pending: dict[str, Any] | None = None
    opening: bool = False
    lost: OpenEnvError | None = None
    nonce: str | None = None
    """Names the session that is to be opened, until its token is known: to ask twice opens one."""
    stranded: str | None = None
    """The token of a session that was given up but may be there all the same: the next one begins in it."""
    begun_anew: int = 0
    """The id of the reset that was asked once more, in another session."""

    @property
    def is_busy(self) -> bool:
        """Whether something is still to come."""
        return self.pending is not None or self.opening

    def request(self, kind: str, data: Any) -> dict[str, Any]:
        """Make the next request of this slot; the session's name is added when it is sent."""
        self.last_id += 1
        request = {"type": kind, "id": self.last_id, "session": self.session}
        if data is not None:
            request["data"] = data
        self.pending = request
        return request

    def may_begin_anew(self) -> bool:
        """Whether a session that has ended may be replaced unnoticed: for a reset, which begins anew anyway, once."""
        request = self.pending
        if request is None or request["type"] != "reset" or request["id"] == self.begun_anew:
            return False
        self.begun_anew = request["id"]
        return True

    def lose(self, error: OpenEnvError | None) -> None:
        """Record that the session is gone."""
        self.lost, self.session, self.token, self.nonce = error, None, None, None
        self.opening = False


@dataclass(slots=True, eq=False)
class Line:
    """A connection, what is to be sent on it, and whom its answers are for."""

    address: Address
    options: ConnectionOptions
    subprotocols: Sequence[str]
    slots: list[Slot] = field(default_factory=list)
    connection: VectorConnection | None = None
    opens: dict[int, Slot] = field(default_factory=dict)
    batches: dict[int, list[Slot]] = field(default_factory=dict)
    outbox: list[Slot] = field(default_factory=list)
    """Slots whose pending requests are sent with the next write."""
    doorway: list[tuple[Slot, dict[str, Any]]] = field(default_factory=list)
    broken: str | None = None
    """Why the connection is gone, until it is seen to."""
    _pause_s: float = _FIRST_PAUSE_S
    _give_up_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self.connection is not None and self.connection.is_open

    @property
    def is_wanted(self) -> bool:
        """Whether a connection is to be made: sessions are to be opened, and there is none to open them on."""
        connection = self.connection
        return bool(self.doorway) and (connection is None or not (connection.is_open or connection.has_messages))

    @property
    def is_session(self) -> bool:
        """Whether the connection is itself the session of the line's only slot, and ends with it: protocol v1."""
        dialect = None if self.connection is None else self.connection.dialect
        return dialect is not None and dialect.is_session

    def split(self) -> list[Line]:
        """Keep one slot, one that waits for a session if there is such; return lines for the others."""
        self.slots.sort(key=lambda slot: not slot.opening)
        kept, *others = self.slots
        self.slots = [kept]
        lines = []
        for slot in others:
            slot.line = Line(self.address, self.options, self.subprotocols, slots=[slot])
            lines.append(slot.line)
        return lines

    def connect(self, limit_s: float | None = None) -> VectorConnection:
        """Make a connection, with one try.

        Raises:
            ConnectFailed: There is none to be had.
            AccessDenied: The server asks for another token.
        """
        connection = VectorConnection(self.address, self.options, self.subprotocols)
        connection.open(limit_s)
        self.connection, self.broken = connection, None
        self.opens.clear()
        self.batches.clear()
        self.outbox.clear()
        self.doorway.clear()
        return connection

    def reach(self) -> VectorConnection:
        """Make a connection, trying again within the limit for it where that may help.

        Raises:
            ConnectFailed: There is none to be had.
            AccessDenied: The server asks for another token.
        """
        attempts = Attempts(Reconnecting(), self.options)
        while True:
            try:
                return self.connect(attempts.left_s)
            except ConnectFailed as exc:
                pause_s = attempts.pause_after(exc)
            time.sleep(pause_s)

    def reconnect(self, within_s: float) -> VectorConnection:
        """Make a connection, trying again for a while with pauses that grow and differ from client to client.

        The while begins with the first failure and ends with `recovered`: a server that takes connections only to drop
        them is not tried forever.

        Raises:
            ConnectFailed: There was none to be had all that time.
            AccessDenied: The server asks for another token now.
        """
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + within_s
        while True:
            left = self._give_up_at - time.monotonic()
            if left <= 0:
                raise ConnectFailed(f"no lasting connection to {self.address.url} within {within_s:g} s")
            time.sleep(random.uniform(0.2, 1.0) * min(self._pause_s, left))
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            try:
                return self.connect()
            except ConnectFailed:
                if time.monotonic() + self._pause_s > self._give_up_at:
                    raise

    def recovered(self) -> None:
        """Record that the server answers."""
        self._give_up_at, self._pause_s = None, _FIRST_PAUSE_S

    def open_session(self, slot: Slot, extra: dict[str, Any]) -> None:
        """Have a session opened with the next write."""
        slot.opening = True
        self.doorway.append((slot, extra))

    def flush(self, *, each: bool) -> None:
        """Send everything that waits, in one write.

        Raises:
            ConnectionBroken: It may or may not have arrived.
        """
        if not self.outbox and not self.doorway:
            return
        connection = self.connection
        if connection is None:
            raise ConnectionBroken("connection closed")
        messages: list[dict[str, Any]] = []
        for slot, extra in self.doorway:
            open_id = connection.next_id()
            self.opens[open_id] = slot
            messages.append({"type": "open", "id": open_id, **extra})
        asked = [slot for slot in self.outbox if slot.pending is not None]
        if asked:
            batch_id = connection.next_id()
            self.batches[batch_id] = asked
            while len(self.batches) > _BATCHES_KEPT:  # with `each` there is no answer that would take them out
                del self.batches[next(iter(self.batches))]
            batch: dict[str, Any] = {"type": "batch", "id": batch_id, "requests": [slot.pending for slot in asked]}
            if each:
                batch["each"] = True
            messages.append(batch)
        self.outbox.clear()
        self.doorway.clear()
        connection.send(messages)


def reach_all(lines: Sequence[Line]) -> list[Unreachable | None]:
    """Connect lines side by side, a few at a time; return for each what came in the way.

    A server that one of them cannot reach is not tried by those that come after it.
    """
    failures: dict[Address, Unreachable] = {}

    def reach(line: Line) -> Unreachable | None:
        known = failures.get(line.address)
        if known is not None:
            return known
        try:
            line.reach()
        except (ConnectFailed, AccessDenied) as exc:
            failures[line.address] = exc
            return exc
        return None

    if len(lines) < 2:
        return [reach(line) for line in lines]
    with ThreadPoolExecutor(min(len(lines), _DIALLED_AT_ONCE), thread_name_prefix="openenv-dial") as pool:
        return list(pool.map(reach, lines))
