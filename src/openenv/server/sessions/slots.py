"""Slots: assigns the server's session slots to clients, queues clients, and evicts soft sessions.

A session takes a slot before its environment is built, and returns it after the environment is closed. Soft sessions
(kept for clients with a cookie) are evicted when their slot is needed. With several processes, the limits hold for the
whole server: each decision includes the counts of the others (`peers`), under a common lock. Knows sessions and limits;
must not know environments. May be used from several threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from openenv.errors import SessionCapacityError

from .lifetime import CLOSED, EVICTED, SessionLimits
from .peers import Peers, SlotCounts
from .session import Session, SessionKind, SessionState

_POSITIONS_S: Final = 0.5  # the maximum age of computed queue positions
_REMEMBERED: Final = 10_000  # close reasons of ended sessions
_LEFT_AFTER_S: Final = 10.0  # a visitor who is idle this long makes room for another one
_NAMED: Final = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})  # clients know their ids

OnPosition = Callable[[int], None]


class Ticket:
    """A place in a queue; `called` is done when its owner should try to get a slot."""

    __slots__ = ("called", "loop", "number")

    def __init__(self) -> None:
        self.number = 0  # its place among the tickets of all processes
        self.loop = asyncio.get_running_loop()
        self.called: asyncio.Future[None] = self.loop.create_future()

    async def wait(self, deadline: float | None) -> bool:
        """Wait for a call until a deadline on the clock of the loop; return whether it came."""
        timeout = None if deadline is None else deadline - self.loop.time()
        if timeout is not None and timeout <= 0:
            return False
        done, _ = await asyncio.wait([self.called], timeout=timeout)
        return bool(done)


class CapacityQueue:
    """Tasks that wait for capacity, first come, first served; a change may come from any thread.

        join ──> waiting ──── call_next ────> called ── gets a slot ──> leave, which calls the next
                   ^ │                           │
                   │ └── stand_aside: keeps      │ no slot
                   │     the place, not called   │
                   │     until slot_freed        │
                   └──────── wait_again ─────────┘

    Only one ticket is called at a time: a freed slot wakes the first ticket, and when that leaves, it wakes the next.
    So slots are assigned in order, and a freed slot does not wake all waiting clients.

    Args:
        limit: How many may wait, in all processes; None for no limit.
        clock: Measures the age of computed positions.
        peers: The processes that share the queue.
        on_change: Called when a ticket joins or leaves.
    """

    def __init__(
        self,
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        peers: Peers | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.limit = limit
        self.peers = peers or Peers()
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.Lock()
        self._tickets: OrderedDict[Ticket, bool] = OrderedDict()  # whether it was called
        self._aside: set[Ticket] = set()
        self._positions: dict[Ticket, int] = {}
        self._counted_at = -_POSITIONS_S

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def has_next(self) -> bool:
        """Whether the next free slot is for a waiting client; clients that stand aside do not count."""
        if self._tickets:
            with self._lock:
                if self._first() is not None:
                    return True
        return self.peers.has_next

    @property
    def total(self) -> int:
        """The number of waiting clients in all processes."""
        return len(self._tickets) + self.peers.counts().waiting

    def join(self) -> Ticket | None:
        """Take the last place; None if the queue is full."""
        ticket = Ticket()
        with self._lock:
            if self.limit is not None and self.total >= self.limit:
                return None
            ticket.number = self.peers.next_ticket()
            self._tickets[ticket] = False
            self._positions[ticket] = self.total
            self._publish()
        self._changed()
        return ticket

    def _publish(self) -> None:
        """Publish the waiting tickets for other processes; the caller holds the lock."""
        if self.peers.is_shared:
            first = self._first()
            self.peers.publish_waiting([ticket.number for ticket in self._tickets], first.number if first else 0)

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def leave(self, ticket: Ticket) -> None:
        """Leave the queue, with or without a slot, and call the next ticket."""
        with self._lock:
            self._tickets.pop(ticket, None)
            self._positions.pop(ticket, None)
            self._aside.discard(ticket)
            self._publish()
        self._changed()
        self.call_next()

    def slot_freed(self) -> None:
        """End all standing aside, and call the first ticket."""
        with self._lock:
            if self._aside:
                self._aside.clear()
                self._publish()
        self.call_next()

    def call_next(self) -> None:
        """Call the first ticket, unless it is called already."""
        if not (self._tickets or self.peers.is_shared):
            return
        with self._lock:
            ticket = self._first()
            if ticket is not None and self.peers.is_first(ticket.number):
                if self._tickets[ticket]:
                    return
                self._tickets[ticket] = True
            else:
                ticket = None
        if ticket is None:
            self.peers.wake_first()
        else:
            self._wake(ticket)

    def call_all(self) -> None:
        """Call all tickets: the change may concern each of them."""
        if not self._tickets:
            return
        with self._lock:
            tickets = [ticket for ticket, is_called in self._tickets.items() if not is_called]
            self._tickets.update(dict.fromkeys(tickets, True))
        for ticket in tickets:
            self._wake(ticket)

    def _wake(self, ticket: Ticket) -> None:
        try:
            ticket.loop.call_soon_threadsafe(_set, ticket.called)
        except RuntimeError:  # its loop has ended
            self.leave(ticket)

    def _first(self) -> Ticket | None:
        """Return the ticket that gets the next free slot; the caller holds the lock."""
        if not self._aside:
            return next(iter(self._tickets), None)
        return next((ticket for ticket in self._tickets if ticket not in self._aside), None)

    def stand_aside(self, ticket: Ticket) -> None:
        """Keep the place, but let others pass until a slot is freed, because a separate limit stops this ticket."""
        with self._lock:
            if ticket in self._tickets:
                self._aside.add(ticket)
                self._publish()
        self.call_next()

    def wait_again(self, ticket: Ticket) -> None:
        """Prepare a called ticket for the next call. Do this before the try, or a call in between is lost."""
        with self._lock:
            if ticket.called.done() and ticket in self._tickets:
                self._tickets[ticket] = False
                ticket.called = ticket.loop.create_future()

    def is_next(self, ticket: Ticket) -> bool:
        """Return whether the next free slot is for this ticket."""
        with self._lock:
            return self._first() is ticket and self.peers.is_first(ticket.number)

    def position(self, ticket: Ticket) -> int:
        """Return a position in the queue, 1 for the next; up to half a second old, because counting costs time."""
        with self._lock:
            now = self._clock()
            if ticket not in self._positions or now - self._counted_at > _POSITIONS_S:
                self._counted_at = now
                before = self.peers.waiting_before
                self._positions = {
                    waiting: place + before(waiting.number) for place, waiting in enumerate(self._tickets, 1)
                }
            return self._positions.get(ticket, 1)


def _set(called: asyncio.Future[None]) -> None:
    if not called.done():
        called.set_result(None)


class SlotReservation(NamedTuple):
    """The outcome of a try: a session, or a session to evict and a change to wait for. All None is a refusal."""

    session: Session | None
    victim: Session | None = None
    wait_for: Literal["slot", "class"] | None = None


class Slots:
    """The slots of one server.

    Clients wait in three queues:

        queue           sessions opened with `wait_s` wait for any slot. Newcomers may not overtake these clients.
        _closing_queue  other sessions wait up to `closing_wait_s` for the slot of a closing session
        _once_queue     single requests wait for a place; they have as many separate places as the server has slots

    Args:
        limits: The number of slots, and the limits for kinds of clients.
        make: Makes an unbuilt session.
        is_unsure: Whether the environment's class is unknown; then the number of slots depends on the first one.
        report: Called with the code of each refusal.
        abandon: Abandons a closing session that hangs, which frees its slot; returns whether it did.
    """

    def __init__(
        self,
        limits: SessionLimits,
        make: Callable[[SessionKind], Session],
        *,
        is_unsure: Callable[[], bool],
        report: Callable[[str], None],
        abandon: Callable[[Session, float], bool],
    ) -> None:
        self._limits = limits
        self._make = make
        self._is_unsure = is_unsure
        self._report = report
        self._abandon = abandon
        self.count = limits.sessions
        self.peers = Peers()
        self.queue = CapacityQueue(limits.queue, on_change=self._publish)
        self._closing_queue = CapacityQueue(on_change=self._publish)
        self._once_queue = CapacityQueue(on_change=self._publish)
        self.is_closed = False
        self._lock = threading.Lock()
        self._live: dict[str, Session] = {}
        self._once: set[Session] = set()
        self._of_agents = 0  # live sessions opened by agents
        self._soft = 0  # live sessions that may be evicted while unused
        self._closing: set[str] = set()  # live sessions that are closing
        self._ended: OrderedDict[str, str] = OrderedDict()  # close reasons of ended sessions, by id

    def reconfigure(self, limits: SessionLimits) -> None:
        """Change the limits, before the first session."""
        self._limits = limits
        self.queue.limit = limits.queue
        self.count = limits.sessions

    def share(self, peers: Peers) -> None:
        """Share the limits with other processes, before the first session."""
        self.peers = self.queue.peers = peers
        self._publish()

    # -- other processes ------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self.peers.is_shared:
            with self._lock, self.peers:
                self._publish_counts()

    def _publish_counts(self) -> None:
        """Publish the counts of this process; the caller holds the lock, and the common one when taking a slot."""
        if self.peers.is_shared:
            self.peers.publish(
                SlotCounts(
                    live=len(self._live),
                    once=len(self._once),
                    agents=self._of_agents,
                    soft=self._soft,
                    closing=len(self._closing),
                    waiting=len(self.queue),
                    waiting_briefly=len(self._closing_queue),
                    waiting_once=len(self._once_queue),
                )
            )

    def note_closing(self, session: Session) -> None:
        """Record a closing session, so that clients of other processes wait for its slot; from any thread."""
        if self.peers.is_shared:
            with self._lock:
                if self._live.get(session.id) is session:
                    self._closing.add(session.id)
                    self._publish_counts()

    def wake(self) -> None:
        """Let clients try again: another process has freed a slot, or the conditions have changed."""
        self._closing_queue.call_all()
        self._once_queue.call_next()
        self.queue.slot_freed()

    def evict_for_peer(self, *, for_soft: bool) -> None:
        """Evict a soft session for a client of another process."""
        with self._lock:
            victim = self._victim(for_soft=for_soft)
        if victim is not None:
            victim.close(EVICTED)

    # -- the sessions ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Slots in use, including other processes."""
        return len(self._live) + self.peers.counts().live

    @property
    def held(self) -> int:
        """Slots in use by sessions of this process."""
        return len(self._live)

    def sessions(self) -> list[Session]:
        """List the sessions that hold a slot."""
        with self._lock:
            return list(self._live.values())

    def all(self) -> list[Session]:
        """List all sessions, including those for a single request."""
        with self._lock:
            return [*self._live.values(), *self._once]

    def lookup(self, session_id: str) -> tuple[Session | None, str | None]:
        """Return a live session, or the close reason of an ended one."""
        with self._lock:
            return self._live.get(session_id), self._ended.get(session_id)

    def single(self, session_id: str) -> Session | None:
        """Return a session for a single request."""
        with self._lock:
            return next((session for session in self._once if session.id == session_id), None)

    # -- taking one -----------------------------------------------------------------------------------------------

    def reserve_at_once(self, kind: SessionKind, *, by_agent: bool = False) -> Session | None:
        """Take a slot; None if the client has to wait or is refused."""
        return self._try(kind, by_agent=by_agent).session

    async def reserve(self, kind: SessionKind, *, by_agent: bool = False) -> Session:
        """Take a slot, waiting while one is about to come free; single requests wait without a limit.

        Raises:
            SessionCapacityError: All slots are in use.
        """
        session = self._try(kind, by_agent=by_agent).session
        if session is not None:
            return session
        is_once = kind is SessionKind.ONCE
        queue = self._once_queue if is_once else self._closing_queue
        deadline = None if is_once else asyncio.get_running_loop().time() + self._limits.closing_wait_s
        ticket = queue.join()
        assert ticket is not None
        try:
            while True:
                queue.wait_again(ticket)
                session, victim, wait_for = self._try(kind, by_agent=by_agent)
                if session is not None:
                    return session
                if victim is not None:
                    victim.close(EVICTED)  # its slot comes free when the environment's `close` returns
                if wait_for is None:
                    raise self._refusal(kind, by_agent=by_agent)
                # Wait for a constructor without a limit, but for a closing session only until the deadline.
                is_called = await ticket.wait(None if wait_for == "class" else deadline)
                if not is_called and not self._abandon_soft():
                    raise self._refusal(kind, by_agent=by_agent)
        finally:
            queue.leave(ticket)

    async def reserve_in_turn(
        self, kind: SessionKind, *, by_agent: bool, wait_s: float, on_position: OnPosition | None = None
    ) -> Session:
        """Take a slot behind earlier clients.

        Raises:
            SessionCapacityError: No slot came free in time, or too many clients wait.
        """
        # With an explicit limit for agents, an agent would wait for other agents, so refuse it. The default limit only
        # keeps one slot free for orchestrators.
        is_over = by_agent and self._limits.agents is not None and self._is_over_agents(kind, self.peers.counts())
        ticket = self.queue.join() if wait_s > 0 and not is_over else None
        if ticket is None:
            if wait_s <= 0 and not is_over and not self.queue.has_next:
                return await self.reserve(kind, by_agent=by_agent)  # wait briefly for a slot that is just coming free
            raise self._refusal(kind, by_agent=by_agent)
        deadline = ticket.loop.time() + wait_s
        try:
            while True:
                self.queue.wait_again(ticket)
                session, victim, _ = self._try(kind, by_agent=by_agent, is_next=self.queue.is_next(ticket))
                if session is not None:
                    return session
                if victim is not None:
                    victim.close(EVICTED)
                if by_agent and self._is_over_agents(kind, self.peers.counts()):
                    # An agent at the head of the queue must not keep free slots from the orchestrators behind it.
                    self.queue.stand_aside(ticket)
                if on_position is not None:
                    on_position(self.queue.position(ticket))
                now = ticket.loop.time()
                if now >= deadline or self.is_closed:
                    raise self._refusal(kind, by_agent=by_agent)
                await ticket.wait(min(deadline, now + 1.0))  # the position changes without a call
        finally:
            self.queue.leave(ticket)

    def _try(self, kind: SessionKind, *, by_agent: bool, is_next: bool = False) -> SlotReservation:
        """Reserve if possible; else return a session to evict and a change to wait for. Queued clients come first."""
        # A new client must not overtake queued ones. Single requests use no slot, so they may.
        # Check this before taking the locks: threads take the queue's lock first and the common lock second.
        is_waited_for = not is_next and kind is not SessionKind.ONCE and self.queue.has_next
        # All processes wait for the common lock, so make a session that will probably be needed before taking it.
        ready = self._make(kind) if self.peers.is_shared and not is_waited_for and self.used < self.count else None
        reservation = self._decide(kind, ready, by_agent=by_agent, is_waited_for=is_waited_for)
        if ready is not None and reservation.session is not ready:
            ready.lane.release()
        return reservation

    def _decide(
        self, kind: SessionKind, ready: Session | None, *, by_agent: bool, is_waited_for: bool
    ) -> SlotReservation:
        with self._lock, self.peers as others:
            if by_agent and self._is_over_agents(kind, others):
                return SlotReservation(None)
            if self.is_closed or is_waited_for:
                return SlotReservation(None)
            count = self.count
            if self._is_unsure():
                allows_concurrency = self.peers.allows_concurrency
                first_elsewhere = allows_concurrency is None and others.live + others.once > 0
                if first_elsewhere or any(
                    s.state is SessionState.CREATING for s in (*self._live.values(), *self._once)
                ):
                    return SlotReservation(None, wait_for="class")  # the first session determines the number of slots
                if allows_concurrency is False:
                    count = 1
            is_once = kind is SessionKind.ONCE
            held = len(self._once) + others.once if is_once else len(self._live) + others.live
            if held < count:
                session = self._insert(ready or self._make(kind), by_agent=by_agent)
                self._publish_counts()
                return SlotReservation(session)
            if is_once:
                return SlotReservation(None, wait_for="slot")
            victim = self._victim(for_soft=kind is SessionKind.SOFT)
            is_closing = (
                victim is not None
                or others.closing > 0
                or any(s.state is SessionState.CLOSING for s in self._live.values())
            )
        if not is_closing:
            is_closing = self.peers.evict_soft(for_soft=kind is SessionKind.SOFT)
        return SlotReservation(None, victim, "slot" if is_closing else None)

    def _victim(self, *, for_soft: bool) -> Session | None:
        """Choose the session to evict: the longest unused one; a busy one only if all are busy."""
        soft = self._evictable()
        if for_soft:  # a visitor must not evict another one, who may be thinking
            soft = [s for s in soft if s.is_idle and s.unused_s > _LEFT_AFTER_S]
        return min(soft, key=lambda s: (not s.is_idle, s.last_activity_at), default=None)

    def _is_over_agents(self, kind: SessionKind, others: SlotCounts) -> bool:
        """Return whether agents have reached their limit: by default all slots but one for the orchestrator."""
        held = self._of_agents + others.agents
        if self._limits.agents is not None:
            return held >= self._limits.agents
        return kind is not SessionKind.ONCE and held >= self.count - 1 > 0

    def _insert(self, session: Session, *, by_agent: bool) -> Session:
        session.by_agent = by_agent
        if session.kind is SessionKind.ONCE:
            self._once.add(session)
        else:
            self._live[session.id] = session
            self._of_agents += by_agent
            self._soft += session.kind is SessionKind.SOFT
        return session

    # -- refusing -------------------------------------------------------------------------------------------------

    @property
    def retry_after_s(self) -> float:
        """Seconds to wait before the next try; more for a longer queue."""
        return 1.0 + self.queue.total // 100

    def _refusal(self, kind: SessionKind, *, by_agent: bool) -> SessionCapacityError:
        text = None
        if self.is_closed:
            text = "The server is shutting down and opens no more sessions."
        elif by_agent and self._is_over_agents(kind, self.peers.counts()):
            text = "The server has reached its limit of sessions for agents."
        self._report(SessionCapacityError.code)
        self.peers.refused()
        return SessionCapacityError(self.used, self.count, text)

    # -- making room ----------------------------------------------------------------------------------------------

    def keep_soft(self, session: Session) -> bool:
        """Give a single request's session a slot, if one is free, so that a cookie can continue it."""
        with self._lock, self.peers as others:
            soft = self._evictable()
            oldest = min(soft, key=lambda other: other.last_activity_at, default=None)
            is_crowded = (
                len(soft) + others.soft >= self._limits.soft_sessions or len(self._live) + others.live >= self.count
            )
            if self.is_closed or session.state not in (SessionState.READY, SessionState.BUSY):
                return False
            if is_crowded:  # exchange under one lock: no other client may get the slot in between
                if oldest is None or not oldest.is_idle:
                    return False
                self._forget(oldest, EVICTED)
            self._once.discard(session)
            session.kind = SessionKind.SOFT
            self._live[session.id] = session
            self._of_agents += session.by_agent
            self._soft += 1
            self._publish_counts()
        if is_crowded and oldest is not None:
            oldest.close(EVICTED)
        self._once_queue.call_next()
        return True

    def promote(self, session: Session) -> None:
        """Give a soft session the lease of an HTTP session, because its client has come back."""
        with self._lock, self.peers:
            if session.kind is SessionKind.SOFT and self._live.get(session.id) is session:
                session.kind = SessionKind.HTTP
                self._soft -= 1
                self._publish_counts()

    def _evictable(self) -> list[Session]:
        """Return the soft sessions without an attached socket; the caller holds the lock."""
        return [
            session
            for session in self._live.values()
            if session.kind is SessionKind.SOFT
            and not session.is_attached
            and session.state is not SessionState.CLOSING
        ]

    def _abandon_soft(self) -> bool:
        """Abandon a soft session that does not end: it must not block another client's slot."""
        with self._lock:
            stuck = [s for s in self._live.values() if s.kind is SessionKind.SOFT and s.state is SessionState.CLOSING]
        return any(self._abandon(session, self._limits.closing_wait_s) for session in stuck[:1])

    # -- giving one back ------------------------------------------------------------------------------------------

    def give_back(self, session: Session) -> None:
        """Take back the slot of a session that has ended, and call the next client."""
        is_once = session.kind is SessionKind.ONCE
        with self._lock, self.peers:
            self._once.discard(session)
            if self._live.get(session.id) is session:
                self._forget(session, session.close_reason or CLOSED)
            self._publish_counts()
        # Clients that wait briefly try first, but get nothing while others are in `queue` (see `_try`).
        (self._once_queue if is_once else self._closing_queue).call_next()
        self.queue.slot_freed()
        self.peers.slot_freed(briefly=not is_once, once=is_once)

    def _forget(self, session: Session, reason: str) -> None:
        """Free the slot; the caller holds the lock."""
        if self._live.pop(session.id, None) is not None:
            self._of_agents -= session.by_agent
            self._soft -= session.kind is SessionKind.SOFT
            self._closing.discard(session.id)
        if session.kind in _NAMED:
            self._ended[session.id] = reason
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """Assign no more slots, and refuse waiting clients."""
        self.is_closed = True
        self.peers.leave()
        self.look_again()

    def look_again(self) -> None:
        """Let briefly waiting clients try again: the number of slots is known now, or the server closes."""
        self._closing_queue.call_all()
        self._once_queue.call_all()
