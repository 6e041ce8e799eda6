"""Slots: which sessions hold one, who gets the next that is free, and who has to make room for him.

A slot is taken before a session's environment is built, and given back when it is closed. Soft sessions (kept for
clients that hold a cookie) make room for whoever needs their slot. Knows sessions and limits; must not know
environments. May be used from several threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from ..errors import SessionCapacityError
from .lifetime import CLOSED, EVICTED, SessionLimits
from .session import Account, Session, SessionKind, SessionState

# admission: Waiting for a slot: a bounded line, first come, first served, in which everybody can learn his place.
#
# Knows tickets and who is next; must not know sessions. May be used from several threads.


_LOOK_S = 0.5


class Ticket:
    """A place in the line; `called` is done when the holder should try."""

    __slots__ = ("called", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.called: asyncio.Future[None] = self.loop.create_future()


class AdmissionQueue:
    """Those who wait for a slot.

    Args:
        limit: How many may wait.
        clock: Tells how old the known places are.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: OrderedDict[Ticket, bool] = OrderedDict()  # whether it was called
        self._aside: set[Ticket] = set()
        self._places: dict[Ticket, int] = {}
        self._placed_at = -_LOOK_S

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self) -> Ticket | None:
        """Take the last place; None if the line is full."""
        ticket = Ticket()
        with self._lock:
            if len(self._tickets) >= self.limit:
                return None
            self._tickets[ticket] = False
            self._places[ticket] = len(self._tickets)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Leave the line, with a slot or without; whoever is next now may try."""
        with self._lock:
            self._tickets.pop(ticket, None)
            self._places.pop(ticket, None)
            self._aside.discard(ticket)
        self.call_next()

    def slot_freed(self) -> None:
        """Say that a slot may be free, and that those who stood aside may try again."""
        with self._lock:
            self._aside.clear()
        self.call_next()

    def call_next(self) -> None:
        """Call whoever is next, unless that has been done. Each who gets a slot calls the next one by leaving."""
        with self._lock:
            ticket = self._first()
            if ticket is None or self._tickets[ticket]:
                return
            self._tickets[ticket] = True
        try:
            ticket.loop.call_soon_threadsafe(_wake, ticket.called)
        except RuntimeError:  # its loop has ended
            self.leave(ticket)

    def _first(self) -> Ticket | None:
        """The ticket that a free slot is for; the caller holds the lock."""
        if not self._aside:
            return next(iter(self._tickets), None)
        return next((ticket for ticket in self._tickets if ticket not in self._aside), None)

    def stand_aside(self, ticket: Ticket) -> None:
        """Keep the place, but let others pass until a slot is freed: a limit of its own holds this one back."""
        with self._lock:
            if ticket in self._tickets:
                self._aside.add(ticket)
        self.call_next()

    def wait_again(self, ticket: Ticket) -> None:
        """Be ready to be called once more; to be said before trying, or a call in between would be lost."""
        with self._lock:
            if ticket in self._tickets:
                self._tickets[ticket] = False
                ticket.called = ticket.loop.create_future()

    def is_next(self, ticket: Ticket) -> bool:
        """Whether a slot that is free now is for this ticket."""
        with self._lock:
            return self._first() is ticket

    def position(self, ticket: Ticket) -> int:
        """Return a place in the line, 1 for the next; as it was a moment ago, since counting is not free."""
        with self._lock:
            now = self._clock()
            if ticket not in self._places or now - self._placed_at > _LOOK_S:
                self._placed_at = now
                self._places = {waiting: place for place, waiting in enumerate(self._tickets, 1)}
            return self._places.get(ticket, 1)


def _wake(called: asyncio.Future[None]) -> None:
    if not called.done():
        called.set_result(None)


# waiting: Waiting for a change that may come from any thread: a line of futures, first come, first served.
#
# Knows asyncio futures; must not know what is waited for.


class WaitQueue:
    """Those who wait, in the order they came."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()

    def notify_one(self) -> None:
        """Wake whoever has waited longest; may be called from any thread."""
        while True:
            with self._lock:
                if not self._waiters:
                    return
                future = next(iter(self._waiters))
                loop = self._waiters.pop(future)
            if _wake_soon(loop, future):
                return

    def notify_all(self) -> None:
        """Wake everybody; may be called from any thread."""
        with self._lock:
            waiters, self._waiters = self._waiters, {}
        for future, loop in waiters.items():
            _wake_soon(loop, future)

    def subscribe(self) -> asyncio.Future[None]:
        """Take a place in line *before* looking at the state, so that no change is missed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiters[future] = loop
        return future

    def unsubscribe(self, future: asyncio.Future[None]) -> bool:
        """Leave the line; say whether one was still in it, and not already called."""
        with self._lock:
            return self._waiters.pop(future, None) is not None


def _wake_soon(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> bool:
    try:
        loop.call_soon_threadsafe(_set, future)
    except RuntimeError:  # a closed loop has nobody left to wake
        return False
    return True


async def wait_until(future: asyncio.Future[None], deadline: float | None) -> bool:
    """Wait for a subscription until a time of the loop's clock; say whether the change came."""
    if deadline is None:
        await future
        return True
    remaining = deadline - asyncio.get_running_loop().time()
    if remaining <= 0:
        return False
    done, _ = await asyncio.wait([future], timeout=remaining)
    return bool(done)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


NO_ACCOUNT = Account()
_REMEMBERED = 10_000
_LEFT_AFTER_S = 10.0
_NAMED = frozenset({SessionKind.HTTP, SessionKind.SOFT, SessionKind.RESUMABLE})

OnPosition = Callable[[int], None]


class SlotReservation(NamedTuple):
    """What came of asking for a slot: a session, or whom to evict and what to wait for."""

    session: Session | None
    victim: Session | None = None
    wait_for: Literal["slot", "class"] | None = None


class Slots:
    """The slots of one server.

    Args:
        limits: How many there are, and for whom.
        make: Makes a session that is not built yet.
        is_unsure: Whether it is unknown how many environments there may be, until the first one is built.
        report: Told the code of each refusal.
    """

    def __init__(
        self,
        limits: SessionLimits,
        make: Callable[[SessionKind], Session],
        *,
        is_unsure: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._make = make
        self._is_unsure = is_unsure
        self._report = report
        self.count = limits.sessions
        self.queue = AdmissionQueue(limits.queue)
        self.is_closed = False
        self._lock = threading.Lock()
        self._line = WaitQueue()
        self._line_once = WaitQueue()  # for single requests, which are counted apart
        self._live: dict[str, Session] = {}
        self._of_key: Counter[str] = Counter()  # how many of them, by the key they count for
        self._of_agents = 0
        self._once: set[Session] = set()
        self._ended: OrderedDict[str, str] = OrderedDict()

    def reconfigure(self, limits: SessionLimits) -> None:
        """Change the limits, while there is no session."""
        self._limits = limits
        self.queue.limit = limits.queue
        self.count = limits.sessions

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self._live)

    def sessions(self) -> list[Session]:
        """List the sessions that hold a slot."""
        with self._lock:
            return list(self._live.values())

    def all(self) -> list[Session]:
        """List them, and those for a single request."""
        with self._lock:
            return [*self._live.values(), *self._once]

    def lookup(self, session_id: str) -> tuple[Session | None, str | None]:
        """Return a live session, and how one that is gone has ended."""
        with self._lock:
            return self._live.get(session_id), self._ended.get(session_id)

    # -- taking one -----------------------------------------------------------------------------------------------

    def reserve_at_once(self, kind: SessionKind, account: Account = NO_ACCOUNT) -> Session | None:
        """Take a slot; None where one has to wait for one, or is refused."""
        return self._try(kind, account).session

    async def reserve(self, kind: SessionKind, account: Account = NO_ACCOUNT) -> Session:
        """Take a slot, waiting while one is about to come free; single requests wait their turn, sessions not for long.

        Raises:
            SessionCapacityError: All slots are taken.
        """
        session = self._try(kind, account).session
        return session if session is not None else await self._reserve_patiently(kind, account)

    async def reserve_in_line(
        self, kind: SessionKind, account: Account, *, wait_s: float, on_position: OnPosition | None = None
    ) -> Session:
        """Take a slot after those who came before.

        Raises:
            SessionCapacityError: No slot came free in time, or too many wait.
        """
        ticket = self.queue.join() if wait_s > 0 and not self._is_over(account) else None
        if ticket is None:
            if wait_s <= 0 and not self._is_over(account) and not self.queue:
                return await self.reserve(kind, account)  # a slot that is just coming free is worth a moment
            raise self._refusal(account)
        deadline = asyncio.get_running_loop().time() + wait_s
        try:
            while True:
                if ticket.called.done():
                    self.queue.wait_again(ticket)
                reserved = self._try(kind, account, is_next=self.queue.is_next(ticket))
                if reserved.session is not None:
                    return reserved.session
                if reserved.victim is not None:
                    reserved.victim.close(EVICTED)
                if self._is_over(account):
                    self.queue.stand_aside(ticket)
                if on_position is not None:
                    on_position(self.queue.position(ticket))
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or self.is_closed:
                    raise self._refusal(account)
                await asyncio.wait([ticket.called], timeout=min(left, 1.0))
        finally:
            self.queue.leave(ticket)

    async def _reserve_patiently(self, kind: SessionKind, account: Account) -> Session:
        deadline = None
        if kind is not SessionKind.ONCE:
            deadline = asyncio.get_running_loop().time() + self._limits.closing_wait_s
        line = self._line_once if kind is SessionKind.ONCE else self._line
        while True:
            turn = line.subscribe()
            was_called = False
            try:
                session, victim, wait_for = self._try(kind, account)
                if session is not None:
                    return session
                if victim is not None:
                    victim.close(EVICTED)
                if wait_for is None:
                    raise self._refusal(account)
                # A constructor takes the time it takes; a session that is closing is not waited for as long.
                was_called = await wait_until(turn, None if wait_for == "class" else deadline)
                if not was_called and not self._drop_stuck_soft():
                    raise self._refusal(account)
            finally:
                if not line.unsubscribe(turn) and not was_called:
                    line.notify_one()  # called, but no longer waiting: the turn goes to the next

    def _try(self, kind: SessionKind, account: Account, *, is_next: bool = False) -> SlotReservation:
        """Reserve if possible; else name a session to evict, and what to wait for. Those in line come first."""
        with self._lock:
            if self._is_over(account):
                return SlotReservation(None)
            if self.is_closed or (self.queue and not is_next and kind is not SessionKind.ONCE):
                return SlotReservation(None)
            if self._is_unsure() and any(s.state is SessionState.CREATING for s in (*self._live.values(), *self._once)):
                return SlotReservation(None, wait_for="class")  # the first will tell which it is, and what that allows
            held = self._once if kind is SessionKind.ONCE else self._live
            if len(held) < self.count:
                return SlotReservation(self._insert(kind, account))
            if kind is SessionKind.ONCE:
                return SlotReservation(None, wait_for="slot")
            soft = self._evictable()
            if kind is SessionKind.SOFT:  # one visitor does not put another out, who may be thinking
                soft = [s for s in soft if s.is_idle and s.unused_s > _LEFT_AFTER_S]
            victim = min(soft, key=lambda s: (not s.is_idle, s.last_activity_at), default=None)
            closing = victim is not None or any(s.state is SessionState.CLOSING for s in self._live.values())
            return SlotReservation(None, victim, "slot" if closing else None)

    def _is_over(self, account: Account) -> bool:
        """Whether those whom a session would count for have as many as they may."""
        per_key, agents = self._limits.per_key, self._limits.agents
        if account.key is not None and per_key is not None and self._of_key[account.key] >= per_key:
            return True
        return account.is_agent and agents is not None and self._of_agents >= agents

    def _insert(self, kind: SessionKind, account: Account) -> Session:
        session = self._make(kind)
        session.account = account
        if kind is SessionKind.ONCE:
            self._once.add(session)
        else:
            self._live[session.id] = session
            self._count(account, 1)
        return session

    def _count(self, account: Account, change: int) -> None:
        """Note that somebody has one session more, or one less; the caller holds the lock."""
        self._of_agents += change if account.is_agent else 0
        if account.key is not None:
            self._of_key[account.key] += change
            if not self._of_key[account.key]:
                del self._of_key[account.key]

    # -- refusing -------------------------------------------------------------------------------------------------

    @property
    def retry_after_s(self) -> float:
        """When to ask again; longer for a longer line: whoever comes back too soon finds it as it was."""
        return 1.0 + len(self.queue) // 100

    def _refusal(self, account: Account) -> SessionCapacityError:
        text = None
        if self.is_closed:
            text = "The server is shutting down and opens no more sessions."
        elif self._is_over(account):
            whom = "agents" if account.is_agent else "this key"
            text = f"The server holds as many sessions for {whom} as it may."
        self._report(SessionCapacityError.code)
        return SessionCapacityError(self.used, self.count, text)

    # -- making room ----------------------------------------------------------------------------------------------

    def keep_soft(self, session: Session) -> bool:
        """Give a session for a single request a slot, if one is free, so that a cookie can continue it."""
        with self._lock:
            soft = self._evictable()
            full = len(self._live) >= self.count
            oldest = min(soft, key=lambda other: other.last_activity_at, default=None)
            crowded = len(soft) >= self._limits.soft_sessions or full
            if self.is_closed or (crowded and oldest is None):
                return False
            if session.state not in (SessionState.READY, SessionState.BUSY):
                return False
            if crowded and oldest is not None:
                if not oldest.is_idle:
                    return False
                self._forget(oldest, EVICTED)
            self._once.discard(session)
            session.kind = SessionKind.SOFT
            self._live[session.id] = session
            self._count(session.account, 1)
        if crowded and oldest is not None:
            oldest.close(EVICTED)
        self._line_once.notify_one()
        return True

    def promote(self, session: Session) -> None:
        """Give a soft session the life of an explicit one: its client has shown that it comes back."""
        with self._lock:
            if session.kind is SessionKind.SOFT and self._live.get(session.id) is session:
                session.kind = SessionKind.HTTP

    def _evictable(self) -> list[Session]:
        """Soft sessions that nobody is connected to; the caller holds the lock."""
        return [
            session
            for session in self._live.values()
            if session.kind is SessionKind.SOFT
            and not session.is_attached
            and session.state is not SessionState.CLOSING
        ]

    def _drop_stuck_soft(self) -> bool:
        """Stop counting a soft session that does not come to its end: it must not be in another client's way."""
        with self._lock:
            for session in self._live.values():
                if session.kind is SessionKind.SOFT and session.state is SessionState.CLOSING:
                    self._forget(session, EVICTED)
                    return True
        return False

    # -- giving one back ------------------------------------------------------------------------------------------

    def give_back(self, session: Session) -> None:
        """Take back the slot of a session that has ended, and call whoever is next."""
        with self._lock:
            self._once.discard(session)
            if self._live.get(session.id) is session:
                self._forget(session, session.close_reason or CLOSED)
        (self._line_once if session.kind is SessionKind.ONCE else self._line).notify_one()
        self.queue.slot_freed()

    def _forget(self, session: Session, reason: str) -> None:
        """Give the slot back; the caller holds the lock."""
        if self._live.pop(session.id, None) is not None:
            self._count(session.account, -1)
        if session.kind in _NAMED:
            self._ended[session.id] = reason
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def close(self) -> None:
        """Give no more slots, and refuse those who wait for one."""
        self.is_closed = True
        self.look_again()

    def look_again(self) -> None:
        """Have those who wait look whether there is something for them now."""
        self._line.notify_all()
        self._line_once.notify_all()
