"""Pools of sandboxes kept ready. A sandbox is leased once and then closed, never reused:

filler thread: open ──> ready (a deque, oldest first) ──lease──> leased ──end of the with block──> closed
                          │                           └─take_ready──> the caller's
                          └─ ready for more than max_idle_s, or no longer alive ──> closed

`SandboxPool` has sandboxes of one kind. `WarmSandboxes` is a backend with a pool for each kind that is opened again
and again, such as the agent's and the verifier's sandbox of a task.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from openenv.errors import SandboxError, message_of
from openenv.sandboxes.base import Sandbox, Sandboxes, SandboxSpec

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0


class SandboxPool:
    """Keeps sandboxes of one kind ready. Also a context manager; safe to use from many threads.

    Args:
        backend: The backend that starts them.
        spec: Their properties. A leased sandbox has all of `spec.timeout_s` left, even if it waited in the pool.
        size: The number of ready sandboxes.
        max_leases: The number of sandboxes in use at once; None for no limit.
        max_idle_s: A sandbox that was ready for this long is replaced.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        backend: Sandboxes,
        spec: SandboxSpec | None = None,
        *,
        size: int = 2,
        max_leases: int | None = None,
        max_idle_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if size < 1:
            raise ValueError("a pool keeps at least one sandbox ready")
        spec = spec or SandboxSpec()
        self._backend = backend
        self._spec = replace(spec, timeout_s=spec.timeout_s + max_idle_s)
        self._size = size
        self._max_idle_s = max_idle_s
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: collections.deque[tuple[Sandbox, float]] = collections.deque()  # with the time since when
        self._leased: set[Sandbox] = set()
        self._slots = threading.BoundedSemaphore(max_leases) if max_leases is not None else None
        self._closed = False
        self._problem: str | None = None
        self._filler = threading.Thread(target=self._fill, name="openenv-pool", daemon=True)
        self._filler.start()

    @property
    def ready(self) -> int:
        """Return how many sandboxes are ready."""
        with self._changed:
            return len(self._ready)

    @property
    def problem(self) -> str | None:
        """Return why the last attempt to start a sandbox failed; None if it succeeded."""
        return self._problem

    @contextlib.contextmanager
    def lease(self, *, timeout: float | None = None) -> Iterator[Sandbox]:
        """Lease a sandbox for a with block; it is closed afterwards.

        Returns a ready sandbox at once; otherwise starts one.

        Args:
            timeout: The longest wait while `max_leases` are in use.

        Raises:
            TimeoutError: None became free in time.
            SandboxError: The pool is closed, or no sandbox can be started.
        """
        if self._slots is not None and not self._slots.acquire(timeout=timeout):
            raise TimeoutError("every sandbox of the pool is in use")
        try:
            sandbox = self._take()
            try:
                yield sandbox
            finally:
                with self._changed:
                    self._leased.discard(sandbox)
                sandbox.close()
        finally:
            if self._slots is not None:
                self._slots.release()

    def take_ready(self) -> Sandbox | None:
        """Return a ready sandbox, which the caller closes; None if none is ready."""
        while True:
            with self._changed:
                if not self._ready:
                    return None
                sandbox, since = self._ready.popleft()
                self._changed.notify_all()
            if self._is_fresh(sandbox, since):
                return sandbox
            sandbox.close()

    def wait_ready(self, count: int | None = None, *, timeout: float = 60.0) -> None:
        """Wait until `count` sandboxes are ready, by default all; raise TimeoutError if they are not in time."""
        wanted = self._size if count is None else count
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ready) >= wanted or self._closed, timeout):
                raise TimeoutError(self._problem or "the sandboxes are not ready in time")

    def close(self) -> None:
        """Close every sandbox, including leased ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._filler.join()
        with self._changed:
            remaining = [sandbox for sandbox, _ in self._ready] + list(self._leased)
            self._ready.clear()
        for sandbox in remaining:
            sandbox.close()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take(self) -> Sandbox:
        """Return a living sandbox that was never leased."""
        if self._closed:
            raise SandboxError("The pool of sandboxes is closed.")
        sandbox = self.take_ready() or self._backend.open(self._spec)
        with self._changed:
            self._leased.add(sandbox)
            closed = self._closed
        if closed:
            sandbox.close()
            raise SandboxError("The pool of sandboxes is closed.")
        return sandbox

    def _is_fresh(self, sandbox: Sandbox, since: float) -> bool:
        if self._clock() - since > self._max_idle_s:
            return False
        return sandbox.is_alive()

    def _fill(self) -> None:
        """Keep sandboxes ready until the pool is closed."""
        while True:
            stale = []
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._size, self._time_to_next())
                if self._closed:
                    return
                while self._ready and self._clock() - self._ready[0][1] > self._max_idle_s:  # the oldest come first
                    stale.append(self._ready.popleft()[0])
                missing = self._size - len(self._ready)
            for sandbox in stale:
                sandbox.close()
            if missing > 0:
                self._add()

    def _time_to_next(self) -> float:
        if not self._ready:
            return _PAUSE_S
        return max(0.01, self._ready[0][1] + self._max_idle_s - self._clock())

    def _add(self) -> None:
        try:
            sandbox = self._backend.open(self._spec)
        except Exception as error:  # the boundary of the thread; the next attempt may succeed
            self._problem = message_of(error)
            _log.warning("the pool cannot start a sandbox: %s", self._problem)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _PAUSE_S)
            return
        with self._changed:
            self._problem = None
            self._ready.append((sandbox, self._clock()))
            self._changed.notify_all()


_MOST_KINDS = 8


class WarmSandboxes(Sandboxes):
    """A backend that keeps sandboxes of another backend ready, to save the time of their start. A context manager.

    A kind of sandbox is kept ready from its second start on. Kinds differ in image, limits, mounts or any other
    property except `metadata`, which sandboxes from a pool do not have. Sandboxes from snapshots are never kept ready.
    Each sandbox is used once. Leaving the context closes those that are ready, not those that were opened.

    Args:
        backend: The backend that starts the sandboxes.
        ready: How many sandboxes of each kind are kept ready.
        most_kinds: The number of kinds; the kind that was not used for longest is given up.
    """

    def __init__(self, backend: Sandboxes, *, ready: int = 1, most_kinds: int = _MOST_KINDS) -> None:
        if ready < 1 or most_kinds < 1:
            raise ValueError("ready and most_kinds must be at least 1")
        self.name = backend.name
        self._backend, self._ready, self._most_kinds = backend, ready, most_kinds
        self._lock = threading.Lock()
        self._pools: collections.OrderedDict[tuple[object, ...], SandboxPool | None] = collections.OrderedDict()
        self._closed = False

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]  # those of a backend may change with its first start
        """The features of the backend."""
        return self._backend.features

    def check(self) -> None:
        self._backend.check()

    def require(self, spec: SandboxSpec) -> None:
        self._backend.require(spec)

    def fingerprint(self, spec: SandboxSpec) -> str:
        return self._backend.fingerprint(spec)

    def leftovers(self) -> list[str]:
        return self._backend.leftovers()

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        spec = spec or SandboxSpec()
        pool = None if spec.from_snapshot is not None else self._pool(spec)
        sandbox = None if pool is None else pool.take_ready()
        return self._backend.open(spec) if sandbox is None else sandbox

    def _pool(self, spec: SandboxSpec) -> SandboxPool | None:
        """Return the pool of a kind of sandboxes; None for the first one, and after the end."""
        others = (getattr(spec, each.name) for each in fields(spec) if each.name not in ("envs", "metadata"))
        kind = (*others, *sorted(spec.envs.items()))
        dropped: SandboxPool | None = None
        with self._lock:
            if self._closed:
                return None
            if kind not in self._pools:
                self._pools[kind] = None
                if len(self._pools) > self._most_kinds:
                    _, dropped = self._pools.popitem(last=False)
            elif self._pools[kind] is None:
                self._pools[kind] = SandboxPool(self._backend, replace(spec, metadata={}), size=self._ready)
            self._pools.move_to_end(kind)
            pool = self._pools[kind]
        if dropped is not None:
            dropped.close()
        return pool

    def close(self) -> None:
        """Close the sandboxes that are ready, and keep none ready from now on."""
        with self._lock:
            self._closed = True
            pools = [pool for pool in self._pools.values() if pool is not None]
            self._pools.clear()
        for pool in pools:
            pool.close()

    def __enter__(self) -> WarmSandboxes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
