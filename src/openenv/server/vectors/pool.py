"""`LocalPool`: the slots of a `VectorEnv` in worker processes of this machine, without a server.

    VectorEnv ──> LocalPool ════ socket: requests ════> VectorHost   (one per worker, each with some of the slots)
                      └── shared memory: words, arrays ──┘

A step in columns is a word for each worker (`memory.Words`). If more cores than processes are free to use, both sides
look for the next word for a moment before they sleep; a message of 13 bytes wakes a sleeper.

A worker that dies takes its slots' episodes along: each of them fails with `SessionLost`, and a reset starts another
worker. Has the interface of `client.vector.session_pool.SessionPool`. Knows processes and messages; must not know
episodes and their policies.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from openenv.client.vector.slot_pool import STEPS, OnAnswer, SlotPool
from openenv.env.binding import declared_concurrency, factory_class, factory_name
from openenv.env.columnar import layout_of
from openenv.errors import ConcurrencyConfigurationError, OpenEnvError, RequestTimeout, SessionLost
from openenv.protocol.client_sessions import error_from_frame
from openenv.protocol.codec import BY_NAME
from openenv.protocol.columns import ColumnBlock, row_data, step_data

from ..runners import allowed_cores
from ..runners.base import WORKER_CRASHED
from ..runners.process.messages import WorkerSetup, modules_of, pack, pack_factory
from ..runners.process.runner import StartBackoff, WorkersKeepDying
from ..runners.process.worker import SocketThread, WorkerProcess
from .host import VectorSetup
from .memory import SharedArrays, Watch, Words, can_watch
from .messages import EACH, STEP, Restart, SlotReply, SlotRequest, VectorReader, encode

logger = logging.getLogger(__name__)

Workers = int | Literal["auto"]

_READ_BYTES: Final = 256 * 1024
_TICK_S: Final = 1.0  # a wait wakes this often to see that it was interrupted
_CLOSE_S: Final = 5.0
_END_S: Final = 2.0  # between the end of a socket and the news of how its process ended
_WATCH_S: Final = 0.0005
_LOGGERS: Final = ("", "openenv")
# The cost of one more worker in a batch, in steps of a few microseconds. With W workers a batch of n steps takes about
# n / W + W * _WORKER_STEPS, which is least at the square root of n / _WORKER_STEPS. A worker that watches costs less.
_WORKER_STEPS: Final = 4.0
_WATCHED_STEPS: Final = 0.5


class LocalSlot:
    """One environment in a worker. `name` is None while the slot has no environment."""

    __slots__ = ("error", "index", "is_opening", "name", "pending", "worker")

    token = None
    """No token resumes a local environment: it ends with its process."""

    def __init__(self, index: int, worker: VectorWorker) -> None:
        self.index = index
        self.worker = worker
        self.name: str | None = None
        self.is_opening = False
        self.pending: SlotRequest | None = None
        self.error: OpenEnvError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an answer is still to come."""
        return self.pending is not None or self.is_opening

    @property
    def public_name(self) -> str | None:
        """The name of the slot's session: a local environment has none."""
        return None


class VectorWorker:
    """One place for a worker process and its slots; a dead process is replaced by the next reset."""

    def __init__(self, index: int, places: range, words: Words) -> None:
        self.index = index
        self.places = places
        self.at = words.places[index]
        self.slots: list[LocalSlot] = []
        self.process: WorkerProcess | None = None
        self.socket: socket.socket | None = None
        self.reader = VectorReader()
        self.unsent = b""
        self.received = 0  # messages
        self.outbox: list[SlotRequest] = []
        self.takes_step = False
        self.step = 0  # the unanswered step in columns; 0 if there is none
        self.expected: Any = None  # its slots' part of the pool's arrays of the same name
        self.ready: Any = None
        self.has_ended = threading.Event()

    def hang_up(self, process: WorkerProcess) -> None:
        """Have the end of the process noticed, although a child of it may keep the other end of the socket open."""
        sock = self.socket
        if self.process is not process:
            return
        self.has_ended.set()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class LocalPool(SlotPool):
    """The slots of a local vector.

    Args:
        factory: Makes an environment; sent to the workers.
        n: The number of slots.
        workers: The number of processes; `auto` takes one for each core, fewer for a class with `RUNS_INLINE`, or one
            for each slot if the class does not declare that several of its instances may share a process. There is no
            choice without processes: environment code could then end the program.
        codec: The codec of single results: it decides between arrays and lists, bytes and text.
        restarts: Whether a finished episode is followed by the next one in the same step.
        on_answer: Called with a slot, the request's kind, and the reply's data or an error.

    Raises:
        ConcurrencyConfigurationError: A worker would get several slots of a class that does not support this.
        NotSendable: The factory cannot be sent to another process.
        RuntimeError: The platform has no Unix sockets.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        n: int,
        *,
        workers: Workers,
        codec: str,
        restarts: bool,
        on_answer: OnAnswer,
    ) -> None:
        if sys.platform == "win32":
            raise RuntimeError("local vectors need a POSIX system")
        self._restarts = restarts
        self._on_answer = on_answer
        self._packed = pack_factory(factory)
        self._files, self._main = modules_of(factory)
        cls = factory_class(factory)
        self.layout = layout_of(cls) if cls is factory else None
        self._codec = BY_NAME[codec]
        parts = _places(factory, cls, n, workers)
        self._arrays = SharedArrays(self.layout, n, len(parts))
        self._words = self._arrays.words
        self.workers = [VectorWorker(index, places, self._words) for index, places in enumerate(parts)]
        self._seen = self._words.replies()
        self._watch_s = _WATCH_S if can_watch() and allowed_cores() > 1 + len(parts) else 0.0
        slots: list[LocalSlot] = []
        self.missing = set(range(n))  # slots without an environment
        for worker in self.workers:
            worker.slots = [LocalSlot(index, worker) for index in worker.places]
            slots += worker.slots
        self.slots = slots
        self._sockets: SocketThread | None = None
        self._poll = select.poll()
        self._watch = Watch(self._watch_s, partial(self._poll.poll, 0))
        self._by_descriptor: dict[int, VectorWorker] = {}
        self._backoff = StartBackoff(time.monotonic)
        self._numbers = itertools.count(1)
        self._is_interrupted = self._is_forgotten = False
        self._each = False
        self._defaults: Mapping[str, Any] = {}
        # The last step in columns: the slots whose results were not taken yet, and remarks on results.
        self._expected: Any = np.zeros(n, bool)
        self._ready: Any = np.zeros(n, bool)
        for worker in self.workers:
            rows = slice(worker.places.start, worker.places.stop)
            worker.expected, worker.ready = self._expected[rows], self._ready[rows]
        self._all_slots = np.arange(n)
        self._number = 0
        self._all_step = False  # whether `chosen` in shared memory says so
        self._begun: Any = None  # its slots that begin an episode
        self._is_partial = False  # whether some results of the step were taken already
        self._remarks: dict[int, SlotReply] = {}
        self._failures: dict[int, OpenEnvError] = {}

    @property
    def begins_episodes(self) -> bool:
        """Whether a step in columns may begin episodes in some of its slots."""
        return True

    # -- requests -------------------------------------------------------------------------------------------------

    def open(self, slot: LocalSlot) -> None:
        """Build an environment, with the next write, for a slot that has none."""
        if slot.name is None and not slot.is_opening:
            slot.error = None
            slot.is_opening = True
            slot.worker.outbox.append(SlotRequest(slot.index, next(self._numbers), "open", None))

    def request(self, slot: LocalSlot, kind: Any, data: Any = None) -> None:
        """Send a request with the next write; a slot without an environment gets one first."""
        self.open(slot)
        if self._expected[slot.index] or self._ready[slot.index]:  # a reset replaces a step
            self._expected[slot.index] = self._ready[slot.index] = False
        slot.pending = SlotRequest(slot.index, next(self._numbers), kind, data)
        slot.worker.outbox.append(slot.pending)

    def use_for_resets(self, kwargs: Mapping[str, Any]) -> None:
        """Set the keywords of resets within a step."""
        if kwargs != self._defaults:
            self._defaults = kwargs
            for worker in self.workers:
                if worker.process is not None:
                    worker.outbox.append(SlotRequest(-1, 0, "defaults", kwargs))

    def begin_columns(self, actions: Sequence[Any], chosen: Any) -> None:
        """Take a step in the chosen slots, with the next write; see `SlotPool`."""
        arrays = self._arrays
        for array, values in zip(arrays.actions, actions, strict=True):
            array[:] = values
        self._ready.fill(False)
        self._is_partial = False
        self._remarks.clear()
        self._failures.clear()
        self._number = next(self._numbers)
        self._begun = None
        if chosen is None:
            if not self._all_step:
                arrays.chosen.fill(STEPS)
            self._all_step = True
            self._expected.fill(True)
            for worker in self.workers:
                worker.takes_step = True
            return
        self._all_step = False
        arrays.chosen[:] = chosen
        self._expected[:] = chosen
        begun = chosen > STEPS
        self._begun = begun if np.count_nonzero(begun) else None
        # A worker without chosen slots takes no step: the flags of its last one must not stay.
        arrays.terminated[:] = arrays.truncated[:] = False
        for worker in self.workers:
            worker.takes_step = bool(chosen[worker.places.start : worker.places.stop].any())

    def columns_left(self) -> int:
        """Return how many results of a step in columns are still to come."""
        return int(np.count_nonzero(self._expected))

    def columns_untaken(self) -> int:
        """Return how many results of a step in columns were not taken yet, whether they have come or not."""
        return int(np.count_nonzero(self._expected | self._ready))

    def in_columns(self, index: int) -> bool:
        """Whether a slot takes part in a step in columns whose results were not taken yet."""
        return bool(self._expected[index] or self._ready[index])

    def take_columns(self, *, whole: bool) -> ColumnBlock | None:
        """Return the results of a step in columns that have come since the last call."""
        ready = self._ready
        count = np.count_nonzero(ready)
        if not count:
            return None
        arrays = self._arrays
        is_done = whole and not self._is_partial and not np.count_nonzero(self._expected)
        whole = is_done or count == len(ready)
        slots = self._all_slots if whole else ready.nonzero()[0]
        rows: Any = slice(None) if whole else slots
        block = ColumnBlock(
            slots,
            [array[rows].copy() for array in arrays.observations],
            arrays.rewards[rows].copy(),
            arrays.terminated[rows].copy(),
            arrays.truncated[rows].copy(),
            {},
            self._failures,
            begun=None if self._begun is None else self._begun[rows],
        )
        if self._restarts:
            self._take_finals(block)
        for slot, reply in self._remarks.items():
            if not ready[slot]:
                continue
            if reply.kind == "error":
                block.errors[slot] = error_from_frame(reply.value)
            elif reply.kind == "metadata":
                block.metadata[slot] = reply.value
            elif reply.value.error is None:
                block.metadata[slot] = reply.value.metadata
                block.finals[slot][1].update(reply.value.final)
            else:
                block.finals.pop(slot)
                block.unbegun[slot] = self._unbegun(slot, reply.value)
        self._is_partial = True
        ready.fill(False)
        self._remarks = {}
        self._failures = {}
        return block

    def _take_finals(self, block: ColumnBlock) -> None:
        """Copy the last observations of episodes that were followed by the next one."""
        arrays, errors = self._arrays.finals, block.errors
        for slot in block.slots[block.terminated | block.truncated].tolist():
            if slot not in errors:  # the flags of a worker that died are those of an earlier step
                block.finals[slot] = [array[slot].copy() for array in arrays], {}

    def _unbegun(self, slot: int, restart: Restart) -> tuple[dict[str, Any], OpenEnvError]:
        """Return the data of an episode's last reply, and why the next episode could not begin."""
        arrays, layout = self._arrays, self.layout
        assert layout is not None
        last = ColumnBlock(None, arrays.finals, arrays.rewards, arrays.terminated, arrays.truncated, {}, {})
        assert restart.error is not None
        return step_data(layout, last, slot, restart.final), error_from_frame(restart.error)

    def _row(self, slot: int, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the data of the reply to a reset, whose observation is in the arrays."""
        assert self.layout is not None
        return row_data(self.layout, self._arrays.observations, slot, metadata)

    def flush(self, *, each: bool = False, prepare: Callable[[Any], None] | None = None) -> None:
        """Send the waiting requests: one message per worker.

        Args:
            each: Whether a worker answers slot by slot.
            prepare: Makes the requests of a worker just before they are sent.
        """
        self._each = each
        words, is_stepping = self._words.words, False
        for worker in self.workers:
            if prepare is not None:
                prepare(worker)
            if worker.outbox:
                self._flush(worker)
            if worker.takes_step:
                worker.takes_step = False
                if worker.socket is None:
                    self._lose(worker)
                else:
                    worker.step = words[worker.at.step] = self._number
                    is_stepping = True
        if is_stepping:
            self._words.fence()
            self._wake()

    def _wake(self) -> None:
        """Send a message to workers that sleep although they have a step."""
        words = self._words.words
        for worker in self.workers:
            if worker.step and words[worker.at.sleeps]:
                self._send(worker, encode(STEP, worker.step))

    def _flush(self, worker: VectorWorker) -> None:
        """Send the requests of a worker."""
        if worker.socket is None and not self._start(worker):
            return
        data = encode(EACH if self._each else 0, 0, worker.outbox)
        worker.outbox = []
        self._words.words[worker.at.sent] += 1
        self._send(worker, data)

    def _send(self, worker: VectorWorker, data: bytes) -> None:
        assert worker.socket is not None
        if worker.unsent:
            worker.unsent += data
            return
        try:
            sent = worker.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # the worker has died: `wait` reads its last replies and notices
            return
        if sent < len(data):
            worker.unsent = data[sent:]
            self._poll.modify(worker.socket, select.POLLIN | select.POLLOUT)

    # -- processes ------------------------------------------------------------------------------------------------

    def _start(self, worker: VectorWorker) -> bool:
        """Start a process; fail the slots and return False if that is impossible now."""
        if self._sockets is None:
            self._sockets = SocketThread(lambda: None)
        try:
            self._backoff.check()
        except WorkersKeepDying as exc:
            worker.outbox.clear()
            for slot in worker.slots:
                self._give_up(slot, SessionLost(str(exc)))
            return False
        ours, theirs = socket.socketpair()
        process = WorkerProcess(self._sockets, on_gone=partial(self._gone, worker), on_answer=lambda: None)
        setup = VectorSetup(
            theirs.fileno(),
            worker.places,
            len(self.slots),
            self._codec.name,
            self._arrays.descriptor,
            worker.index,
            len(self.workers),
            self.layout,
            self._restarts,
            self._watch_s,
        )
        for place in worker.at:  # what an earlier process in this place has left
            self._words.words[place] = 0
        levels = {name: logging.getLogger(name or None).getEffectiveLevel() for name in _LOGGERS}
        worker.process, worker.socket, worker.reader = process, ours, VectorReader()
        worker.unsent, worker.step, worker.received = b"", 0, 0
        worker.has_ended.clear()
        ours.setblocking(False)
        self._by_descriptor[ours.fileno()] = worker
        self._poll.register(ours, select.POLLIN)
        if self._defaults:
            worker.outbox.insert(0, SlotRequest(-1, 0, "defaults", self._defaults))
        with theirs:
            process.start(
                WorkerSetup(list(sys.path), self._files, self._main, self._packed, os.getpid(), levels, pack(setup)),
                [theirs.fileno(), self._arrays.descriptor],
            )
        return True

    def _gone(self, worker: VectorWorker, process: WorkerProcess) -> None:
        """Note the end of a process; called in the thread that watches all of them."""
        if not process.is_leaving:
            what = f"could not start: {process.failure}" if process.failure is not None else f"died ({process.how})"
            logger.error("worker process %d of a vector %s", process.pid, what)
            if not process.has_answered:
                self._backoff.died(str(process.failure or process.how))
        worker.hang_up(process)

    def _lose(self, worker: VectorWorker) -> None:
        """Fail the slots of a worker that has ended."""
        reason = WORKER_CRASHED
        if worker.socket is not None:
            worker.has_ended.wait(_END_S)
            self._poll.unregister(worker.socket)
            del self._by_descriptor[worker.socket.fileno()]
            worker.socket.close()
            worker.socket = None
            process = worker.process
            if process is not None and process.failure is not None:
                reason = f"{WORKER_CRASHED}: it could not start: {process.failure}"
            elif process is not None and process.how:
                reason = f"{WORKER_CRASHED}: {process.how}"
        worker.outbox, worker.takes_step, worker.step = [], False, 0
        for slot in worker.slots:
            self._give_up(slot, SessionLost(reason))

    def _give_up(self, slot: LocalSlot, error: OpenEnvError) -> None:
        """Record that a slot has no environment, and answer its request with the error."""
        slot.name, slot.is_opening = None, False
        self.missing.add(slot.index)
        slot.error = slot.error or error
        if self._expected[slot.index]:
            self._expected[slot.index], self._ready[slot.index] = False, True
            self._remarks.pop(slot.index, None)
            self._failures[slot.index] = slot.error
        request, slot.pending = slot.pending, None
        if request is not None:
            self._on_answer(slot, request.kind, None, slot.error)

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(self, enough: Callable[[], bool], timeout_s: float | None, *, whole: bool = False) -> None:
        """Take in replies until there are enough.

        Raises:
            RequestTimeout: They did not come in time; they still may.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not enough():
            if self._is_interrupted:
                raise RequestTimeout("closed while slots were waited for")
            left = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left <= 0:
                count = sum(slot.is_busy for slot in self.slots) + int(self._expected.sum())
                raise RequestTimeout(f"{count} slots have not answered within {timeout_s} s; wait again, or reset them")
            for descriptor, events in self._news(left, whole=whole):
                worker = self._by_descriptor.get(descriptor)
                if worker is not None:
                    self._serve(worker, events)

    def _news(self, timeout_s: float, *, whole: bool) -> Iterable[tuple[int, int]]:
        """Wait for workers; take in their words, and return the sockets with events."""
        words, events = self._words.words, []
        # All results of a step are wanted, so only the last worker has to wake this process: often it is the last to
        # be ready. The others are looked at afterwards.
        last = next((worker for worker in reversed(self.workers) if worker.step), None) if whole else None
        is_due: Callable[[], bool] = self._has_replied if last is None else partial(self._is_done, last)
        with self._watch as may_watch:
            found = may_watch and self._watch.until(is_due)
            if not found:
                words[Words.PROGRAM_SLEEPS] = Words.ANY if last is None else 1 + last.index
                self._words.fence()
                if not is_due():
                    events = self._poll.poll(timeout_s * 1000)
                words[Words.PROGRAM_SLEEPS] = 0
            elif found is not True:
                events = found
        self._seen = self._words.replies()
        is_quiet = not events
        for worker in self.workers:
            if worker.step and words[worker.at.done] == worker.step:
                is_quiet = False
                self._take_step(worker, ())
            if words[worker.at.replied] > worker.received and worker.socket is not None:
                is_quiet = False
                events.append((worker.socket.fileno(), select.POLLIN))
        if is_quiet:
            self._wake()  # again: an interrupted write may have cost the first one
        return events

    def _has_replied(self) -> bool:
        return self._words.replies() != self._seen

    def _is_done(self, worker: VectorWorker) -> bool:
        words = self._words.words
        return words[worker.at.done] == worker.step or words[worker.at.replied] > worker.received

    def _serve(self, worker: VectorWorker, events: int) -> None:
        assert worker.socket is not None
        if events & select.POLLOUT:
            data, worker.unsent = worker.unsent, b""
            self._poll.modify(worker.socket, select.POLLIN)
            self._send(worker, data)
        if not events & ~select.POLLOUT:
            return
        try:
            data = worker.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(worker)
        for message in worker.reader.feed(data):
            flags, step, replies = message
            worker.received += bool(replies)
            if flags & STEP:
                if step == worker.step:
                    self._take_step(worker, replies)
            else:
                for reply in replies:
                    self._reply(reply)
        if worker.outbox:
            self._flush(worker)

    def _take_step(self, worker: VectorWorker, replies: Sequence[SlotReply]) -> None:
        worker.step = 0
        for reply in replies:
            if reply.number:
                self._reply(reply)
            elif self._expected[reply.slot]:
                self._remarks[reply.slot] = reply
        np.logical_or(worker.ready, worker.expected, out=worker.ready)
        worker.expected.fill(False)

    def _reply(self, reply: SlotReply) -> None:
        slot = self.slots[reply.slot]
        if slot.is_opening and (slot.pending is None or reply.number < slot.pending.number):
            self._opened(slot, reply)
            return
        request = slot.pending
        if request is None or reply.number != request.number:
            return  # a late answer to a request that was given up
        slot.pending = None
        if reply.kind == "error":
            self._on_answer(slot, request.kind, None, error_from_frame(reply.value))
        elif reply.kind == "row":
            self._on_answer(slot, request.kind, self._row(reply.slot, reply.value), None)
        else:
            data = self._codec.decode(reply.value, binary=self._codec.is_binary)
            self._on_answer(slot, request.kind, data, None)

    def _opened(self, slot: LocalSlot, reply: SlotReply) -> None:
        slot.is_opening = False
        process = slot.worker.process
        if process is not None and not process.has_answered:
            process.has_answered = True
            self._backoff.answered()
        if reply.kind == "error":
            self._give_up(slot, error_from_frame(reply.value))
        else:
            slot.name = f"local-{slot.index}"
            self.missing.discard(slot.index)

    def interrupt(self) -> None:
        """End a wait in another thread, soon and for good."""
        self._is_interrupted = True

    def keep_alive(self) -> None:
        """Do nothing: processes need no pings."""

    # -- ending ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all environments and end the workers; kill those that take too long. Never raises."""
        running = [worker for worker in self.workers if worker.process is not None and worker.process.is_started]
        for worker in running:
            assert worker.process is not None
            worker.process.is_leaving = True
            if worker.socket is not None:
                with contextlib.suppress(OSError):
                    worker.socket.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLOSE_S
        for worker in running:
            process = worker.process
            assert process is not None
            if not process.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("worker process %d of a vector did not end in time, and is killed", process.pid)
                process.kill()
        for worker in running:
            assert worker.process is not None
            worker.process.wait(_CLOSE_S)
        if self._sockets is not None:
            self._sockets.stop()
        self.forget()

    def forget(self) -> None:
        """Drop everything without a message."""
        for worker in self.workers:
            if worker.socket is not None:
                worker.socket.close()
                worker.socket = None
        self._by_descriptor.clear()
        if not self._is_forgotten:
            self._is_forgotten = True
            self._arrays.close()
        for slot in self.slots:
            slot.name, slot.is_opening, slot.pending = None, False, None
            slot.error = SessionLost("closed by the client")


def _places(factory: Callable[[], Any], cls: type[Any] | None, n: int, workers: Workers) -> list[range]:
    """Return the slots of each worker.

    Raises:
        ConcurrencyConfigurationError: Several slots would share a process although the class does not support it.
    """
    is_shareable = cls is None or bool(declared_concurrency(cls))
    automatic = allowed_cores() if is_shareable else n
    if is_shareable and getattr(cls, "RUNS_INLINE", False):
        watched = automatic - 2 if can_watch() else 0  # so many workers leave a core free
        steps = _WATCHED_STEPS if watched > 1 else _WORKER_STEPS
        automatic = min(watched if watched > 1 else automatic, max(1, round(math.sqrt(n / steps))))
    count = min(n, automatic if workers == "auto" else workers)
    if not is_shareable and count < n:
        name = factory_name(factory)
        raise ConcurrencyConfigurationError(
            name,
            n,
            f"Environment '{name}' does not declare SUPPORTS_CONCURRENT_SESSIONS = True, so each slot needs a process: "
            f"pass workers={n} or workers='auto'. Set the attribute if its instances share nothing.",
        )
    size, more = divmod(n, count)
    bounds = [0, *itertools.accumulate([size + 1] * more + [size] * (count - more))]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]
