"""Copies of environments in workers: by fork(2) of the whole process, or by their pickled state.

A worker with a single session can be forked, with its environment in any state (`ProcessFork`):

    main thread: event loop             ......... fork .........>   does not exist in the copy
    the session's thread ── os.fork ──> continues in the original   continues in the copy: now its main thread
                                                                    a new thread runs a new `SessionHost` and its loop

So the environment stays on its thread, together with everything that C libraries have tied to that thread. A worker
with several sessions packs the state of one environment instead, and the server sends it to other workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from openenv.env.copies import own_snapshot, require_copyable, require_inner_state, restore_into, writes_snapshots
from openenv.errors import NotForkable, message_of

from ....sessions.session import Session
from ...dispatcher import WorkerThread
from ...thread import ThreadLane
from .. import fork_checks
from ..messages import PackedState, pack, unpack

if TYPE_CHECKING:
    from .host import SessionHost

_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


class ProcessCopies:
    """The copies of this worker: makes them, and collects their exit status.

    Args:
        host: The sessions of this process.
        is_copy: Whether this process is a copy itself.
    """

    def __init__(self, host: SessionHost, *, is_copy: bool) -> None:
        self._host = host
        self._is_copy = is_copy
        self._pids: set[int] = set()
        self._orphans: set[int] = set()  # ended copies with an uncollected status

    async def copy(self, session: Session, number: int, numbers: list[int], by_process: bool) -> PackedState | None:
        """Fork this process for each lane of the server, or return the environment's state for other workers.

        Args:
            session: The session to copy.
            number: The number of the request.
            numbers: The lanes of the copies in the server.
            by_process: Whether the server allows a fork of the process.

        Raises:
            NotForkable: Neither is possible.
        """
        env = session.env
        problem = fork_checks.obstacle(self._host.own_tasks(), self._host.own_descriptors(), self._pids)
        is_alone = self._host.session_count == 1
        is_inner = not getattr(type(env), "HAS_EXTERNAL_STATE", False)
        if problem is None and is_inner and is_alone and by_process and fork_checks.is_possible():
            self._fork(session, number, numbers)
            return None
        if writes_snapshots(type(env)):
            snapshot = await session.run_in_lane(partial(own_snapshot, env), kind="fork")
            return _packed(env, snapshot, is_snapshot=True)
        require_inner_state(env)
        name = type(env).__name__
        if problem is not None:
            raise NotForkable(f"{name} cannot be copied: {problem}. Write snapshot() and restore() in it.")
        state: PackedState = await session.run_in_lane(partial(_packed, env, env, is_snapshot=False), kind="fork")
        return state

    def _fork(self, session: Session, number: int, numbers: list[int]) -> None:
        if not self._pids and not self._is_copy:
            _adopt_orphans()
        fork = ProcessFork(self._host, session, numbers)
        session.lane.submit(fork)
        # Block the event loop until then: this thread must hold no lock that a copy would wait for forever.
        fork.done.wait()
        self._pids.update(fork.pids)
        with contextlib.ExitStack() as stack:
            for sock in fork.sockets:
                stack.enter_context(sock)
            if fork.error is not None:
                raise NotForkable(f"The process cannot be copied: {message_of(fork.error)}") from fork.error
            self._host.replies.send_copies(number, fork.pids, fork.sockets)

    def reap(self, pid: int) -> None:
        """Collect the exit status of an ended copy."""
        self._pids.discard(pid)
        try:
            os.waitpid(pid, os.WNOHANG)
            self._orphans.discard(pid)
        except ChildProcessError:
            # It is a child of another copy. If that copy is ending, the child becomes ours in a moment.
            if os.path.exists(f"/proc/{pid}"):
                self._orphans.add(pid)
            else:
                self._orphans.discard(pid)

    def reap_orphans(self) -> None:
        """Try again to collect the status of copies that were other processes' children."""
        for pid in list(self._orphans):
            self.reap(pid)


@dataclass(frozen=True, slots=True)
class CopiedSession:
    """The session that a copied process inherits: its environment and thread, for a new lane of the server."""

    lane_number: int
    env: Any
    thread: WorkerThread


class ProcessFork:
    """Forks the process in the thread of its only session; a `LaneCall`.

    All copies keep the state of the random generators on purpose. Without this, `random` would reseed in a copy.
    """

    kind = "fork"
    count = 1

    def __init__(self, host: SessionHost, session: Session, numbers: list[int]) -> None:
        self._host = host
        self._session = session
        self._numbers = numbers
        self.done = threading.Event()
        self.pids: list[int] = []
        self.sockets: list[socket.socket] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """Fork; returns in the original and in every copy."""
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # else each copy would print buffered output again
            random_state, files = random.getstate(), fork_checks.open_files()
            for number in self._numbers:
                ours, theirs = socket.socketpair()
                self.sockets.append(theirs)
                with ours:
                    pid = _fork()
                    if pid == 0:
                        self._go_on_as_copy(ours, number, random_state, files)
                        return
                self.pids.append(pid)
        except BaseException as exc:
            self.error = exc
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.done.set()

    def _go_on_as_copy(
        self, sock: socket.socket, number: int, random_state: Any, files: list[fork_checks.OpenFile]
    ) -> None:
        try:
            with open("/proc/self/comm", "w") as file:
                file.write(fork_checks.COPY_NAME)
            random.setstate(random_state)
            for theirs in self.sockets:  # the server's ends; open copies would hide the end of a sibling from it
                theirs.close()
            for opened in files:
                fork_checks.reopen(opened)
            lane = self._session.lane
            assert isinstance(lane, ThreadLane)
            copied = CopiedSession(number, self._session.env, lane.host)
            host = self._host.copied_host(sock.dup(), copied)
            threading.Thread(target=_serve_copy, args=(host,), name="openenv-host", daemon=True).start()
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads; `fork_checks` has checked them
        return os.fork()


def _serve_copy(host: SessionHost) -> None:
    code = 1
    try:
        asyncio.run(host.run())
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skip the exit handlers of the original


def _adopt_orphans() -> None:
    """Adopt copies after their parent ends: in a container, PID 1 may never collect their status."""
    import ctypes  # not needed before

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _packed(env: Any, value: Any, *, is_snapshot: bool) -> PackedState:
    if not is_snapshot:
        require_copyable(env)
    try:
        return PackedState(is_snapshot, pack(value))
    except Exception as exc:
        kind = "snapshot" if is_snapshot else "state"
        raise NotForkable(
            f"{type(env).__name__} shares its process with others, so its {kind} must be pickled, which failed: "
            f"{message_of(exc)}. Serve it with one session in each process (--sessions-per-process 1), which copies "
            "the whole process, or write snapshot() and restore() that can be pickled."
        ) from exc


def environment_of(factory: Callable[[], Any], state: PackedState) -> Any:
    """Make an environment in a packed state."""
    value = unpack(state.pickled)
    if not state.is_snapshot:
        return value
    env = factory()
    restore_into(env, value)
    return env
