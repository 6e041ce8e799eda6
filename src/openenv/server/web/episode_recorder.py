"""Records the calls of sessions: resets, steps, tool calls, their failures and pictures, as files of `episode_files`.

A *tap* records a session. It wraps the session's call factory, so unrecorded sessions pay nothing. On the loop a tap
only notes the call and its encoded result; a thread decodes and writes them. The thread takes at most a fifth of a
core. A busier server keeps a sample of the episodes, each of them complete.

    call --> reply to the client --> SessionTap (on the loop) --> queue --> EpisodeWriter (a thread) --> EpisodeFiles
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple

from openenv.env.tools.source import ToolOutcome, ToolRequest
from openenv.errors import OpenEnvError, RequestCancelled, SessionClosedError, message_of
from openenv.protocol.json_values import decode, encode

from ..runners import Dispatcher, current_dispatcher
from ..service import EnvService
from ..sessions.events import RequestOrigin, SessionEvent
from ..sessions.group import StepGroup
from ..sessions.lifetime import CLOSED
from ..sessions.operations import Operation, StepInput
from ..sessions.peers import is_process
from ..sessions.session import CallFactory, Done, Session, SessionCall, SessionKind
from .episode_files import INTERRUPTED, VERSION, EpisodeFiles, EpisodeSummary, new_id
from .page_operations import DRAW, RENDER, Move, Render, draws, observation_of

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 20_000  # unwritten rows
_MOST_WAITING_BYTES: Final = 64 * 1024 * 1024
_MOST_EPISODE_BYTES: Final = 64 * 1024 * 1024
_EPISODES_IN_FOLDER: Final = 4  # a single episode must not push all others out
_MOST_TRACEBACK: Final = 20_000
_BATCH: Final = 500
_GATHER_S: Final = 0.05  # rows within this time are written together
_REST: Final = 4.0  # how long the thread rests for each second of work
_LONGEST_REST_S: Final = 0.5
_RETRY_S: Final = 10.0  # after a failure to write
_EVICT_S: Final = 1.0
_FLUSH_S: Final = 2.0
_STOP_S: Final = 5.0
_ELSEWHERE_S: Final = 600.0
_DELIVERY_S: Final = 0.05  # how long the last replies of a session may take to reach the loop
_WATCH_S: Final = 15.0
_DRAW_SHARE: Final = 0.1  # the share of an episode's time for pictures that no visitor watches
_DRAW_FREE_S: Final = 0.25
_PACKAGE: Final = str(Path(__file__).resolve().parents[2]) + os.sep

_OPENERS: Final = {
    SessionKind.SOCKET: "WebSocket client",
    SessionKind.RESUMABLE: "WebSocket client",
    SessionKind.HTTP: "HTTP client",
    SessionKind.SOFT: "HTTP client",  # with a cookie, or speaking MCP
    SessionKind.ONCE: "single request",
}

RowKind = Literal["reset", "step", "call", "picture", "end"]


class RawRow(NamedTuple):
    """A call as noted on the loop; the writer's thread makes a row of it."""

    episode: LiveEpisode
    kind: RowKind
    n: int
    argument: Any
    result: Any
    error: BaseException | None
    at: float
    ms: float


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """A running episode. The loop creates it; only the writer uses it then.

    Args:
        is_kept: Whether to write it to disk; else it is only watched.
        lines: Unwritten lines. An episode with nothing but a reset is never written.
    """

    summary: EpisodeSummary
    is_kept: bool
    lines: list[bytes] = field(default_factory=list)
    has_begun: bool = False
    is_on_disk: bool = False
    is_lost: bool = False
    is_full: bool = False
    size: int = 0
    last: dict[str, Any] | None = None
    picture: str | None = None


class SessionTap:
    """Notes the calls of one session; all methods run on the loop."""

    def __init__(self, recorder: EpisodeRecorder, session: Session, *, opened_by: str, is_kept: bool) -> None:
        self.session = session
        self.opened_by = opened_by
        self.is_kept = is_kept
        self.is_page = opened_by == "page"
        self.episode: LiveEpisode | None = None
        self.watched_until = 0.0
        self._recorder = recorder
        self._is_skipping = False  # the recorder was too busy when the episode began
        self._n = 0
        self._under_way = 0
        self._closed: str | None = None
        self._draws: bool | None = None
        self._began = 0.0
        self._drawn_s = 0.0

    @property
    def is_watched(self) -> bool:
        """Whether a visitor watches the session now."""
        return self.watched_until > self._recorder.clock()

    def wrap(self, factory: CallFactory) -> CallFactory:
        """Return a factory that notes its calls."""

        def make(
            session: Session,
            operation: Operation,
            argument: Any,
            done: Done,
            dispatcher: Dispatcher,
            origin: RequestOrigin | None = None,
        ) -> SessionCall:
            kind = _row_kind(operation, argument)
            if kind is None or (self._is_skipping and kind == "step" and not self.is_watched):
                return factory(session, operation, argument, done, dispatcher, origin)
            began = self._recorder.clock()
            noted = None if kind == "picture" else _argument(argument)  # before the environment can change it
            self._under_way += 1

            def note(result: Any, error: BaseException | None) -> None:
                try:
                    done(result, error)  # answer the client first
                finally:
                    self._under_way -= 1
                    self.note(kind, noted, result, error, began)

            return factory(session, operation, argument, note, dispatcher, origin)

        return make

    def note(self, kind: RowKind | Literal["restore"], argument: Any, result: Any, error: Any, began: float) -> None:
        """Note the outcome of a call. Errors here end the recording and never affect the session."""
        try:
            self._note(kind, argument, result, error, began)
        except Exception:
            logger.exception("session %s: a call is not recorded", self.session.id)

    def _note(self, kind: RowKind | Literal["restore"], argument: Any, result: Any, error: Any, began: float) -> None:
        now = self._recorder.clock()
        if kind == "restore":
            if error is None:
                self.end("restored")
            return
        if kind == "picture" and (self.episode is None or error is not None or result.html is None):
            return
        if kind == "reset":
            self.end("reset")
            self._is_skipping = False
        if self.episode is None and not self._begin(now):
            return
        assert self.episode is not None
        if kind == "step":
            self._n += 1
            if self._n == 1 and not self.is_page:  # the first reset may run before the connection holds the session
                self.episode.summary.opened_by = opener_of(self.session)
        if not isinstance(result, bytes) and kind in ("reset", "step") and error is None:
            result = observation_of(result)  # an object may change before the thread reads it
        self._put(kind, argument, result, error, (now - began) * 1000)
        if kind in ("reset", "step") and error is None and not self.is_page:
            self._draw(result, now)
        if self._closed is not None and self._under_way == 0:
            self._end_closed()

    def _begin(self, now: float) -> bool:
        is_kept = self.is_kept and (self.is_page or not self._recorder.is_busy)
        if self._is_skipping or not (is_kept or self.is_watched):
            self._is_skipping = self.is_kept  # until its next reset
            if not self.is_kept:
                self._recorder.forget(self)  # it is no longer watched
            elif not is_kept:
                self._recorder.skipped += 1
            return False
        self.episode = self._recorder.begin(self, is_kept=is_kept)
        self._n, self._began, self._drawn_s = 0, now, 0.0
        return True

    def _put(self, kind: RowKind, argument: Any, result: Any, error: BaseException | None, ms: float) -> None:
        assert self.episode is not None
        recorder = self._recorder
        recorder.writer.put(RawRow(self.episode, kind, self._n, argument, result, error, recorder.now(), ms))

    def _draw(self, result: Any, now: float) -> None:
        """Let the environment draw its last observation, if no call waits and drawing is cheap.

        A waiting step would run first, and the picture would show another observation.
        """
        session, watched = self.session, self.is_watched
        if self._draws is None:
            self._draws = draws(session.env)
        if not self._draws or not session.is_idle:
            return
        allowed_s = _DRAW_FREE_S + (1.0 if watched else _DRAW_SHARE) * (now - self._began)
        if self._drawn_s > allowed_s:
            return
        episode = self.episode
        drawing = self._recorder.clock()

        def drawn(picture: Any, error: BaseException | None) -> None:
            self._drawn_s += self._recorder.clock() - drawing
            if error is None and isinstance(picture, Render) and self.episode is episode:
                self._put("picture", None, picture, None, 0.0)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            session.submit(DRAW, result, drawn, current_dispatcher())

    def close(self, reason: str) -> None:
        """End the episode with its session, after the last replies."""
        self._closed = reason
        if self._under_way == 0:
            self._end_closed()

    def _end_closed(self) -> None:
        self.end(self._closed or CLOSED)
        self._recorder.taps.pop(self.session.id, None)

    def end(self, reason: str) -> None:
        """End the running episode, if there is one."""
        episode, self.episode = self.episode, None
        if episode is not None:
            recorder = self._recorder
            recorder.writer.put(RawRow(episode, "end", self._n, reason, None, None, recorder.now(), 0.0))


class EpisodeRecorder:
    """Records the episodes of a server's sessions.

    Args:
        service: The server.
        clock: A steady clock.
        now: The time that is written.
    """

    def __init__(
        self, service: EnvService, clock: Callable[[], float] = time.perf_counter, now: Callable[[], float] = time.time
    ) -> None:
        self.service = service
        self.clock = clock
        self.now = now
        self.taps: dict[str, SessionTap] = {}
        self.skipped = 0
        self.is_on = False
        self._host = socket.gethostname()
        self._is_for_all = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.files = EpisodeFiles(service.options.episode_folder(service.env_name), most=1, most_bytes=1)
        self.writer = EpisodeWriter(self.files, self._running, now, redacts=service.options.redact_errors)

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording as configured; called on the server's loop."""
        options, manager = self.service.options, self.service.manager
        mode = options.recorded(self.service.mode)
        self._loop = asyncio.get_running_loop()
        self.files = EpisodeFiles(
            options.episode_folder(self.service.env_name),
            most=options.record_episodes,
            most_bytes=options.record_bytes,
        )
        self.writer = EpisodeWriter(self.files, self._running, self.now, redacts=options.redact_errors)
        self.is_on = mode != "off"
        self._is_for_all = mode == "all"
        if self._on_event not in manager.listeners:
            manager.listeners.append(self._on_event)
        self._watch_groups()

    def stop(self) -> None:
        """End all running episodes and write the remaining rows; blocks for a few seconds at most."""
        self._loop = None
        self.is_on = self._is_for_all = False
        self.service.manager.observers.group = None
        for tap in list(self.taps.values()):
            tap.end(tap.session.close_reason or INTERRUPTED)
            tap.session.wrap_calls(None)
        self.taps.clear()
        self.writer.close()

    # -- sessions -------------------------------------------------------------------------------------------------

    def record_visitor(self, session: Session) -> None:
        """Record a visitor's session; called before its environment is built."""
        if self.is_on:
            self._tap(session, opened_by="page", is_kept=True)

    def watch(self, session: Session, opened_by: str) -> SessionTap:
        """Watch a session for a while; note an unrecorded one in memory only."""
        tap = self.taps.get(session.id) or self._tap(session, opened_by=opened_by, is_kept=False)
        tap.watched_until = self.clock() + _WATCH_S
        return tap

    def forget(self, tap: SessionTap) -> None:
        """Stop watching an unrecorded session."""
        if self.taps.get(tap.session.id) is tap:
            del self.taps[tap.session.id]
            tap.session.wrap_calls(None)
            self._watch_groups()

    def _tap(self, session: Session, *, opened_by: str, is_kept: bool) -> SessionTap:
        tap = SessionTap(self, session, opened_by=opened_by, is_kept=is_kept)
        self.taps[session.id] = tap
        session.wrap_calls(tap.wrap)
        self._watch_groups()
        return tap

    def _watch_groups(self) -> None:
        self.service.manager.observers.group = self._on_group if self._is_for_all or self.taps else None

    def _on_group(self, group: StepGroup) -> None:
        """Note the steps of a group, on the loop."""
        now, taps = self.clock(), self.taps
        for session, action, outcome in zip(group.sessions, group.actions, group.outcomes, strict=True):
            tap = taps.get(session.id)
            if tap is not None and not (tap._is_skipping and not tap.is_watched):
                error = None if isinstance(outcome, bytes) else outcome
                tap.note("step", _argument(action), outcome if error is None else None, error, now)

    def _on_event(self, event: SessionEvent) -> None:
        """Follow the sessions of the server; called on any thread."""
        if event.name == "opened":
            if self._is_for_all and event.session_id not in self.taps:
                slots = self.service.manager.slots
                session = slots.lookup(event.session_id)[0] or slots.single(event.session_id)
                if session is not None:
                    self._tap(session, opened_by=opener_of(session), is_kept=True)
        elif event.name in ("closed", "abandoned") and event.session_id in self.taps:
            tap, loop = self.taps[event.session_id], self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed; `stop` ends the episode
                    loop.call_soon_threadsafe(loop.call_later, _DELIVERY_S, tap.close, event.reason or "closed")

    # -- episodes -------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether too many rows wait to be written to begin another episode."""
        return self.writer.is_behind

    def begin(self, tap: SessionTap, *, is_kept: bool) -> LiveEpisode:
        """Begin the episode of a session."""
        now = self.now()
        opened_by = "page" if tap.is_page else opener_of(tap.session)
        summary = EpisodeSummary(
            new_id(now), self.service.env_name, tap.session.id, opened_by, self._host, os.getpid(), now
        )
        return LiveEpisode(summary, is_kept)

    def _running(self) -> frozenset[str]:
        taps = list(self.taps.values())
        return frozenset(tap.episode.summary.id for tap in taps if tap.episode is not None)

    def is_running(self, summary: EpisodeSummary) -> bool:
        """Return whether an episode still runs, in this or another process that writes to the folder."""
        if summary.reason is not None:
            return False
        if summary.id in self._running():
            return True
        if summary.host != self._host:  # processes of another machine cannot be checked
            return self.now() - (summary.ended_at or summary.began_at) < _ELSEWHERE_S
        return summary.pid != os.getpid() and is_process(summary.pid)

    def status(self) -> dict[str, Any]:
        """Return the status of the recording, for the page."""
        return {
            "is_on": self.is_on,
            "is_for_all": self._is_for_all,
            "folder": str(self.files.folder),
            "most": self.files.most,
            "most_bytes": self.files.most_bytes,
            "skipped": self.skipped,
            "problem": self.writer.problem,
        }


class EpisodeWriter:
    """Makes rows of calls and writes them to files, in a thread that starts with the first row."""

    def __init__(
        self,
        files: EpisodeFiles,
        running: Callable[[], frozenset[str]],
        now: Callable[[], float],
        *,
        redacts: bool,
    ) -> None:
        self.problem: str | None = None
        self._files = files
        self._running = running
        self._now = now
        self._redacts = redacts
        self._most_episode_bytes = min(_MOST_EPISODE_BYTES, max(1, files.most_bytes // _EPISODES_IN_FOLDER))
        self._queue: deque[RawRow | threading.Event] = deque()
        self._waiting_bytes = 0
        self._signal = threading.Event()
        self._is_idle = True
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._touched: dict[str, LiveEpisode] = {}
        self._failed_at: float | None = None
        self._evicted_at = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether the queue is half full."""
        return len(self._queue) > _MOST_WAITING // 2 or self._waiting_bytes > _MOST_WAITING_BYTES // 2

    def put(self, row: RawRow) -> None:
        """Queue a call; never blocks. If the queue is full, drop the rest of the episode."""
        if self._is_closed:
            return
        size = len(row.result) if isinstance(row.result, bytes) else 256
        is_over = len(self._queue) >= _MOST_WAITING or self._waiting_bytes + size > _MOST_WAITING_BYTES
        if is_over and row.kind != "end":
            row.episode.summary.is_whole = False
            return
        self._waiting_bytes += size
        self._queue.append(row)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="openenv-episodes", daemon=True)
            self._thread.start()
        if self._is_idle:
            self._signal.set()

    def flush(self) -> bool:
        """Block until all queued rows are written; return False if that takes too long."""
        if self._thread is None or self._is_closed:
            return True
        mark = threading.Event()
        self._queue.append(mark)
        self._signal.set()
        return mark.wait(_FLUSH_S)

    def close(self) -> None:
        """Write the remaining rows, and end the thread."""
        self._is_closed = True
        self._signal.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            if not self._queue:
                if self._is_closed:
                    return
                self._is_idle = True
                if not self._queue:  # a row may have arrived before the flag was set
                    self._signal.wait()
                self._is_idle = False
                self._signal.clear()
                if not self._is_closed:
                    time.sleep(_GATHER_S)
            began = time.perf_counter()
            try:
                self._write_some()
            except Exception:  # the boundary of the thread: a row that cannot be written must not end it
                logger.exception("an episode cannot be recorded")
            if not self._is_closed and not self._wants_flush():
                time.sleep(min(_LONGEST_REST_S, _REST * (time.perf_counter() - began)))

    def _wants_flush(self) -> bool:
        return bool(self._queue) and isinstance(self._queue[-1], threading.Event)

    def _write_some(self) -> None:
        marks = []
        try:
            for _ in range(_BATCH):
                if not self._queue:
                    break
                row = self._queue.popleft()
                if isinstance(row, threading.Event):
                    marks.append(row)
                    continue
                self._waiting_bytes -= len(row.result) if isinstance(row.result, bytes) else 256
                try:
                    self._take(row)
                except Exception:
                    row.episode.summary.is_whole = False
                    logger.exception("episode %s: a row cannot be recorded", row.episode.summary.id)
            self._write_touched()
        finally:
            for mark in marks:
                mark.set()

    def _take(self, raw: RawRow) -> None:
        """Make a row of a call, and collect it for its file."""
        episode, summary = raw.episode, raw.episode.summary
        if raw.kind == "end":
            row: dict[str, Any] = {"kind": "end", "reason": summary.why or raw.argument, "at": raw.at}
            summary.add(row)
            row |= {"is_whole": summary.is_whole, "summary": summary.fields()}
        else:
            row = self._row(raw)
            summary.add(row)
            if raw.kind == "picture":
                episode.picture = row["html"]
            else:
                episode.last, episode.picture = row, None
        if not episode.is_kept or episode.is_lost or (episode.is_full and raw.kind != "end"):
            return
        episode.has_begun = episode.has_begun or raw.kind in ("step", "call") or "error" in row
        line = encode(row) + b"\n"
        if raw.kind != "end" and episode.size + len(line) > self._most_episode_bytes:
            episode.is_full, summary.is_whole = True, False
            logger.warning(
                "episode %s: recording stops at row %d, because the file would exceed %d bytes; the episode goes on",
                summary.id,
                raw.n,
                self._most_episode_bytes,
            )
            return
        episode.size += len(line)
        episode.lines.append(line)
        if episode.has_begun:
            self._touched[summary.id] = episode

    def _row(self, raw: RawRow) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": raw.kind, "n": raw.n, "at": raw.at, "ms": round(raw.ms, 3)}
        if raw.kind == "picture":
            return {"kind": "picture", "n": raw.n, "html": raw.result.html}
        argument: Any = None if raw.argument is None else decode(raw.argument)
        if raw.kind == "reset":
            row["arguments"] = argument
        elif raw.kind == "step":
            row |= _without_metadata(argument)
        else:
            row |= argument
        if raw.error is not None:
            row["error"] = self._error(raw.error)
        elif raw.kind == "call":
            row["result"] = raw.result.as_mcp() if isinstance(raw.result, ToolOutcome) else raw.result
        else:
            row |= observation_of(raw.result)
        return row

    def _error(self, error: BaseException) -> dict[str, Any]:
        if self._redacts and not isinstance(error, OpenEnvError):
            return {"type": "ExecutionError", "message": "The environment failed; the server's log has more."}
        described: dict[str, Any] = {"type": type(error).__name__, "message": message_of(error)}
        if not isinstance(error, SessionClosedError | RequestCancelled):
            text = "".join(traceback.format_exception(type(error), error, _authors_frames(error.__traceback__)))
            described["traceback"] = text[-_MOST_TRACEBACK:]
        return described

    def _write_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for episode_id, episode in touched.items():
            head = [] if episode.is_on_disk else [_head(episode.summary)]
            lines, episode.lines = b"".join((*head, *episode.lines)), []
            if self._failed_at is not None and self._now() - self._failed_at < _RETRY_S:
                episode.is_lost, episode.summary.is_whole = True, False
                continue
            try:
                self._files.append(episode_id, lines, is_first=not episode.is_on_disk)
                episode.is_on_disk = True
                self._failed_at = self.problem = None
            except FileNotFoundError:  # deleted meanwhile, because the folder is full of newer episodes
                episode.is_lost = True
            except OSError as exc:
                episode.is_lost, episode.summary.is_whole = True, False
                self._fail(exc)
        now = self._now()
        if touched and now - self._evicted_at > _EVICT_S:
            self._evicted_at = now
            try:
                self._files.evict(self._running(), now)
            except OSError as exc:
                self._fail(exc)

    def _fail(self, exc: OSError) -> None:
        text = f"Episodes cannot be written to {self._files.folder}: {exc.strerror or exc}"
        if self.problem is None:
            logger.warning("%s; the server goes on without", text)
        self.problem, self._failed_at = text, self._now()


def _head(summary: EpisodeSummary) -> bytes:
    """Write the first line of a file."""
    names = ("id", "env", "session", "opened_by", "host", "pid", "began_at")
    row = {"kind": "episode", "version": VERSION, **{name: getattr(summary, name) for name in names}}
    return encode(row) + b"\n"


def _authors_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skip our frames that lead to the environment's code, unless all frames are ours."""
    rest = frames
    while rest is not None and rest.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        rest = rest.tb_next
    return rest or frames


def opener_of(session: Session) -> str:
    """Return who opened a session, for the page."""
    name = "agent" if session.by_agent else _OPENERS.get(session.kind, session.kind.value)
    peer = getattr(session.holder, "peer", "")  # of the connection that holds it now
    return f"{name} at {peer}" if peer else name


def _row_kind(operation: Operation, argument: Any) -> Any:
    """Return the kind of row for a call; None if it is not recorded."""
    kind = operation.kind
    if kind in ("step", "reset", "restore"):
        return kind
    if kind == "tool":
        return "call" if isinstance(argument, ToolRequest) else None
    return "picture" if operation is RENDER else None


def _argument(argument: Any) -> bytes:
    """Encode the argument of a call."""
    match argument:
        case StepInput():
            value: Any = {"action": argument.action, "kwargs": dict(argument.kwargs)}
        case Move():
            value = {"action": argument.action}
        case ToolRequest():
            value = {"name": argument.name, "arguments": dict(argument.arguments)}
        case Mapping():
            value = dict(argument)
        case None:
            value = None
        case _:
            value = {"action": argument}
    try:
        return encode(value)
    except Exception:  # an action of an author's own class; the step itself has run
        return encode({"action": repr(argument)})


def _without_metadata(fields: Any) -> dict[str, Any]:
    """Return the fields of a step's row, without an action's empty metadata."""
    if "name" in fields and "action" not in fields:  # a tool call of an agent
        return {"action": {"type": "call_tool", "tool_name": fields["name"], "arguments": fields["arguments"]}}
    action = fields.get("action")
    if isinstance(action, dict) and not action.get("metadata", True):
        fields["action"] = {name: value for name, value in action.items() if name != "metadata"}
    return dict(fields)
