"""`SharedArrays`: the arrays of a local vector, in memory that its worker processes share.

The memory is a file descriptor without a name (`memfd_create`, or a deleted temporary file on systems without it). So
the kernel frees it when the last process has ended, however it ended: a crash cannot leave a segment behind. Knows
layouts; must not know processes or environments.

    chosen        uint8    which slots take this step
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
import tempfile
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from openenv.protocol.columns import Column, ColumnLayout

_ALIGNMENT: Final = 64  # a cache line: two workers never write to the same one


class SharedArrays:
    """The arrays for `n` slots.

    Args:
        layout: The columns.
        n: The number of slots.
        descriptor: The memory of another process's `SharedArrays`; None makes a new one.
    """

    def __init__(self, layout: ColumnLayout, n: int, descriptor: int | None = None) -> None:
        flags = (Column((), "|u1", ()), Column((), "<f8", ()), Column((), "|b1", ()), Column((), "|b1", ()))
        columns = [*flags, *layout.actions, *layout.observations, *layout.observations]
        sizes = [_aligned(_size(column, n)) for column in columns]
        self.descriptor = _new_memory(sum(sizes)) if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, sum(sizes))
        arrays = iter(self._arrays(columns, sizes, n))
        self.chosen: Any = next(arrays)
        self.rewards: Any = next(arrays)
        self.terminated: Any = next(arrays)
        self.truncated: Any = next(arrays)
        self.actions: list[Any] = [next(arrays) for _ in layout.actions]
        self.observations: list[Any] = [next(arrays) for _ in layout.observations]
        self.finals: list[Any] = list(arrays)

    def _arrays(self, columns: Iterable[Column], sizes: Iterable[int], n: int) -> Iterable[Any]:
        start = 0
        for column, size in zip(columns, sizes, strict=True):
            shape = column.batch_shape(n)
            flat = np.frombuffer(self._memory, column.dtype, math.prod(shape), start)
            yield flat.reshape(shape)
            start += size

    def close(self) -> None:
        """Let go of the memory; the arrays must not be used any more."""
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
