"""The metrics of one server, counted from the events of its sessions and from its calls.

Sessions are counted from the start. Calls are timed from the first scrape on, so that a server without monitoring pays
nothing. Knows sessions and Prometheus' format; must not know HTTP.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from openenv.env.binding import factory_name

from ..runners import ThreadRunner
from ..sessions.events import SessionEvent
from ..sessions.manager import SessionManager
from ..sessions.session import Session, SessionState
from .prometheus import Combine, Family, render
from .watched_calls import PHASES, CallWatch

_STATM = Path("/proc/self/statm")
_STATES = tuple(state.value for state in SessionState if state is not SessionState.CLOSED)
_MAX_LABELS = 64
MERGED_BY: Mapping[str, Combine] = {
    "openenv_info": max,
    "openenv_runner_info": max,
    "openenv_ready": max,
    "openenv_session_slots": max,
    "process_start_time_seconds": min,
    "openenv_uptime_seconds": max,
}
"""How to merge the metrics of several processes; all others are added."""
_OTHER = "other"


class ServerMetrics:
    """Counts the sessions and calls of one manager; `info` returns labels that describe the server."""

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
        self._abandoned = 0
        self._closed: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._ended_steps = 0
        self._ended_repeats = 0
        self._shown: dict[str, int] = {}
        for kind in ("reset", "step"):
            watch.times[kind]  # so that they appear in the first scrape, without a value
        manager.listeners.append(self._on_event)

    def _on_event(self, event: SessionEvent) -> None:
        with self._lock:
            if event.name == "opened":
                self._opened += 1
            elif event.name == "abandoned":
                self._abandoned += 1
            elif event.name == "closed":
                _count(self._closed, event.reason or "closed")
                self._ended_steps += event.steps
                self._ended_repeats += event.repeats
            elif event.name == "error":
                _count(self._errors, event.reason or _OTHER)

    def text(self) -> bytes:
        """Write all metrics in Prometheus' text format; the first call starts the timing of calls."""
        self._watch.begin()
        return render([*self._session_families(), *self._call_families(), *self._process_families()])

    def _session_families(self) -> list[Family]:
        manager = self._manager
        with self._lock:  # ended sessions before live ones, so that none is counted twice
            opened, closed, errors = self._opened, sorted(self._closed.items()), sorted(self._errors.items())
            steps, repeats, abandoned = self._ended_steps, self._ended_repeats, self._abandoned
        sessions = manager.sessions()
        steps += sum(session.step_count for session in sessions)
        repeats += sum(session.ledger.hits for session in sessions)
        states = Counter(map(_state, (*sessions, *list(manager.abandoned.values()))))
        ready = int(not manager.is_draining)
        resumes, hits = manager.attachments.resumes, self._growing("repeats", repeats)
        return [
            Family("openenv_info", "gauge", "Name, version and mode of the server, as labels.").add(1, self._info()),
            Family("openenv_ready", "gauge", "1 while the server opens sessions, 0 while it shuts down.").add(ready),
            Family("openenv_sessions", "gauge", "Open sessions, by state; abandoned ones hold no slot.").add_all(
                "state", ((state, states[state]) for state in _STATES)
            ),
            Family("openenv_session_slots", "gauge", "Limit of open sessions.").add(manager.max_sessions),
            Family("openenv_session_slots_used", "gauge", "Slots in use.").add(len(sessions)),
            Family("openenv_queue_length", "gauge", "Clients waiting for a slot.").add(len(manager.queue)),
            Family("openenv_sessions_opened_total", "counter", "Sessions opened.").add(opened),
            Family("openenv_sessions_closed_total", "counter", "Ended sessions, by reason.").add_all("reason", closed),
            Family("openenv_sessions_abandoned_total", "counter", "Sessions that were to end and hung.").add(abandoned),
            Family("openenv_steps_total", "counter", "Steps taken.").add(self._growing("steps", steps)),
            Family("openenv_errors_total", "counter", "Requests answered with an error, by code.").add_all(
                "code", errors
            ),
            Family("openenv_resumes_total", "counter", "Sessions resumed by their client.").add(resumes),
            Family("openenv_ledger_hits_total", "counter", "Repeated requests answered from the ledger.").add(hits),
            *self._runner_families(),
        ]

    def _runner_families(self) -> list[Family]:
        manager = self._manager
        runner, env_cls = manager.runner, manager.env_cls
        labels = {
            "runner": runner.name,
            "environment": factory_name(manager.factory) if env_cls is None else env_cls.__name__,
            "placement": runner.placement,
        }
        families = [Family("openenv_runner_info", "gauge", "Where new sessions run, as labels.").add(1, labels)]
        if isinstance(runner, ThreadRunner):
            counts = runner.handovers
            families.append(
                Family(
                    "openenv_handovers_total",
                    "counter",
                    "Calls handed to threads: the loop waited and they were quick, or late; or it did not wait.",
                ).add_all("outcome", (("quick", counts.quick), ("late", counts.late), ("apart", counts.apart)))
            )
        return families

    def _growing(self, name: str, value: int) -> int:
        """Keep a counter from falling: for a moment, an ending session is in neither sum."""
        self._shown[name] = max(value, self._shown.get(name, 0))
        return self._shown[name]

    def _call_families(self) -> list[Family]:
        family = Family(
            "openenv_call_seconds",
            "histogram",
            "Seconds of each call, by operation and phase: wait in the queue, run and encode the result, reply.",
        )
        for kind, times in sorted(self._watch.times.copy().items()):
            for phase, distribution in zip(PHASES, times.read(), strict=True):
                family.add_distribution(distribution, {"operation": kind, "phase": phase})
        return [family]

    def _process_families(self) -> list[Family]:
        started, uptime = round(self._started_at, 3), round(self._clock() - self._started_at, 3)
        return [
            Family("process_resident_memory_bytes", "gauge", "Resident memory.").add(_resident_bytes()),
            Family("process_threads", "gauge", "Live Python threads.").add(threading.active_count()),
            Family("process_start_time_seconds", "gauge", "Start of the process, in seconds since 1970.").add(started),
            Family("openenv_uptime_seconds", "gauge", "Seconds since the start of the process.").add(uptime),
        ]


def _state(session: Session) -> str:
    return (SessionState.DETACHED if session.is_detached else session.state).value


def _count(counter: Counter[str], label: str) -> None:
    counter[label if label in counter or len(counter) < _MAX_LABELS else _OTHER] += 1


def _resident_bytes() -> int:
    """Return the memory in use, or its peak on systems that report only that."""
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
