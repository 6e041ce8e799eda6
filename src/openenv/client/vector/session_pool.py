"""The sessions of a `VectorEnv`: opened, stepped in batches, resumed when a connection breaks, given up when lost.

Each request is answered once, by its reply or by a typed error; a reply goes to the request with its session and id or
is dropped. Knows protocol v2, and that a v1 session ends with its connection; must not know episodes.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Final

from openenv.errors import (
    AccessDenied,
    ConnectFailed,
    OpenEnvError,
    ProtocolError,
    ReplyTooLarge,
    RequestTimeout,
    SessionLost,
)
from openenv.protocol.backoff import Backoff
from openenv.protocol.client_sessions import ResumableSession, error_from_frame
from openenv.protocol.columns import ColumnBlock, layout_from_json

from ..flows import Attempts, Outage
from ..network import Address, ConnectionOptions, parse_ws_url, socket_url
from .connection import V1Format, VectorConnection
from .slot_pool import BEGINS, STEPS, OnAnswer, SlotPool

if TYPE_CHECKING:
    from .column_steps import ColumnSteps

_WATCH_S: Final = 0.002  # how long a wait looks for the answer of a fast server before it sleeps
_TICK_S: Final = 1.0  # a wait wakes this often to ping silent servers and to see that it was interrupted
_CLOSE_S: Final = 5.0  # how long servers may take to confirm that the sessions are closed
_BATCHES_KEPT: Final = 64  # a batch that is answered slot by slot gets no answer as a batch, so it would stay forever
_CONNECTS_AT_ONCE: Final = 16  # v1 needs a socket per slot: one after the other is slow, all at once floods the server

_CONNECTION_STEPS: Final = 4

_SESSIONS_HEADER: Final = "X-OpenEnv-Sessions"

Unreachable = ConnectFailed | AccessDenied


class Slot(ResumableSession):
    """The session of one slot, on a connection that it shares with other slots.

    The data for a resume (token, nonce, ids, the unanswered request) is the same as for `EnvClient`'s session; see the
    states of `ResumableSession`. `name` is None while the slot has no session.
    """

    __slots__ = ("_ids", "error", "has_started_over", "index", "is_copy", "is_opening", "shared")

    def __init__(self, index: int, shared: SharedConnection, ids: Any) -> None:
        self.index = index
        self._ids = ids
        super().__init__()
        self.shared = shared
        self.is_opening = False
        self.has_started_over = False
        self.is_copy = False  # of another session: if it is gone, a new session cannot replace it
        # Why the slot has no session.
        self.error: OpenEnvError | None = None

    # Of all slots in one array, so that a step in columns counts them together.
    @property
    def _last_id(self) -> int:
        return int(self._ids[self.index])

    @_last_id.setter
    def _last_id(self, last_id: int) -> None:
        self._ids[self.index] = last_id

    def count_in(self, ids: Any) -> None:
        """Keep the last request id in another sequence."""
        self._ids = ids

    def message_again(self, kind: str, data: Any) -> None:
        """Make the request that was sent under the last id, as part of another message, `pending`."""
        self._last_id -= 1
        self.message(kind, data)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self.pending is not None or self.is_opening

    @property
    def public_name(self) -> str | None:
        """The name of the slot's session; None if the server gives no names."""
        return None if self.shared.is_session else self.name

    def continue_copy(self, token: str) -> None:
        """Use the session that a token names, a copy of another one."""
        self._token = token
        self.is_copy = True

    def start_over(self) -> None:
        """Give up the session but not the request, which goes to a new session."""
        request = self.pending
        self.forget()
        self.has_started_over = True
        if request is not None:  # under id 1 now: ids count within a session
            self.message(request["type"], request.get("data"))

    def allow_requests(self) -> None:
        """Forget why the slot has no session: a new one is being opened."""
        self._lost = self.error = None


@dataclass(slots=True, eq=False)
class SharedConnection:
    """The connection that some slots share: one at a time, replaced when it breaks.

    `to_open` and `outbox` collect the messages of the next write; `opens` and `batches` map each expected answer to its
    slots. Requests go in one batch, or in several if the server limits its size.
    """

    address: Address
    options: ConnectionOptions
    open_options: dict[str, Any]
    slots: list[Slot] = field(default_factory=list)
    connection: VectorConnection = field(init=False)
    opens: dict[int, Slot] = field(default_factory=dict)
    batches: dict[int, list[Slot]] = field(default_factory=dict)
    to_open: list[Slot] = field(default_factory=list)
    outbox: list[Slot] = field(default_factory=list)
    max_batch: int | None = None  # how many requests the server takes in one, if it says so
    max_rows: int | None = None  # how many steps in columns it takes in one message; None if it takes none
    takes_resets: bool = False  # whether some of them may be resets
    columns: dict[int, Any] = field(default_factory=dict)
    """The slots of each unanswered message with columns."""
    indices: Any = None  # of all slots, as an array
    column_queue: Any = None  # the slots of the next one
    column_sessions: Any = None  # the slots of the last one: the server knows their sessions
    has_been_open: bool = False
    is_first: bool = False
    """Whether it may still pass slots on, once its server has said how many workers it has."""
    _outage: Outage | None = None

    def __post_init__(self) -> None:
        self.forget_connection()

    def forget_connection(self) -> None:
        """Begin with a connection that was never opened."""
        self.connection = self._new_connection()

    def _new_connection(self) -> VectorConnection:
        # A server with several workers has to know it before the sessions are there, to keep the balance. Sessions that
        # are announced and never come would keep others away from that worker for a while, so not too many.
        count = 1 if self.is_first else len(self.slots)
        headers = {**(self.options.headers or {}), _SESSIONS_HEADER: str(count)}
        return VectorConnection(self.address, replace(self.options, headers=headers))

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self.connection.is_open

    @property
    def is_broken(self) -> bool:
        """Whether there was a connection and it is gone."""
        return self.connection.websocket.lost is not None

    @property
    def is_session(self) -> bool:
        """Whether the connection is itself the session of the only slot, and ends with it: protocol v1."""
        return isinstance(self.connection.format, V1Format)

    @property
    def needs_connection(self) -> bool:
        """Whether sessions are to be opened and the connection is missing."""
        return bool(self.to_open) and not (self.connection.is_open or self.connection.has_messages)

    def split(self) -> list[SharedConnection]:
        """Keep one slot, preferably one that waits for a session; return a connection for each of the others."""
        # The connection is a new session already: a slot that wants none would leave it open and unused.
        self.slots.sort(key=lambda slot: not slot.is_opening)
        first, *others = self.slots
        self.slots, self.indices = [first], None
        for slot in others:
            slot.shared = SharedConnection(self.address, self.options, self.open_options, [slot])
        return [slot.shared for slot in others]

    def clear(self) -> None:
        """Forget unsent messages, and those sent on a lost connection."""
        self.opens.clear()
        self.batches.clear()
        self.to_open.clear()
        self.outbox.clear()
        self.columns.clear()
        self.column_queue = self.column_sessions = None

    def connect(self, limit_s: float = inf) -> None:
        """Make a connection, with one attempt.

        Raises:
            ConnectFailed: The server cannot be reached or refuses.
            AccessDenied: The server requires another token.
        """
        connection = self._new_connection()
        connection.open(limit_s)
        self.connection = connection
        self.has_been_open = True
        self.clear()

    def connect_first(self) -> None:
        """Make the first connection, with several attempts within the limit if that may help; raises as above."""
        attempts = Attempts(Backoff(), self.options)
        while True:
            try:
                return self.connect(attempts.left_s)
            except ConnectFailed as exc:
                pause_s = attempts.pause_after(exc)
            time.sleep(pause_s)

    def reconnect(self, backoff: Backoff, reason: str) -> None:
        """Replace a connection, with attempts for as long as the backoff allows; raises as above.

        The time begins with the first failure and ends with `recovered`.
        """
        outage = self._outage = self._outage or Outage(backoff, reason)
        failure = ConnectFailed(f"no lasting connection to {self.address.shown} within {backoff.timeout_s:g} s")
        while outage.left_s > 0:
            # A pause before the first attempt too: a server that restarts has lost all its clients at once.
            time.sleep(outage.next_pause_s())
            try:
                return self.connect()
            except ConnectFailed as exc:
                failure = exc
        raise failure

    def move(self, address: Address) -> None:
        """Use another server from now on; give up the slots' sessions at the old one."""
        self.address = address
        for slot in self.slots:
            if slot.is_resuming:
                slot.start_over()
                slot.has_started_over = False

    def recovered(self) -> None:
        """Record that the server answers."""
        self._outage = None

    def _batch_of(self, slots: list[Slot], each: bool) -> dict[str, Any]:
        batch_id = self.connection.next_id()
        self.batches[batch_id] = slots
        while len(self.batches) > max(_BATCHES_KEPT, len(self.slots)):
            del self.batches[next(iter(self.batches))]
        batch: dict[str, Any] = {"type": "batch", "id": batch_id, "requests": [slot.pending for slot in slots]}
        return {**batch, "each": True} if each else batch

    def queue_open(self, slot: Slot) -> None:
        """Open, or resume, a session with the next write."""
        slot.is_opening = True
        self.to_open.append(slot)

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for the next write."""
        return bool(self.outbox or self.to_open) or self.column_queue is not None

    def _column_messages(self, steps: ColumnSteps) -> Iterable[dict[str, Any]]:
        slots, self.column_queue = self.column_queue, None
        most = self.max_rows or len(slots)
        for start in range(0, len(slots), most):
            part = slots[start : start + most]
            batch_id = self.connection.next_id()
            self.columns[batch_id] = part
            names = None
            if self.column_sessions is None or not (
                part.size == self.column_sessions.size and (part == self.column_sessions).all()
            ):
                by_index = {slot.index: slot.name for slot in self.slots}
                names = [str(by_index[index]) for index in part.tolist()]
                self.column_sessions = part
            yield steps.message(batch_id, part, names)

    def flush(self, *, each: bool, steps: ColumnSteps | None = None) -> None:
        """Send everything that waits, in one write: an `open` for each session, one `batch` of requests, columns."""
        connection = self.connection
        if connection.format is None or not self.has_unsent:
            return
        # Example, two new sessions and a step in a third: open 7, open 8, batch 9 of [step]. A slot that waits for its
        # session is not in the batch; `SessionPool._opened` puts it into the next one.
        messages: list[dict[str, Any]] = []
        # Those that go back to their sessions first: the first message decides which worker gets the connection.
        for slot in sorted(self.to_open, key=lambda slot: not slot.is_resuming):
            open_id = connection.next_id()
            self.opens[open_id] = slot
            messages.append({**slot.open_message(open_id), **self.open_options})
        # A slot may be there twice (`reset(slots=[0, 0])`), with one request.
        waiting = list(dict.fromkeys(slot for slot in self.outbox if slot.pending is not None))
        most = self.max_batch or max(1, len(waiting))
        for start in range(0, len(waiting), most):
            messages.append(self._batch_of(waiting[start : start + most], each))
        if self.column_queue is not None and steps is not None:
            messages += self._column_messages(steps)
        self.outbox.clear()
        self.to_open.clear()
        connection.send(messages)


def placements(urls: Sequence[str], n: int, connections: int) -> list[tuple[str, range]]:
    """Return the server and the slots of each connection, spread as evenly as whole numbers allow.

    Example: 5 slots, 2 servers, 3 connections are a: 0-1, a: 2, b: 3-4.

    Args:
        urls: The servers.
        n: How many slots.
        connections: How many connections in all; each server that has a slot gets at least one.
    """
    used = list(urls)[:n]
    wanted = max(len(used), min(connections, n))
    plans, first = [], 0
    for url, share, count in zip(used, shares(n, len(used)), shares(wanted, len(used)), strict=True):
        for size in shares(share, min(count, share)):
            plans.append((url, range(first, first + size)))
            first += size
    return plans


def shares(total: int, parts: int) -> list[int]:
    """Split a number into parts that differ by one at most, the larger ones first."""
    size, more = divmod(total, parts)
    return [size + 1] * more + [size] * (parts - more)


class SessionPool(SlotPool):
    """Many sessions over few connections.

    A connection that breaks goes through `_repair` at the next occasion (a write, a read, a wait):

        broken -> take the messages before the end -> reconnect -> `open` with each slot's token (resume)
                                                       |            -> opened: the unanswered request again, same id
                                                       |            -> SESSION_LOST: an error in that slot
                                                       +-- no connection in time: an error in each slot (stranded: the
                                                           next reset of the slot tries the old session first, and
                                                           another server if that one is gone and `find_urls` is given)

    Args:
        plans: Which connections to make: the server and the slots of each.
        options: How to connect.
        open_options: Further keys for `open`: `wait_s`, `compress`.
        reconnect_s: How long to try again after a connection broke.
        on_answer: Called with a slot, the request's type, and the reply's data or an error.
        fits_workers: Whether a server with several workers gets as many connections for each of them.
        find_urls: Returns the servers that exist now; slots of a missing server get sessions on one of them.
    """

    def __init__(
        self,
        plans: Sequence[tuple[str, range]],
        *,
        fits_workers: bool = False,
        options: ConnectionOptions,
        open_options: dict[str, Any],
        reconnect_s: float,
        on_answer: OnAnswer,
        find_urls: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._backoff = Backoff(reconnect_s)
        self._on_answer = on_answer
        self._selector = selectors.DefaultSelector()
        self._answers_at_once = False
        self._registered: dict[SharedConnection, int] = {}
        self._by_name: dict[str, Slot] = {}
        self._each = False
        self._fits_workers = fits_workers
        self._is_interrupted = False
        # Servers that were given up since the last write began, so that each of their slots does not wait again.
        self._unreachable: dict[Address, Unreachable] = {}
        self._find_urls = find_urls
        self._present: list[Address] | None = None  # the latest result of `find_urls`
        self._moving = threading.Lock()
        self.connections: list[SharedConnection] = []
        self.slots: list[Slot] = []
        self.missing: set[int] = set()
        self._ids = [0] * (1 + max(indices[-1] for _, indices in plans))
        self._steps: ColumnSteps | None = None
        self._reset_kwargs: Mapping[str, Any] = {}
        for url, indices in plans:
            shared = SharedConnection(parse_ws_url(socket_url(url)), options, open_options)
            shared.slots = [Slot(index, shared, self._ids) for index in indices]
            self.connections.append(shared)
            self.slots.extend(shared.slots)
        self.missing.update(range(len(self.slots)))
        can_watch = hasattr(os, "sched_yield") and (os.cpu_count() or 1) > 1
        self._may_watch = can_watch and all(shared.address.is_local for shared in self.connections)

    # -- requests -------------------------------------------------------------------------------------------------

    def open(self, slot: Slot) -> None:
        """Open a session, with the next write, for a slot that has none."""
        if slot.name is None and not slot.is_opening:
            slot.allow_requests()
            slot.shared.queue_open(slot)

    def request(self, slot: Slot, kind: str, data: Any = None) -> None:
        """Send a request with the next write; a slot without a session gets one first."""
        if slot.name is None:
            self.open(slot)
        else:
            slot.shared.outbox.append(slot)
        if self._steps is not None:
            self._steps.withdraw(slot.index)
        slot.has_started_over = False
        slot.message(kind, data)

    # -- steps in columns -----------------------------------------------------------------------------------------

    def begin_columns(self, actions: Sequence[Any], chosen: Any) -> None:
        """Take a step in the chosen slots, with the next write."""
        steps = self._steps
        assert steps is not None
        begins = None
        if chosen is None:
            chosen = steps.whole
        elif self.begins_episodes:
            begins, chosen = chosen == BEGINS, chosen != 0
            begins = begins if begins.any() else None
        else:
            chosen = chosen == STEPS
        steps.begin(actions, chosen, begins)
        for shared in self.connections:
            shared.columns.clear()  # of steps that were given up
            if shared.indices is None or len(shared.indices) != len(shared.slots):
                shared.indices = steps.all_slots[[slot.index for slot in shared.slots]]
            slots = shared.indices[chosen[shared.indices]]
            if not len(slots):
                continue
            if shared.max_rows is None:  # a restarted server may offer them no longer
                self._send_single(shared)
            else:
                shared.column_queue = slots

    @property
    def begins_episodes(self) -> bool:
        """Whether a step in columns may begin episodes: all connections agree."""
        return all(shared.takes_resets for shared in self.connections)

    def use_for_resets(self, kwargs: Mapping[str, Any]) -> None:
        """Set the keywords of resets that are part of a step in columns."""
        self._reset_kwargs = kwargs
        if self._steps is not None:
            self._steps.reset_kwargs = kwargs

    def take_columns(self, *, whole: bool) -> ColumnBlock | None:
        """Return the results of a step in columns that have come since the last call."""
        return None if self._steps is None else self._steps.take(whole=whole)

    def columns_left(self) -> int:
        """Return how many results of a step in columns are still to come."""
        return 0 if self._steps is None else self._steps.left

    def columns_untaken(self) -> int:
        """Return how many results of a step in columns were not taken yet, whether they have come or not."""
        return 0 if self._steps is None else self._steps.untaken

    def in_columns(self, index: int) -> bool:
        """Whether a slot takes part in a step in columns whose results were not taken yet."""
        return self._steps is not None and self._steps.has(index)

    def _in_column_step(self, slot: Slot) -> bool:
        return self._steps is not None and bool(self._steps.expected[slot.index])

    def _make_single(self, slot: Slot) -> None:
        """Turn the unanswered step of a slot into a request by itself, under the same id."""
        if self._steps is not None and self._steps.expected[slot.index] and slot.pending is None:
            slot.message_again(*self._steps.single(slot.index))

    def _send_single(self, shared: SharedConnection) -> None:
        for slot in shared.slots:
            self._make_single(slot)
            if slot.pending is not None and self._in_column_step(slot):
                shared.outbox.append(slot)

    def _take_columns(self, shared: SharedConnection, message: dict[str, Any]) -> None:
        """Take in the results of a message with columns."""
        slots = shared.columns.pop(message.get("id", 0), None)
        if slots is None or self._steps is None:
            return  # a late answer to a step that was given up
        try:
            self._steps.put(slots, message)
            replies = [
                (self.slots[slots[row]], shared.connection.decoded(reply)) for row, reply in message.get("replies", ())
            ]
        except (ProtocolError, ValueError, TypeError, IndexError) as exc:
            shared.connection.drop(f"connection lost: {exc}")
            return
        for slot, reply in replies:
            self._make_single(slot)
            self._reply(slot, reply)

    def _answer(self, slot: Slot, kind: str, data: Any, error: OpenEnvError | None) -> None:
        """Report the answer to a request."""
        if kind in ("step", "reset") and self._in_column_step(slot):
            assert self._steps is not None
            self._steps.put_single(slot.index, data, error)
        else:
            self._on_answer(slot, kind, data, error)

    # -- writing --------------------------------------------------------------------------------------------------

    def flush(self, *, each: bool = False, prepare: Callable[[SharedConnection], None] | None = None) -> None:
        """Send the waiting messages: one write per connection.

        Args:
            each: Whether the server may answer slot by slot.
            prepare: Makes the requests of a connection just before they are sent: the sessions of the first connection
                already work while the requests of others are encoded.
        """
        self._each = each
        self._unreachable.clear()
        self._present = None
        self._connect_needed()
        for shared in list(self.connections):  # connections added meanwhile are handled by the code that adds them
            if prepare is not None:
                prepare(shared)
            self._flush(shared)
            self._repair(shared)

    def _flush(self, shared: SharedConnection) -> None:
        if not shared.has_unsent:
            return
        # A message that came before a connection broke may answer an `open` that is "sent" now: a v1 server that is
        # full says so at once and hangs up.
        if shared.is_broken and not shared.connection.has_messages:
            return
        if shared.needs_connection:
            self._connect([shared])
        shared.flush(each=self._each, steps=self._steps)

    # -- connecting -----------------------------------------------------------------------------------------------

    def _connect_needed(self) -> None:
        """Make the missing connections: one to each server first, the others if that one succeeded."""
        # So a wrong address costs one timeout and not one per connection.
        needed = [shared for shared in self.connections if shared.needs_connection and not shared.is_broken]
        first: dict[Address, SharedConnection] = {}
        for shared in needed:
            first.setdefault(shared.address, shared)
        others = [shared for shared in needed if shared is not first[shared.address]]
        for shared in first.values():
            shared.is_first = self._fits_workers
        self._connect(list(first.values()))
        if self._fits_workers:
            for shared in first.values():
                shared.is_first = False
                others += self._fit_workers(shared, [other for other in others if other.address == shared.address])
        self._connect(others)

    def _fit_workers(self, first: SharedConnection, others: list[SharedConnection]) -> list[SharedConnection]:
        """Spread slots over as many connections for each worker of their server; return the added connections.

        A connection is bound to one worker, so fewer connections than workers leave some without work. Each costs a
        batch about as much as four steps of microseconds, so for such steps there are fewer.
        """
        websocket, count = first.connection.websocket, len(others) + 1
        workers = websocket.workers
        slots = [slot for shared in (first, *others) for slot in shared.slots]
        wanted = min(len(slots), -(-count // workers) * workers)
        if websocket.has_short_steps:
            wanted = min(wanted, max(count, math.ceil(math.sqrt(len(slots) / _CONNECTION_STEPS))))
        if workers < 2 or wanted <= count or any(slot.name is not None for slot in slots):
            return []
        added = [SharedConnection(first.address, first.options, first.open_options) for _ in range(wanted - count)]
        start = 0
        for shared, size in zip((first, *others, *added), shares(len(slots), wanted), strict=True):
            shared.slots, shared.indices = slots[start : start + size], None
            start += size
            shared.to_open = [slot for slot in shared.slots if slot.is_opening]
            for slot in shared.slots:
                slot.shared = shared
        self.connections += added
        return added

    def _connect(self, connections: Sequence[SharedConnection]) -> None:
        """Make first connections, or those for sessions that start over; side by side, a few at a time."""
        if len(connections) > 1:
            count = min(len(connections), _CONNECTS_AT_ONCE)
            with ThreadPoolExecutor(count, thread_name_prefix="openenv-connect") as pool:
                failures = list(pool.map(self._try_first, connections))
        else:
            failures = [self._try_first(shared) for shared in connections]
        for shared, failure in zip(connections, failures, strict=True):
            if failure is None:
                self._use(shared)
                continue
            shared.clear()
            for slot in [slot for slot in shared.slots if slot.is_opening]:
                self._give_up(slot, failure, is_stranded=True)

    def _try_first(self, shared: SharedConnection) -> Unreachable | None:
        """Make a first connection, or return why not; if a server is gone, connect to another one."""
        failure = self._try_address(shared)
        while isinstance(failure, ConnectFailed) and self._move(shared):
            failure = self._try_address(shared)
        return failure

    def _move(self, shared: SharedConnection) -> bool:
        """Move a connection from a missing server to the one with the fewest slots; return False if there is none.

        Not for the first connection of all: an address that was never right is an error.
        """
        is_bound = any(slot.name is not None or slot.is_copy for slot in shared.slots)
        if self._find_urls is None or not shared.has_been_open or is_bound:
            return False
        with self._moving:  # several connections move at once: each sees the others' choices
            if self._present is None:
                self._present = [parse_ws_url(socket_url(url)) for url in self._find_urls()]
            servers = [address for address in self._present if address not in self._unreachable]
            if not servers:
                return False
            slots = {address: 0 for address in servers}
            for other in self.connections:
                if other.address in slots:
                    slots[other.address] += len(other.slots)
            shared.move(min(servers, key=slots.__getitem__))
        return True

    def _try_address(self, shared: SharedConnection) -> Unreachable | None:
        """Connect, or return why not; an address that one connection could not reach is not tried by later ones."""
        if shared.address not in self._unreachable:
            try:
                shared.connect_first()
                return None
            except (ConnectFailed, AccessDenied) as exc:
                self._unreachable[shared.address] = exc
        return self._unreachable[shared.address]

    def _use(self, shared: SharedConnection) -> None:
        """Begin to use a new connection: open, or resume, the sessions of its slots."""
        # The first connection to a v1 server was planned for many slots, before it was known to carry one.
        others = self._split(shared) if shared.is_session else []
        self._register(shared)
        for slot in shared.slots:
            if slot.name is not None or slot.is_opening:
                shared.queue_open(slot)
        self._connect([other for other in others if other.needs_connection])
        for other in others:
            self._flush(other)
            self._repair(other)

    def _split(self, shared: SharedConnection) -> list[SharedConnection]:
        """Leave a connection that is a session to one slot; return connections for the others."""
        for slot in shared.slots:
            if slot.name is not None or slot.is_copy:
                self._give_up(slot, SessionLost("the server speaks only protocol v1 now, which resumes nothing"))
            elif slot.is_resuming:
                slot.start_over()
                slot.has_started_over = False
        shared.to_open.clear()
        others = shared.split()
        self.connections += others
        for other in others:
            for slot in other.slots:
                if slot.is_opening:
                    other.queue_open(slot)
        return others

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(self, enough: Callable[[], bool], timeout_s: float | None, *, whole: bool = False) -> None:
        """Take in replies until there are enough.

        Raises:
            RequestTimeout: They did not come in time; they still may.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for shared in list(self.connections):
            self._take(shared)
            self._repair(shared)
        while not enough():
            if self._is_interrupted:
                raise RequestTimeout("closed while slots were waited for")
            left = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left <= 0:
                count = sum(slot.is_busy for slot in self.slots) + self.columns_left()
                raise RequestTimeout(f"{count} slots have not answered within {timeout_s} s; wait again, or reset them")
            ready = self._select(left)
            for key, _ in ready:
                self._receive(key.data)
            if not ready:
                self._check_quiet()

    def _select(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for connections that can be read.

        To sleep and be woken up takes longer than a few fast steps, so a server on this machine that has answered at
        once the last time is watched for a moment. Each look lets other processes run first, the server among them.
        """
        began = time.perf_counter()
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if self._answers_at_once:
            while not ready and time.perf_counter() - began < _WATCH_S:
                os.sched_yield()
                ready = self._selector.select(0)
        if not ready:
            ready = self._selector.select(timeout_s)
        self._answers_at_once = self._may_watch and bool(ready) and time.perf_counter() - began < _WATCH_S
        return ready

    def interrupt(self) -> None:
        """End a wait in another thread, soon and for good."""
        self._is_interrupted = True

    def _receive(self, shared: SharedConnection) -> None:
        shared.connection.receive()
        self._take(shared)
        self._repair(shared)

    def _take(self, shared: SharedConnection) -> None:
        if shared.connection.has_messages:
            for message in shared.connection.take():
                self._handle(shared, message)
            self._flush(shared)

    def _check_quiet(self) -> None:
        """Ping servers that were silent for long while slots wait for them."""
        for shared in list(self.connections):
            if shared.columns or any(slot.is_busy for slot in shared.slots):
                shared.connection.check()
                self._repair(shared)

    def keep_alive(self) -> None:
        """Answer pings while no call waits; other messages are kept."""
        for shared in self.connections:
            shared.connection.keep_alive()

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, shared: SharedConnection, message: dict[str, Any]) -> None:
        kind, request_id = message.get("type"), message.get("id")
        if kind == "batch":
            replies = message.get("replies", ())
            slots: Sequence[Slot | None] = shared.batches.pop(request_id, ()) if request_id is not None else ()
            if len(slots) != len(replies):  # with `each`, the server groups the replies that are ready together
                slots = [None] * len(replies)
            for slot, reply in zip(slots, replies, strict=True):
                name = reply.get("session", "")
                if slot is None or name != slot.name:  # nearly all are in order
                    slot = self._by_name.get(name, slot)
                self._reply(slot, reply)
        elif kind == "columns":
            self._take_columns(shared, message)
        elif "session" in message and kind != "opened" and kind != "event":
            self._reply(self._by_name.get(message["session"]), message)
        elif kind in ("opened", "error") and request_id in shared.opens:
            self._opened(shared.opens.pop(request_id), message)
        elif kind == "error":  # of a whole batch, or without an id: a message that the server could not read
            self._refused(shared, request_id, error_from_frame(message.get("data") or {}))
        elif kind == "event" and message.get("event") == "detached":
            slot = self._by_name.get(message.get("session", ""))
            if slot is not None:
                self._give_up(slot, SessionLost(str(message.get("reason", "detached"))))

    def _reply(self, slot: Slot | None, reply: dict[str, Any]) -> None:
        request = None if slot is None else slot.pending
        if slot is None or request is None or reply.get("id") != request["id"]:
            return  # a late answer to a request that was given up
        kind = request["type"]
        try:
            data = slot.take(reply)
        except SessionLost as error:
            self._give_up(slot, error, kind=kind)
        except ReplyTooLarge:  # the server keeps it; a batch of fewer has room for it
            slot.pending = request
            slot.shared.outbox.append(slot)
        except OpenEnvError as error:
            slot.pending = None
            self._answer(slot, kind, None, error)
        else:
            self._answer(slot, kind, data, None)

    def _opened(self, slot: Slot, message: dict[str, Any]) -> None:
        """Take in the answer to an `open`; the slot's request goes to the session now."""
        try:
            slot.take_opened(message)
        except OpenEnvError as error:
            # The reset was to begin in a stranded session that is gone: use another session.
            if slot.name is None and isinstance(error, SessionLost) and not slot.is_copy:
                slot.start_over()
                slot.shared.queue_open(slot)
            else:
                self._give_up(slot, error)
            return
        slot.is_opening = slot.is_copy = False
        slot.shared.recovered()
        max_batch = message.get("max_batch")
        slot.shared.max_batch = max_batch if isinstance(max_batch, int) and max_batch > 0 else None
        slot.shared.column_sessions = None
        self._use_columns(slot.shared, message.get("columns"))
        if slot.name is None:
            slot.name = str(message["session"])
            self._by_name[slot.name] = slot
            self.missing.discard(slot.index)
        if slot.pending is not None:
            # With the same id as before: in a resumed session, an executed request is answered and does not run again.
            slot.pending["session"] = slot.name
            slot.shared.outbox.append(slot)

    def _use_columns(self, shared: SharedConnection, offer: Any) -> None:
        """Take the server's offer of steps in columns, if all connections have the same."""
        shared.max_rows, shared.takes_resets = None, False
        layout = layout_from_json(offer) if isinstance(offer, dict) else None
        if layout is None:
            return
        if self._steps is None:
            try:
                steps = importlib.import_module("openenv.client.vector.column_steps")
            except ImportError:  # NumPy is optional for clients
                return
            self._steps = steps.ColumnSteps(layout, self._ids)
            self._steps.reset_kwargs = self._reset_kwargs
            for slot in self.slots:
                slot.count_in(self._steps.ids)
        if self._steps.layout == layout:
            shared.takes_resets = offer.get("resets") is True
            most = offer.get("max_rows")
            shared.max_rows = most if isinstance(most, int) and most > 0 else None
        self.layout = self._steps.layout

    def _refused(self, shared: SharedConnection, request_id: Any, error: OpenEnvError) -> None:
        """Fail the slots of a message that was refused as a whole."""
        slots = shared.batches.pop(request_id, None) if request_id is not None else shared.slots
        stepped = shared.columns.pop(request_id, None) if request_id is not None else None
        if stepped is not None:
            slots = [self.slots[index] for index in stepped]
        for slot in slots or ():
            self._make_single(slot)
            if slot.pending is not None and not slot.is_opening:
                kind, slot.pending = slot.pending["type"], None
                self._answer(slot, kind, None, error)

    # -- losing ---------------------------------------------------------------------------------------------------

    def _give_up(self, slot: Slot, error: OpenEnvError, *, is_stranded: bool = False, kind: str | None = None) -> None:
        """Record that a slot has no session, and answer its request with the error."""
        if slot.name is not None:
            self._by_name.pop(slot.name, None)
        if slot.pending is not None:
            kind = slot.pending["type"]
        elif self._in_column_step(slot):
            kind = "step"
        slot.lose(str(error), is_stranded=is_stranded)
        slot.name, slot.error, slot.is_opening = None, error, False
        self.missing.add(slot.index)
        if kind is not None:
            self._answer(slot, kind, None, error)

    def _repair(self, shared: SharedConnection) -> None:
        """Replace a connection that broke, and the one in its place if that breaks too."""
        while shared.is_broken:
            reason = shared.connection.lost_reason
            self._take(shared)  # messages before the end still count
            self._unregister(shared)
            self._replace(shared, reason)
            self._flush(shared)

    def _replace(self, shared: SharedConnection, reason: str) -> None:
        """Connect again and resume every session; send unanswered requests once more."""
        for slot in shared.slots:
            self._make_single(slot)
        if shared.is_session and not any(slot.is_opening for slot in shared.slots):
            self._end_with_connection(shared, reason)
            return
        slots = [slot for slot in shared.slots if slot.name is not None or slot.is_opening]
        if not slots:
            shared.forget_connection()
            return
        has_sessions = any(slot.name is not None for slot in slots)
        try:
            # If nothing can be lost, an error at once beats another wait; episodes are worth one wait per connection.
            if not has_sessions and shared.address in self._unreachable:
                raise self._unreachable[shared.address]
            shared.reconnect(self._backoff if has_sessions else Backoff(shared.options.connect_timeout_s), reason)
        except (ConnectFailed, AccessDenied) as exc:
            self._unreachable[shared.address] = exc
            shared.forget_connection()
            shared.recovered()
            shared.clear()
            for slot in slots:
                lost = exc if slot.name is None else SessionLost(f"{reason}; then: {exc}")
                self._give_up(slot, lost, is_stranded=True)
            return
        self._use(shared)

    def _end_with_connection(self, shared: SharedConnection, reason: str) -> None:
        """Give up a v1 session, which has ended with its connection.

        A reset starts a new episode in any case: it goes to a new session, once.
        """
        shared.forget_connection()
        shared.clear()
        for slot in shared.slots:
            if slot.name is None:
                continue
            request = slot.pending
            if request is not None and request["type"] == "reset" and not slot.has_started_over:
                self._by_name.pop(slot.name, None)
                slot.start_over()
                self.open(slot)
            else:
                self._give_up(slot, SessionLost(reason))

    def _register(self, shared: SharedConnection) -> None:
        if shared.connection.is_open:
            descriptor = shared.connection.fileno()
            if descriptor in self._selector.get_map():  # of a connection that broke and was not repaired yet
                self._unregister(self._selector.get_key(descriptor).data)
            self._registered[shared] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, shared)

    def _unregister(self, shared: SharedConnection) -> None:
        descriptor = self._registered.pop(shared, None)
        if descriptor is not None:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(descriptor)

    # -- ending ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all sessions and hang up; never raises."""
        for shared in self.connections:
            shared.outbox.clear()
            shared.batches.clear()  # unanswered steps: only the answer to `close` is waited for
            for slot in shared.slots if shared.is_open else ():
                if slot.name is not None:
                    slot.message("close")
                    shared.outbox.append(slot)
            shared.flush(each=False)
        # Waited for, so that a server has free slots again when `close` returns: the next VectorEnv needs them.
        deadline = time.monotonic() + _CLOSE_S
        while any(shared.batches for shared in self.connections if shared.is_open) and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.1):
                self._drain(key.data)
        for shared in self.connections:
            self._unregister(shared)
            shared.connection.close()
        self.forget()

    def _drain(self, shared: SharedConnection) -> None:
        shared.connection.receive()
        for message in shared.connection.take():
            if message.get("type") in ("batch", "error"):
                shared.batches.pop(message.get("id", 0), None)
        if not shared.is_open:
            self._unregister(shared)

    def forget(self) -> None:
        """Drop everything without a message."""
        # Nothing is unregistered: a forked process shares the selector with its parent.
        self._selector.close()
        self._registered.clear()
        for shared in self.connections:
            shared.connection.drop("closed by the client")
        for slot in self.slots:
            slot.lose("closed by the client")
            slot.error, slot.is_opening = SessionLost("closed by the client"), False
        self._by_name.clear()
