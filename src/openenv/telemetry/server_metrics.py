"""What a process says about itself: memory and threads. Knows `/proc` and its fallbacks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..sessions.events import SessionEvent
from ..sessions.manager import SessionManager
from ..sessions.session import Session, SessionState
from .prometheus import Family, render
from .watched_calls import PHASES, CallWatch

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the memory that is in use now, or the most that ever was where the system tells no more."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource  # not on every system
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def thread_count() -> int:
    """Return how many of Python's threads are alive."""
    return threading.active_count()


# metrics: The metrics of one server, counted from the events of its sessions and, once somebody asks, from each call.
#
# What is rare is counted from the beginning. Calls are timed from the first reading on: a server that nobody watches pays
# nothing for it. Knows sessions and the exposition format; must not know HTTP.


_STATES = tuple(state.value for state in SessionState if state is not SessionState.CLOSED)
_MOST_LABELS = 64
_OTHER = "other"


class ServerMetrics:
    """Counts what happens to the sessions of one manager.

    Args:
        manager: Whose.
        watch: Where calls can be timed.
        info: What is served, as labels.
        clock: Tells the time, in seconds since 1970.
    """

    def __init__(
        self,
        manager: SessionManager,
        watch: CallWatch,
        *,
        info: Callable[[], dict[str, str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._manager = manager
        self._watch = watch
        self._info = info
        self._clock = clock
        self._started_at = clock()
        self._lock = threading.Lock()
        self._opened = 0
        self._closed: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._ended_steps = 0
        self._ended_repeats = 0
        self._shown: dict[str, int] = {}
        for kind in ("reset", "step"):
            watch.times[kind]  # shown from the beginning
        manager.listeners.append(self._on_event)

    def _on_event(self, event: SessionEvent) -> None:
        with self._lock:
            if event.name == "opened":
                self._opened += 1
            elif event.name == "closed":
                _count(self._closed, event.reason or "closed")
                self._ended_steps += event.steps
                self._ended_repeats += event.repeats
            elif event.name == "error":
                _count(self._errors, event.reason or _OTHER)

    def text(self) -> bytes:
        """Write everything in Prometheus' text format; from the first time on, calls are timed."""
        self._watch.begin()
        return render([*self._session_families(), *self._call_families(), *self._process_families()])

    def _session_families(self) -> list[Family]:
        manager = self._manager
        with self._lock:  # first those that have ended, then those that live: so none is counted twice
            opened, closed, errors = self._opened, dict(self._closed), dict(self._errors)
            steps, repeats = self._ended_steps, self._ended_repeats
        sessions = manager.sessions()
        steps += sum(session.step_count for session in sessions)
        repeats += sum(session.ledger.hits for session in sessions)
        states = Counter(map(_state, sessions))
        by_state = Family("openenv_sessions", "gauge", "Sessions that hold a slot, by state.")
        for state in _STATES:
            by_state.add(states.get(state, 0), {"state": state})
        endings = Family("openenv_sessions_closed_total", "counter", "Sessions that have ended, by reason.")
        for reason, count in sorted(closed.items()):
            endings.add(count, {"reason": reason})
        by_code = Family("openenv_errors_total", "counter", "Requests that were answered with an error, by code.")
        for code, count in sorted(errors.items()):
            by_code.add(count, {"code": code})
        return [
            Family("openenv_info", "gauge", "What is served.").add(1, self._info()),
            Family("openenv_ready", "gauge", "1 while sessions are opened, 0 while the server shuts down.").add(
                int(not manager.is_draining)
            ),
            by_state,
            Family("openenv_session_slots", "gauge", "Sessions that can be held at once.").add(manager.max_sessions),
            Family("openenv_session_slots_used", "gauge", "Slots in use.").add(len(sessions)),
            Family("openenv_queue_length", "gauge", "Clients that wait for a slot.").add(len(manager.queue)),
            Family("openenv_sessions_opened_total", "counter", "Sessions begun.").add(opened),
            endings,
            Family("openenv_steps_total", "counter", "Steps taken.").add(self._growing("steps", steps)),
            by_code,
            Family("openenv_resumes_total", "counter", "Sessions that a client has come back to.").add(
                manager.attachments.resumes
            ),
            Family(
                "openenv_ledger_hits_total", "counter", "Repeated requests that were answered without running twice."
            ).add(self._growing("repeats", repeats)),
        ]

    def _growing(self, name: str, value: int) -> int:
        """A counter never falls; a session that just ends may be in neither sum for a moment."""
        self._shown[name] = max(value, self._shown.get(name, 0))
        return self._shown[name]

    def _call_families(self) -> list[Family]:
        family = Family(
            "openenv_call_seconds",
            "histogram",
            "Time of each call, by operation and phase: wait for its turn, run with the encoding of its result, reply.",
        )
        for kind, times in sorted(self._watch.times.copy().items()):
            for phase, seen in zip(PHASES, times.read(), strict=True):
                family.add_distribution(seen, {"operation": kind, "phase": phase})
        return [family]

    def _process_families(self) -> list[Family]:
        return [
            Family("process_resident_memory_bytes", "gauge", "Memory in use.").add(resident_bytes()),
            Family("process_threads", "gauge", "Python's threads.").add(thread_count()),
            Family("process_start_time_seconds", "gauge", "When the process began, in seconds since 1970.").add(
                round(self._started_at, 3)
            ),
            Family("openenv_uptime_seconds", "gauge", "Age of the process.").add(
                round(self._clock() - self._started_at, 3)
            ),
        ]


def _state(session: Session) -> str:
    return (SessionState.DETACHED if session.is_detached else session.state).value


def _count(counter: Counter[str], label: str) -> None:
    counter[label if label in counter or len(counter) < _MOST_LABELS else _OTHER] += 1
