"""The sessions of a `VectorEnv`: opened, asked in batches, resumed when a connection breaks, and given up when lost.

Every request is answered once, by its reply or by a typed error; a reply goes to the request with its session and id
or to nobody. Knows protocol v2, and that sessions of a line may end with it; must not know what an episode is.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import AccessDenied, ConnectFailed, OpenEnvError, ProtocolError, RequestTimeout, SessionLost
from ...protocol.client_sessions import error_from_frame, new_nonce
from ..flows import Attempts, Reconnecting
from ..options import ConnectionOptions
from ..url import Address, parse_ws_url, socket_url
from .connection import ConnectionBroken, VectorConnection

# vector_line: Slots and lines of a `VectorEnv`: a slot is a session that is wanted, a line is the way to some of them.
#
# A line is one connection at a time; when it breaks another one takes its place, and the sessions are resumed on it
# where the server can do that. Knows requests of protocol v2 and their ids; must not know episodes.


_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_BATCHES_KEPT: Final = 64
_DIALLED_AT_ONCE: Final = 16

Unreachable = ConnectFailed | AccessDenied


@dataclass(slots=True, eq=False)
class Slot:
    """A session that is wanted, and the request that it has not answered yet."""

    index: int
    line: PoolConnection
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
class PoolConnection:
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

    def split(self) -> list[PoolConnection]:
        """Keep one slot, one that waits for a session if there is such; return lines for the others."""
        self.slots.sort(key=lambda slot: not slot.opening)
        kept, *others = self.slots
        self.slots = [kept]
        lines = []
        for slot in others:
            slot.line = PoolConnection(self.address, self.options, self.subprotocols, slots=[slot])
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


def reach_all(lines: Sequence[PoolConnection]) -> list[Unreachable | None]:
    """Connect lines side by side, a few at a time; return for each what came in the way.

    A server that one of them cannot reach is not tried by those that come after it.
    """
    failures: dict[Address, Unreachable] = {}

    def reach(line: PoolConnection) -> Unreachable | None:
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


_TICK_S: Final = 1.0
_CLOSE_S: Final = 5.0
_REPLY_TYPES: Final = {"reset": "observation", "step": "observation", "state": "state", "close": "closed"}

OnAnswer = Callable[[Slot, str, Any, "OpenEnvError | None"], None]


@dataclass(frozen=True, slots=True)
class ConnectionPlan:
    """A connection to be made, and the slots that it carries."""

    url: str
    slots: range


def placements(urls: Sequence[str], n: int, connections: int) -> list[ConnectionPlan]:
    """Spread slots over connections and connections over servers, as evenly as whole numbers allow.

    Args:
        urls: The servers.
        n: How many slots.
        connections: How many connections in all; each server that has a slot gets at least one.
    """
    used = list(urls)[:n]
    wanted = max(len(used), min(connections, n))
    places, first = [], 0
    for url, share, lines in zip(used, shares(n, len(used)), shares(wanted, len(used)), strict=True):
        for size in shares(share, min(lines, share)):
            places.append(ConnectionPlan(url, range(first, first + size)))
            first += size
    return places


def shares(total: int, parts: int) -> list[int]:
    """Split a number into parts that differ by one at most, the larger ones first."""
    size, more = divmod(total, parts)
    return [size + 1] * more + [size] * (parts - more)


class SessionPool:
    """Many sessions over few connections.

    Args:
        places: Which connections to make, and how many slots each carries.
        options: How to connect.
        subprotocols: What to offer, the preferred one first.
        opening: Further keys for `open`: `wait_s`, `compress`, `key`.
        reconnect_s: How long to try again after a connection broke.
        on_answer: Called with a slot, the request's type, and the reply's data or an error.
    """

    def __init__(
        self,
        places: Sequence[ConnectionPlan],
        *,
        options: ConnectionOptions,
        subprotocols: Sequence[str],
        opening: dict[str, Any],
        reconnect_s: float,
        on_answer: OnAnswer,
    ) -> None:
        self._opening = opening
        self._reconnect_s = reconnect_s
        self._on_answer = on_answer
        self._selector = selectors.DefaultSelector()
        self._registered: dict[PoolConnection, int] = {}
        self._by_session: dict[str, Slot] = {}
        self._each = False
        self._is_interrupted = False
        # Servers that were given up since the last write began: they are not waited for again and again.
        self._unreachable: dict[Address, Unreachable] = {}
        self.lines: list[PoolConnection] = []
        self.slots: list[Slot] = []
        for place in places:
            line = PoolConnection(parse_ws_url(socket_url(place.url)), options, subprotocols)
            line.slots = [Slot(index, line) for index in place.slots]
            self.lines.append(line)
            self.slots.extend(line.slots)

    # -- asking ---------------------------------------------------------------------------------------------------

    def open(self, slot: Slot) -> None:
        """Have a session opened for a slot that has none."""
        if slot.session is None and not slot.opening:
            slot.lost = None
            slot.line.open_session(slot, self._opening_of(slot))

    def ask(self, slot: Slot, kind: str, data: Any = None) -> None:
        """Have a request sent with the next write; a slot without a session gets one first."""
        slot.request(kind, data)
        if slot.session is None:
            self.open(slot)
        else:
            slot.line.outbox.append(slot)

    def flush(self, *, each: bool = False, prepare: Callable[[PoolConnection], None] | None = None) -> None:
        """Send what waits: one write per connection.

        Args:
            each: Whether slots may be told of one by one.
            prepare: Asks what is to be asked on a line, just before it is sent: so the sessions of the first line
                are at work while those of others are still being asked.
        """
        self._each = each
        self._unreachable.clear()
        self._reach()
        for line in list(self.lines):  # those that are added meanwhile are seen to
            if prepare is not None:
                prepare(line)
            self._flush(line)
            self._mend(line)

    def _flush(self, line: PoolConnection) -> None:
        if line.broken is not None or not (line.outbox or line.doorway):
            return
        try:
            if line.is_wanted:
                if any(slot.session is not None for slot in line.slots):
                    raise ConnectionBroken("connection closed")
                self._connect([line])
            line.flush(each=self._each)
        except ConnectionBroken as exc:
            line.broken = str(exc)

    # -- connecting -----------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        """Make the connections that are to be made: one to each server, and where that is let in the others."""
        wanted = [line for line in self.lines if line.is_wanted and line.broken is None]
        first: dict[Address, PoolConnection] = {}
        for line in wanted:
            first.setdefault(line.address, line)
        self._connect(list(first.values()))
        self._connect([line for line in wanted if line is not first[line.address]])

    def _connect(self, lines: Sequence[PoolConnection]) -> None:
        """Make the first connections of lines, or those for sessions that begin anew."""
        reachable = []
        for line in lines:
            if line.address in self._unreachable:
                self._not_connected(line, self._unreachable[line.address])
            else:
                reachable.append(line)
        for line, failure in zip(reachable, reach_all(reachable), strict=True):
            if failure is None:
                self._settle(line)
            else:
                self._not_connected(line, failure)

    def _not_connected(self, line: PoolConnection, failure: Unreachable) -> None:
        """Tell those who wait for sessions that there are none to be had."""
        self._unreachable[line.address] = failure
        line.outbox.clear()
        line.doorway.clear()
        for slot in [slot for slot in line.slots if slot.opening]:
            self._give_up(slot, failure)

    def _settle(self, line: PoolConnection) -> None:
        """Take up a new connection: open, or resume, the sessions that are wanted on it."""
        parts = self._narrow(line) if line.is_session else []
        self._register(line)
        for slot in line.slots:
            if slot.session is not None or slot.opening:
                line.open_session(slot, self._opening_of(slot))
        self._connect([part for part in parts if part.is_wanted])
        for part in parts:
            self._flush(part)
            self._mend(part)

    def _narrow(self, line: PoolConnection) -> list[PoolConnection]:
        """Leave a connection that is a session to one slot; return lines for the others."""
        for slot in line.slots:
            slot.nonce = slot.stranded = None
            if slot.session is not None:
                self._give_up(slot, SessionLost("the server speaks only protocol v1 now, which resumes nothing"))
        line.doorway.clear()
        parts = line.split()
        self.lines += parts
        for part in parts:
            for slot in part.slots:
                if slot.opening:
                    part.open_session(slot, {})
        return parts

    def _opening_of(self, slot: Slot) -> dict[str, Any]:
        token = slot.token or slot.stranded
        if token is not None:
            return {**self._opening, "resume": token}
        slot.nonce = slot.nonce or new_nonce()
        return {**self._opening, "nonce": slot.nonce}

    # -- waiting --------------------------------------------------------------------------------------------------

    def pump(self, enough: Callable[[], bool], timeout_s: float | None) -> None:
        """Take in replies until there are enough.

        Raises:
            RequestTimeout: They did not come in time; they still may.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for line in self.lines:
            self._take(line)
            self._mend(line)
        while not enough():
            if self._is_interrupted:
                raise RequestTimeout("closed while slots were waited for")
            left = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left <= 0:
                count = sum(slot.is_busy for slot in self.slots)
                raise RequestTimeout(f"{count} slots have not answered within {timeout_s} s; wait again, or reset them")
            ready = self._selector.select(left)
            for key, _ in ready:
                self._receive(key.data)
            if not ready:
                self._look_after_quiet_lines()

    def interrupt(self) -> None:
        """End a wait in another thread, soon and for good."""
        self._is_interrupted = True

    def _receive(self, line: PoolConnection) -> None:
        if line.connection is None:
            return
        try:
            line.connection.receive()
        except ConnectionBroken as exc:
            line.broken = str(exc)
        self._take(line)
        self._mend(line)

    def _take(self, line: PoolConnection) -> None:
        if line.connection is not None and line.connection.has_messages:
            for message in line.connection.take():
                self._handle(line, message)
            self._flush(line)

    def _look_after_quiet_lines(self) -> None:
        for line in self.lines:
            if line.connection is not None and any(slot.is_busy for slot in line.slots):
                try:
                    line.connection.ping_if_quiet()
                except (ConnectionBroken, OSError) as exc:
                    line.broken = str(exc)
                    self._mend(line)

    def tend(self) -> None:
        """Answer pings while nobody waits; what else comes is kept."""
        for line in self.lines:
            if line.connection is not None and line.broken is None:
                try:
                    line.connection.tend()
                except (ConnectionBroken, OSError) as exc:
                    line.broken = str(exc)

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, line: PoolConnection, message: dict[str, Any]) -> None:
        kind, request_id = message.get("type"), message.get("id")
        if kind == "batch":
            replies = message.get("replies", ())
            asked: Sequence[Slot | None] = line.batches.pop(request_id, ()) if request_id is not None else ()
            if len(asked) != len(replies):
                asked = [None] * len(replies)
            for slot, reply in zip(asked, replies, strict=True):
                name = reply.get("session", "")
                if slot is None or name != slot.session:  # nearly all are in order
                    slot = self._by_session.get(name, slot)
                self._reply(slot, reply)
        elif "session" in message and kind != "opened" and kind != "event":
            self._reply(self._by_session.get(message["session"]), message)
        elif kind == "opened" and request_id in line.opens:
            self._opened(line.opens.pop(request_id), message)
        elif kind == "error":
            self._refused(line, request_id, error_from_frame(message.get("data") or {}))
        elif kind == "event" and message.get("event") == "detached":
            slot = self._by_session.get(message.get("session", ""))
            if slot is not None:
                self._give_up(slot, SessionLost(str(message.get("reason", "detached"))))

    def _reply(self, slot: Slot | None, reply: dict[str, Any]) -> None:
        request = None if slot is None else slot.pending
        if slot is None or request is None or reply.get("id") != request["id"]:
            return  # the answer to a request that nobody waits for any more
        kind, answer = request["type"], reply["type"]
        if answer == _REPLY_TYPES[kind]:
            slot.pending = None
            self._on_answer(slot, kind, reply.get("data"), None)
            return
        if answer == "error":
            error = error_from_frame(reply.get("data") or {})
        else:
            error = ProtocolError(f"{answer!r} is no answer to {kind!r}")
        if isinstance(error, SessionLost):
            self._give_up(slot, error)
            return
        slot.pending = None
        self._on_answer(slot, kind, None, error)

    def _opened(self, slot: Slot, message: dict[str, Any]) -> None:
        slot.opening, slot.stranded, slot.nonce = False, None, None
        slot.line.recovered()
        if slot.session is None:
            slot.session, slot.token = str(message["session"]), message.get("token")
            self._by_session[slot.session] = slot
        if slot.pending is not None:
            # With the same id as before: where the session was resumed, what has run is answered and not run again.
            slot.pending["session"] = slot.session
            slot.line.outbox.append(slot)

    def _refused(self, line: PoolConnection, request_id: Any, error: OpenEnvError) -> None:
        """Tell those who wait for a message that was refused as a whole."""
        if request_id in line.opens:
            slot = line.opens.pop(request_id)
            # Nobody has begun anything in it: another one will do.
            is_unknown = slot.stranded is not None or slot.nonce is not None
            if is_unknown and slot.session is None and isinstance(error, SessionLost):
                slot.stranded = slot.nonce = None
                line.open_session(slot, self._opening_of(slot))
            else:
                self._give_up(slot, error)
            return
        slots = line.batches.pop(request_id, None) if request_id is not None else line.slots
        for slot in slots or ():
            if slot.pending is not None and not slot.opening:
                kind = slot.pending["type"]
                slot.pending = None
                self._on_answer(slot, kind, None, error)

    # -- losing ---------------------------------------------------------------------------------------------------

    def _give_up(self, slot: Slot, error: OpenEnvError, stranded: str | None = None) -> None:
        """Record that a slot has no session, and tell whoever waits for it."""
        if slot.session is not None:
            self._by_session.pop(slot.session, None)
        request, slot.pending = slot.pending, None
        slot.lose(error)
        slot.stranded = stranded or slot.stranded
        if request is not None:
            self._on_answer(slot, request["type"], None, error)

    def _mend(self, line: PoolConnection) -> None:
        """See to a connection that broke, and to the one in its place if that breaks too."""
        if line.broken is None and line.connection is not None and not line.connection.is_open:
            line.broken = "connection closed"
        while line.broken is not None:
            self._take(line)  # what came before the end still counts
            reason, line.broken = line.broken, None
            self._unregister(line)
            if line.connection is not None:
                line.connection.abandon()
            self._revive(line, reason)
            self._flush(line)

    def _revive(self, line: PoolConnection, reason: str) -> None:
        """Connect again and resume every session of the line; what was not answered is asked once more."""
        if line.is_session and not self._is_to_be_replaced(line, reason):
            return
        slots = [slot for slot in line.slots if slot.session is not None or slot.opening]
        if not slots:
            line.connection = None
            return
        has_sessions = any(slot.session is not None for slot in slots)
        try:
            if not has_sessions and line.address in self._unreachable:
                raise self._unreachable[line.address]
            line.reconnect(self._reconnect_s if has_sessions else line.options.connect_timeout_s)
        except (ConnectFailed, AccessDenied) as exc:
            self._unreachable[line.address] = exc
            line.connection = None
            line.recovered()
            line.outbox.clear()
            line.doorway.clear()
            for slot in slots:
                lost = exc if slot.session is None else SessionLost(f"{reason}; then: {exc}")
                self._give_up(slot, lost, slot.token)
            return
        self._settle(line)

    def _is_to_be_replaced(self, line: PoolConnection, reason: str) -> bool:
        """Give up a session that has ended with its connection; say whether there was none yet, only the wish for it.

        What its end leads to, the reset that was asked for or one that the policy asks for now, goes the way of any
        session that is to be opened.
        """
        if any(slot.opening for slot in line.slots):
            return True
        line.connection = None
        line.outbox.clear()
        for slot in line.slots:
            if slot.session is None:
                continue
            if slot.may_begin_anew():
                self._by_session.pop(slot.session, None)
                slot.lose(None)
                self.open(slot)
            else:
                self._give_up(slot, SessionLost(reason))
        return False

    def _register(self, line: PoolConnection) -> None:
        assert line.connection is not None
        if line.connection.is_open:
            descriptor = line.connection.fileno()
            if descriptor in self._selector.get_map():  # of a connection that broke and was not seen to yet
                self._unregister(self._selector.get_key(descriptor).data)
            self._registered[line] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, line)

    def _unregister(self, line: PoolConnection) -> None:
        descriptor = self._registered.pop(line, None)
        if descriptor is not None:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(descriptor)

    # -- ending ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all sessions and hang up; never raises."""
        for line in self.lines:
            line.outbox.clear()
            line.batches.clear()
            for slot in line.slots if line.is_open else ():
                if slot.session is not None:
                    slot.request("close", None)
                    line.outbox.append(slot)
            with contextlib.suppress(ConnectionBroken):
                line.flush(each=False)
        deadline = time.monotonic() + _CLOSE_S
        while any(line.batches for line in self.lines if line.is_open) and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.1):
                self._drain(key.data)
        for line in self.lines:
            self._unregister(line)
            if line.connection is not None:
                line.connection.close()
        self.forget()

    def _drain(self, line: PoolConnection) -> None:
        assert line.connection is not None
        try:
            line.connection.receive()
        except ConnectionBroken:
            self._unregister(line)
        for message in line.connection.take():
            if message.get("type") in ("batch", "error"):
                line.batches.pop(message.get("id", 0), None)

    def forget(self) -> None:
        """Let go of everything without a word: nothing of it is told to the selector, which a forked process shares."""
        self._selector.close()
        self._registered.clear()
        for line in self.lines:
            if line.connection is not None:
                line.connection.abandon()
        for slot in self.slots:
            slot.pending = None
            slot.lose(SessionLost("closed by the client"))
        self._by_session.clear()
