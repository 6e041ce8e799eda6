"""The board: memory that all processes of a server share, and the peers' view of it.

It contains one row per worker (state, heartbeat, counts, waiting clients), the number of sessions sent from each worker
to each other, recent opening keys, and the last metrics of current and ended workers. A cell has one writer. The
supervisor clears the row of a dead worker, and marks hung ones.

One lock of the operating system protects the decisions about slots and opening keys. The kernel releases it when a
process is killed, so a crash neither blocks other workers nor corrupts counts. Hold it briefly: all workers wait for
it. A process that freezes with the lock stops all workers, so the supervisor looks up the holder (`lock_holder`) and
kills it.

    cells of 8 bytes: | head | row 0 | row 1 | ... | counts | sent | keys |
    then bytes:       | metrics of worker 0 | of worker 1 | ... | of ended workers |
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import struct
import sys
import tempfile
import threading
import zlib
from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Final

from openenv.errors import OpenEnvError, SessionElsewhere, SessionLost

from ..sessions.lifetime import WORKER_CRASHED
from ..sessions.peers import NO_SLOTS, Peers, SlotCounts, boot_of
from .channel import PeerChannel, PeerMessageKind
from .routing import GONE, Destination

MOST_WORKERS: Final = 255  # an index takes one byte of a key's cell

# The head: the number of the last ticket, the concurrency of the environment's class, whether the server drains, the
# worker for requests without a name, and how often another one became it.
_TICKET, _CLASS, _DRAINING, _SHARED, _MOVES, _HEAD = 0, 1, 2, 3, 4, 8
_UNKNOWN, _CONCURRENT, _SINGLE = 0, 1, 2

# A row: the worker's state, how many of the sessions sent there have settled, its tickets in the admission queue, its
# heartbeats, and whether the supervisor has marked it as hung.
_GENERATION, _STATE, _PID, _SETTLED, _FIRST, _TICKETS, _BEATS, _HUNG, _NUMBERS = 0, 1, 2, 3, 4, 5, 6, 7, 8
_WIDTH: Final = len(SlotCounts._fields)
DOWN, STARTING, SERVING, LEAVING, QUIET = 0, 1, 2, 3, 4
_TAKES_CONNECTIONS: Final = (SERVING, LEAVING, QUIET)
_SPINS: Final = 16  # attempts to get the lock, about 2 us each, before sleeping, which takes longer than most waits
_NEAR: Final = 8  # a worker keeps a new session unless its load exceeds the lowest by more than 1/8
_MOST_TICKETS: Final = 10_000  # tickets with an exact place; the default limit of the queue

_BUCKETS, _WAYS = 8192, 4  # recent opening keys: 32,768
_TEXT_BYTES: Final = 256 * 1024

_NAME: Final = re.compile(r"-w(\d{1,3})-(\d{1,9})$")

# `struct flock` of a 64-bit system, and the place of `l_pid` and `l_type` in it: to ask who holds the lock.
_FLOCK, _FLOCK_PID, _FLOCK_TYPE = ("hhqqi4x", 4, 0) if sys.platform == "linux" else ("qqihh", 2, 3)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker process: its index, and its generation among the processes with that index."""

    index: int
    generation: int


def place_of(name: str) -> WorkerPlace | None:
    """Return the worker named in a session id or a visitor's cookie."""
    match = _NAME.search(name)
    return None if match is None else WorkerPlace(int(match[1]), int(match[2]))


class Board:
    """The shared memory of one server.

    Args:
        workers: How many workers there are.
        fd: The file of another process; None creates one.
    """

    def __init__(self, workers: int, fd: int | None = None) -> None:
        self.workers = workers
        self._row = _NUMBERS + _MOST_TICKETS
        self._counts = _HEAD + workers * self._row  # side by side: they are read together, under the lock
        self._sent = self._counts + workers * _WIDTH  # sessions sent to worker 0 by each worker, to worker 1, ...
        self._keys = self._sent + workers * workers
        cells = self._keys + 2 * _BUCKETS * _WAYS
        size = 8 * cells + (workers + 1) * (_TEXT_BYTES + 8)
        if fd is None:
            fd = _memory(size)
        self.fd = fd
        self._map = mmap.mmap(fd, size)
        self._bytes = memoryview(self._map)
        self._cells = self._bytes[: 8 * cells].cast("Q")
        self._texts = 8 * cells
        self._threads = threading.Lock()  # of this process

    def close(self) -> None:
        """Free the memory."""
        self._cells.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)

    def __enter__(self) -> Board:
        self._threads.acquire()
        for _ in range(_SPINS):
            if self._try_process_lock():
                return self
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN)
        self._threads.release()

    def try_lock(self) -> bool:
        """Take the lock if it is free; return whether it was."""
        if not self._threads.acquire(blocking=False):
            return False
        if self._try_process_lock():
            return True
        self._threads.release()
        return False

    def _try_process_lock(self) -> bool:
        # `lockf` locks for a process. `flock` would lock for the open file, which all processes have inherited.
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process holds it
            return False
        return True

    def lock_holder(self) -> int | None:
        """Return the process that holds the lock; None if it is free, or this process holds it."""
        question = [0] * len(struct.unpack(_FLOCK, bytes(struct.calcsize(_FLOCK))))
        question[_FLOCK_TYPE] = fcntl.F_WRLCK
        answer = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, struct.pack(_FLOCK, *question)))
        return None if answer[_FLOCK_TYPE] == fcntl.F_UNLCK else int(answer[_FLOCK_PID])

    def _at(self, index: int, field: int) -> int:
        return _HEAD + index * self._row + field

    # -- workers --------------------------------------------------------------------------------------------------

    def state(self, index: int) -> int:
        """Return a worker's state: `DOWN`, `STARTING`, `SERVING`, `LEAVING`, or `QUIET` after its last call."""
        return self._cells[self._at(index, _STATE)]

    def set_state(self, index: int, state: int) -> None:
        """Set a worker's state."""
        self._cells[self._at(index, _STATE)] = state

    def pid(self, index: int) -> int:
        """Return the process id of a worker."""
        return self._cells[self._at(index, _PID)]

    def set_pid(self, index: int, pid: int) -> None:
        """Set the process id of a worker."""
        self._cells[self._at(index, _PID)] = pid

    def generation(self, index: int) -> int:
        """Return how many processes have had this index."""
        return self._cells[self._at(index, _GENERATION)]

    def begin(self, index: int) -> int:
        """Clear a worker's row for a new process; return its generation."""
        with self:
            start = self._at(index, 0)
            generation = self._cells[start] + 1
            self._clear(index)
            self._cells[start] = generation
            self._cells[start + _STATE] = STARTING
            return generation

    def _clear(self, index: int) -> None:
        start = self._at(index, 0)
        for field in range(1, _NUMBERS):
            self._cells[start + field] = 0
        self.publish(index, NO_SLOTS)
        self._cells[start + _SETTLED] = self._sent_to(index)  # sessions on their way to the former process

    def end(self, index: int) -> SlotCounts:
        """Clear the row of a worker that has ended; return its last counts."""
        with self:
            counts = self.counts_of(index)
            self._clear(index)
        return counts

    # -- heartbeats -----------------------------------------------------------------------------------------------

    def beat(self, index: int) -> None:
        """Record that the event loop of a worker runs."""
        self._cells[self._at(index, _BEATS)] += 1

    def beats(self, index: int) -> int:
        """Return how many heartbeats a worker has written."""
        return self._cells[self._at(index, _BEATS)]

    def is_hung(self, index: int) -> bool:
        """Return whether the heartbeat of a worker has stopped."""
        return bool(self._cells[self._at(index, _HUNG)])

    def mark_hung(self, index: int, *, is_hung: bool) -> None:
        """Mark a worker as hung, or as running again; the supervisor decides."""
        self._cells[self._at(index, _HUNG)] = is_hung

    def hung(self) -> list[int]:
        """Return the workers marked as hung."""
        return [index for index in range(self.workers) if self.is_hung(index)]

    def _admits(self, index: int) -> bool:
        """Return whether a worker takes new sessions."""
        start = self._at(index, 0)
        return self._cells[start + _STATE] == SERVING and not self._cells[start + _HUNG]

    def _responds(self, index: int) -> bool:
        """Return whether a worker takes connections and its loop runs."""
        return self.state(index) in _TAKES_CONNECTIONS and not self.is_hung(index)

    # -- names ----------------------------------------------------------------------------------------------------

    def is_there(self, place: WorkerPlace) -> bool:
        """Return whether exactly this process still serves."""
        if not 0 <= place.index < self.workers or self.generation(place.index) != place.generation:
            return False
        return self.state(place.index) in _TAKES_CONNECTIONS

    def find(self, name: str) -> int | None:
        """Return the worker that created a name, or `GONE`; None if the name contains no worker."""
        place = place_of(name)
        if place is None:
            return None
        return place.index if self.is_there(place) else GONE

    def of_visitor(self, name: str, here: int) -> int:
        """Return the worker for a visitor: the one that created its name, or else always the same one.

        A visitor does not wait for a hung worker: its session ends, and the page goes on in another worker.
        """
        index = self.find(name)
        if index is not None and index != GONE and not self.is_hung(index):
            return index
        first = zlib.crc32(name.encode("latin-1", "replace"))
        others = ((first + step) % self.workers for step in range(self.workers))
        return next((other for other in others if self._responds(other)), here)

    def others(self, index: int) -> list[int]:
        """Return all other workers that take connections and are not hung."""
        return [other for other in range(self.workers) if other != index and self._responds(other)]

    @property
    def is_draining(self) -> bool:
        """Whether the whole server shuts down."""
        return bool(self._cells[_DRAINING])

    def drain(self) -> None:
        """Tell all workers that the server shuts down."""
        self._cells[_DRAINING] = 1

    # -- counts ---------------------------------------------------------------------------------------------------

    def counts_of(self, index: int) -> SlotCounts:
        """Return a worker's slot counts by use."""
        start = self._counts + index * _WIDTH
        return SlotCounts(*self._cells[start : start + _WIDTH])

    def publish(self, index: int, counts: SlotCounts) -> None:
        """Set a worker's slot counts."""
        start = self._counts + index * _WIDTH
        self._cells[start : start + _WIDTH] = array("Q", counts)

    def counts_beside(self, index: int) -> SlotCounts:
        """Return the summed slot counts of all other workers."""
        counts = self._cells[self._counts : self._sent].tolist()
        if 0 <= index < self.workers:
            del counts[index * _WIDTH : (index + 1) * _WIDTH]
        return SlotCounts._make(sum(counts[field::_WIDTH]) for field in range(_WIDTH))

    # -- placing --------------------------------------------------------------------------------------------------

    def load(self, index: int) -> int:
        """Return a worker's sessions plus those on their way to it."""
        start = self._at(index, 0)
        at = self._counts + index * _WIDTH
        live, once = self._cells[at], self._cells[at + 1]
        return live + once + max(0, self._sent_to(index) - self._cells[start + _SETTLED])

    def _sent_to(self, index: int) -> int:
        start = self._sent + index * self.workers
        return sum(self._cells[start : start + self.workers])

    def place(self, here: int, key: bytes | None = None, sessions: int = 1) -> Destination:
        """Choose the worker for new sessions: this one if its load is near the lowest, else the least loaded one.

        A repeated request goes to the same worker as the first and opens nothing.

        Args:
            here: This worker.
            key: The client's idempotency key, to recognize a repeated request.
            sessions: How many sessions will be opened.
        """
        if key is None:
            index = self._least_loaded(here)
        else:
            with self:
                first = self._worker_of_key(key)
                if first is not None:
                    return Destination(first)
                index = self._least_loaded(here)
                self._remember(key, index)
        self.send(here, index, sessions)
        return Destination(index, sessions)

    def send(self, here: int, index: int, sessions: int) -> None:
        """Count sessions as the load of another worker; a negative number takes some back."""
        self._cells[self._sent + index * self.workers + here] += sessions

    def _least_loaded(self, here: int) -> int:
        """Return the worker with the fewest sessions, or this one: handing over costs as much as opening a session."""
        load_here = self.load(here) if self._admits(here) else None
        best, least = here, load_here
        for index in range(self.workers):
            if index != here and self._admits(index):
                load = self.load(index)
                if least is None or load < least:
                    best, least = index, load
        if load_here is not None and least is not None and load_here <= least + least // _NEAR:
            return here
        return best

    def settle(self, index: int, count: int) -> None:
        """Count sessions sent to this worker as settled: they were opened, or never will be."""
        at = self._at(index, _SETTLED)
        self._cells[at] = min(self._cells[at] + count, self._sent_to(index))

    def shared(self, here: int) -> int:
        """Return the worker for state that all requests without a name share.

        The first request chooses its own worker. Another one is chosen when that worker ends or hangs, and not again
        when it is replaced: the state would move twice.
        """
        index = self._shared_place()
        if index is not None:
            return index
        with self:
            index = self._shared_place()  # another worker may have chosen meanwhile
            if index is None:
                index = here if self._admits(here) else next(filter(self._admits, range(self.workers)), here)
                if self._admits(index):
                    self._cells[_MOVES] += bool(self._cells[_SHARED])
                    self._cells[_SHARED] = self.generation(index) << 8 | index
            return index

    @property
    def shared_moves(self) -> int:
        """How often the worker that `shared` returns has changed: the state did not move with it."""
        return self._cells[_MOVES]

    def _shared_place(self) -> int | None:
        generation, index = divmod(self._cells[_SHARED], 256)
        return index if generation == self.generation(index) and self._responds(index) else None

    # -- opening keys: | digest | number of its entry, generation, index | ----------------------------------------

    def _bucket(self, key: bytes) -> tuple[int, int]:
        digest = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") or 1
        return self._keys + 2 * _WAYS * (digest % _BUCKETS), digest

    def _worker_of_key(self, key: bytes) -> int | None:
        start, digest = self._bucket(key)
        for at in range(start, start + 2 * _WAYS, 2):
            if self._cells[at] == digest:
                place = self._cells[at + 1]
                index, generation = place & 0xFF, (place >> 8) & 0xFFFF
                if self.generation(index) & 0xFFFF == generation and self._responds(index):
                    return index
        return None

    def _remember(self, key: bytes, index: int) -> None:
        start, digest = self._bucket(key)
        ways = range(start, start + 2 * _WAYS, 2)
        at = next((at for at in ways if self._cells[at] in (0, digest)), None)
        if at is None:
            at = min(ways, key=lambda at: self._cells[at + 1] >> 24)  # the oldest
        self._cells[_TICKET] += 1
        self._cells[at] = digest
        self._cells[at + 1] = (
            (self._cells[_TICKET] & 0xFF_FFFF_FFFF) << 24 | (self.generation(index) & 0xFFFF) << 8 | index
        )

    # -- the admission queue --------------------------------------------------------------------------------------

    def next_ticket(self) -> int:
        """Return the next number."""
        with self:
            self._cells[_TICKET] += 1
            return self._cells[_TICKET]

    def publish_waiting(self, index: int, tickets: list[int], first: int) -> None:
        """Set the waiting tickets of a worker, and the one that gets the next free slot."""
        tickets = tickets[:_MOST_TICKETS]
        start = self._at(index, _NUMBERS)
        with self:
            for place, number in enumerate(tickets):
                if self._cells[start + place] != number:
                    self._cells[start + place] = number
            self._cells[self._at(index, _TICKETS)] = len(tickets)
            self._cells[self._at(index, _FIRST)] = first

    def first_waiting(self) -> tuple[int, int] | None:
        """Return the first ticket of all and its worker."""
        firsts = [(self._cells[self._at(index, _FIRST)], index) for index in range(self.workers)]
        # A hung worker serves no client, and must not keep others waiting.
        return min(((number, index) for number, index in firsts if number and not self.is_hung(index)), default=None)

    def waiting_before(self, index: int, ticket: int) -> int:
        """Return how many tickets of other workers have a lower number."""
        count = 0
        for other in range(self.workers):
            if other != index and (size := self._cells[self._at(other, _TICKETS)]) and not self.is_hung(other):
                start = self._at(other, _NUMBERS)
                count += bisect_left(self._cells[start : start + size], ticket)
        return count

    # -- the environment's class ----------------------------------------------------------------------------------

    @property
    def allows_concurrency(self) -> bool | None:
        """Whether the class allows concurrent sessions; None while no worker knows."""
        state = self._cells[_CLASS]
        return None if state == _UNKNOWN else state == _CONCURRENT

    def learned_class(self, *, is_concurrent: bool) -> None:
        """Record whether the class allows concurrent sessions."""
        self._cells[_CLASS] = _CONCURRENT if is_concurrent else _SINGLE

    # -- metrics --------------------------------------------------------------------------------------------------

    def keep_text(self, index: int, text: bytes) -> None:
        """Store the last metrics of a worker; the index `workers` stands for all ended workers."""
        text = text[: text.rfind(b"\n", 0, _TEXT_BYTES) + 1] if len(text) > _TEXT_BYTES else text
        start = self._texts + index * (_TEXT_BYTES + 8)
        with self:
            self._bytes[start : start + 8] = len(text).to_bytes(8, "little")
            self._bytes[start + 8 : start + 8 + len(text)] = text

    def kept_text(self, index: int) -> bytes:
        """Return the last metrics of a worker."""
        start = self._texts + index * (_TEXT_BYTES + 8)
        with self:
            size = int.from_bytes(self._bytes[start : start + 8], "little")
            return bytes(self._bytes[start + 8 : start + 8 + min(size, _TEXT_BYTES)])


def _memory(size: int) -> int:
    """Create a file that processes can map; return its descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("openenv-workers")
    else:
        with tempfile.TemporaryFile(prefix="openenv-workers-") as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class SharedPeers(Peers):
    """The other workers of a server, as seen by the sessions of one worker.

    Args:
        board: The shared memory.
        channel: Sends messages to other workers.
        place: This worker.
        boot: The server's name, chosen at its start.
    """

    is_shared = True

    def __init__(self, board: Board, channel: PeerChannel, place: WorkerPlace, boot: str) -> None:
        super().__init__(boot)
        self.board = board
        self.channel = channel
        self.place = place
        self._index = place.index
        self._suffix = f"-w{place.index}-{place.generation}"
        self.processes = board.workers
        self._opened = 0  # sessions and single requests, as published
        self._lock = threading.Lock()  # of the arrivals
        self._arrivals: deque[tuple[float, int]] = deque()  # (deadline, announced sessions)

    # -- arrivals: announced sessions count as load until they are opened or their deadline passes ---------------

    def arrived(self, sessions: int, until: float) -> None:
        """Record announced sessions; those not opened by the deadline never will be."""
        with self._lock:
            self._arrivals.append((until, sessions))

    def expire_arrivals(self, now: float) -> float | None:
        """Forget arrivals past their deadline; return the next deadline."""
        with self._lock:
            self.board.settle(self._index, sum(sessions for until, sessions in self._arrivals if until <= now))
            self._arrivals = deque(arrival for arrival in self._arrivals if arrival[0] > now)
            return min((until for until, _ in self._arrivals), default=None)

    def _settle(self, opened: int) -> None:
        """Match opened sessions with the oldest arrivals."""
        if opened <= 0 or not self._arrivals:
            return
        with self._lock:
            while opened > 0 and self._arrivals:
                until, sessions = self._arrivals.popleft()
                used = min(opened, sessions)
                opened -= used
                self.board.settle(self._index, used)
                if used < sessions:
                    self._arrivals.appendleft((until, sessions - used))

    @property
    def hung_processes(self) -> int:  # type: ignore[override]
        """The number of workers marked as hung."""
        return len(self.board.hung())

    @property
    def is_draining(self) -> bool:  # type: ignore[override]
        """Whether the whole server shuts down."""
        return self.board.is_draining

    def __enter__(self) -> SlotCounts:
        self.board.__enter__()
        return self.board.counts_beside(self._index)

    def __exit__(self, *_: object) -> None:
        self.board.__exit__()

    def counts(self) -> SlotCounts:
        return self.board.counts_beside(self._index) if self.board.workers > 1 else NO_SLOTS

    def publish(self, counts: SlotCounts) -> None:
        self.board.publish(self._index, counts)
        opened, self._opened = counts.live + counts.once - self._opened, counts.live + counts.once
        self._settle(opened)

    def leave(self) -> None:
        if self.board.state(self._index) == SERVING:
            self.board.set_state(self._index, LEAVING)

    def refused(self) -> None:
        self._settle(1)  # or it would count as load for a while, which keeps other sessions away

    def slot_freed(self, *, briefly: bool, once: bool) -> None:
        # The admission queue wakes its clients itself: see `CapacityQueue.call_next`.
        for other in self.board.others(self._index):
            counts = self.board.counts_of(other)
            if (briefly and counts.waiting_briefly) or (once and counts.waiting_once):
                self.channel.send(other, PeerMessageKind.WAKE)
                return

    def wake_first(self) -> None:
        first = self.board.first_waiting()
        if first is not None and first[1] != self._index:
            self.channel.send(first[1], PeerMessageKind.WAKE)

    def evict_soft(self, *, for_soft: bool) -> bool:
        others = [(self.board.counts_of(other).soft, other) for other in self.board.others(self._index)]
        most, chosen = max(others, default=(0, 0))
        if not most:
            return False
        self.channel.send(chosen, PeerMessageKind.EVICT, b"\x01" if for_soft else b"\x00")
        return True

    def next_ticket(self) -> int:
        return self.board.next_ticket()

    def publish_waiting(self, tickets: list[int], first: int) -> None:
        self.board.publish_waiting(self._index, tickets, first)

    @property
    def has_next(self) -> bool:
        first = self.board.first_waiting()
        return first is not None and first[1] != self._index

    def is_first(self, ticket: int) -> bool:
        first = self.board.first_waiting()
        return first is None or first[0] >= ticket

    def waiting_before(self, ticket: int) -> int:
        return self.board.waiting_before(self._index, ticket)

    @property
    def allows_concurrency(self) -> bool | None:
        return self.board.allows_concurrency

    def learned_class(self, *, is_concurrent: bool) -> None:
        self.board.learned_class(is_concurrent=is_concurrent)
        for other in self.board.others(self._index):
            self.channel.send(other, PeerMessageKind.WAKE)

    @property
    def shared_moves(self) -> int:  # type: ignore[override]
        return self.board.shared_moves

    def new_id(self) -> str:
        return super().new_id() + self._suffix

    def mark(self, name: str) -> str:
        return super().mark(name) + self._suffix

    def absence(self, session_id: str) -> OpenEnvError | None:
        place = place_of(session_id)
        if place is None or place == self.place or boot_of(session_id) != self.boot:
            return None
        if not 0 <= place.index < self.board.workers or place.generation > self.board.generation(place.index):
            return None  # not an id of this server
        if self.board.is_there(place):
            text = (
                f"Session '{session_id}' is held by worker {place.index} of this server, and this request has reached "
                f"worker {self._index}. Send it on a connection of its own, and not behind an unanswered request; a "
                "session can be restored from one of its own worker, such as a fork of it."
            )
            return SessionElsewhere(session_id, text)
        return SessionLost(WORKER_CRASHED)

    async def ask(self, question: str) -> list[bytes]:
        return await self.channel.ask(self.board.others(self._index), question)
