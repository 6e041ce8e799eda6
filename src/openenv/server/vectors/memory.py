"""`SharedArrays`: the arrays of a local vector and the words of its processes, in memory that all of them share.

The memory is a file descriptor without a name (`memfd_create`, or a deleted temporary file on systems without it). So
the kernel frees it when the last process has ended, however it ended: a crash cannot leave a segment behind. Knows
layouts; must not know processes or environments.

    words         uint64   how far the program and each worker are (`Words`)
    chosen        uint8    what each slot does in this step: `STEPS`, `BEGINS` or 0 (`slot_pool`)
    rewards       float64  results, one row for each slot
    terminated    bool
    truncated     bool
    actions       one array for each action column
    observations  one array for each observation column
    finals        the same, for last observations of episodes that were reset in the same step
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from openenv.protocol.columns import Column, ColumnLayout

_ALIGNMENT: Final = 64  # a cache line: two workers never write to the same one
_LINE: Final = _ALIGNMENT // 8
_LOOKS: Final = 20  # between two pauses


def can_watch() -> bool:
    """Return whether a process may follow another one by looking at shared memory.

    Python has no memory barriers. On x86 other processors see all writes in order, and acquiring a lock is a full
    barrier. Elsewhere system calls, which have barriers, must announce the news.
    """
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "sched_yield")


class Watch:
    """Waits for another process by looking for its news, if that is likely to come soon.

    To sleep and be woken costs 30 to 80 us on a machine with idle cores, as much as several short steps. So a wait
    begins with looking if the last one was short. A vector that is not used looks once, for at most `limit_s`.

    Args:
        limit_s: How long to look; 0 never looks.
        pause: Lets other processes run, between looks.
    """

    def __init__(self, limit_s: float, pause: Callable[[], Any]) -> None:
        self._limit_s = limit_s
        self._pause = pause
        self._is_worthwhile = False
        self._began = 0.0

    def __enter__(self) -> bool:
        self._began = time.perf_counter()
        return self._is_worthwhile

    def __exit__(self, *_: object) -> None:
        self._is_worthwhile = time.perf_counter() - self._began < self._limit_s

    def until(self, has_news: Callable[[], Any]) -> Any:
        """Look until `has_news`, or `pause`, returns something true, and return that; False when the time is over."""
        end = self._began + self._limit_s
        while time.perf_counter() < end:
            for _ in range(_LOOKS):
                if news := has_news():
                    return news
            if news := self._pause():
                return news
        return False


class Words:
    """Numbers in shared memory by which the program and its workers know how far the others are.

        written by the program   PROGRAM_SLEEPS            it waits for the socket of the worker with this number, from
                                                           1, or of `ANY`: send a message
                                 step, sent of a worker    the last step in columns; the number of messages sent to it
        written by a worker      done, replied             the last step that needed no message; the number of messages
                                 sleeps                    it waits for its socket: send a message

    Both sides write their news, then look whether the other one sleeps; a sleeper notes that it sleeps, then looks for
    news once more. `fence` between the two makes sure that one of them sees the other.
    """

    PROGRAM_SLEEPS: Final = 0
    ANY: Final = 2**64 - 1

    def __init__(self, memory: mmap.mmap, workers: int) -> None:
        self.words = memoryview(memory).cast("Q")
        self._memory = memory
        self._lock = threading.Lock()
        replies = _LINE * (1 + workers)
        self._replies = slice(8 * replies, 8 * (replies + 2 * workers))
        self.places = [
            WordsOfWorker(
                step=_LINE * (1 + index),
                sent=_LINE * (1 + index) + 1,
                done=replies + 2 * index,
                replied=replies + 2 * index + 1,
                sleeps=replies + 2 * workers + index,
            )
            for index in range(workers)
        ]

    @staticmethod
    def size(workers: int) -> int:
        """Return the bytes for that many workers."""
        return _aligned(8 * (_LINE * (1 + workers) + 3 * workers))

    def fence(self) -> None:
        """Make earlier writes visible before later reads: the lock's atomic operation is a full barrier on x86."""
        with self._lock:
            pass

    def replies(self) -> bytes:
        """Return what all workers have written, to be compared: one call for any number of them."""
        return self._memory[self._replies]


class WordsOfWorker(NamedTuple):
    """The places of one worker's words."""

    step: int
    sent: int
    done: int
    replied: int
    sleeps: int


@dataclass(slots=True)
class ArraysOfWorker:
    """The rows of one worker; `only` is the only column of observations, if there are no others."""

    chosen: Any
    rewards: Any
    terminated: Any
    truncated: Any
    actions: list[Any]
    observations: list[Any]
    only: Any


class SharedArrays:
    """The words, and the arrays for `n` slots.

    Args:
        layout: The columns; None for environments with other values, which need the words only.
        n: The number of slots.
        workers: The number of workers.
        descriptor: The memory of another process's `SharedArrays`; None makes a new one.
    """

    def __init__(self, layout: ColumnLayout | None, n: int, workers: int, descriptor: int | None = None) -> None:
        layout = layout or ColumnLayout((), ())
        flags = (Column((), "|u1", ()), Column((), "<f8", ()), Column((), "|b1", ()), Column((), "|b1", ()))
        columns = [*flags, *layout.actions, *layout.observations, *layout.observations]
        sizes = [_aligned(_size(column, n)) for column in columns]
        start = Words.size(workers)
        self.descriptor = _new_memory(start + sum(sizes)) if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, start + sum(sizes))
        self.words = Words(self._memory, workers)
        arrays = iter(self._arrays(columns, sizes, n, start))
        self.chosen: Any = next(arrays)
        self.rewards: Any = next(arrays)
        self.terminated: Any = next(arrays)
        self.truncated: Any = next(arrays)
        self.actions: list[Any] = [next(arrays) for _ in layout.actions]
        self.observations: list[Any] = [next(arrays) for _ in layout.observations]
        self.finals: list[Any] = list(arrays)

    def _arrays(self, columns: Iterable[Column], sizes: Iterable[int], n: int, start: int) -> Iterable[Any]:
        for column, size in zip(columns, sizes, strict=True):
            shape = column.batch_shape(n)
            flat = np.frombuffer(self._memory, column.dtype, math.prod(shape), start)
            yield flat.reshape(shape)
            start += size

    def part(self, slots: range) -> ArraysOfWorker:
        """Return the rows of one worker."""
        rows = slice(slots.start, slots.stop)
        observations = [array[rows] for array in self.observations]
        return ArraysOfWorker(
            self.chosen[rows],
            self.rewards[rows],
            self.terminated[rows],
            self.truncated[rows],
            [array[rows] for array in self.actions],
            observations,
            observations[0] if len(observations) == 1 else None,
        )

    def close(self) -> None:
        """Let go of the memory; the arrays must not be used any more."""
        self.words.words.release()
        del self.chosen, self.rewards, self.terminated, self.truncated
        self.actions, self.observations, self.finals = [], [], []
        with contextlib.suppress(BufferError):  # a view of it lives on, and the memory with it
            self._memory.close()
        os.close(self.descriptor)


def _size(column: Column, n: int) -> int:
    return math.prod(column.batch_shape(n)) * int(np.dtype(column.dtype).itemsize)


def _aligned(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


def _new_memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("openenv-vector")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
