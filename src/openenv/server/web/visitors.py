"""Visitors of the page: each one's session, the episode and its history, and the watchers of changes.

A cookie identifies a browser. Programs without a cookie share one visitor, as in the published package. Knows sessions;
must not know requests, sockets or environments.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from openenv.errors import RequestCancelled, SessionLost
from openenv.protocol.json_values import encode

from ..access import VISITOR_COOKIE
from ..sessions.events import SessionEvent
from ..sessions.lifetime import CLOSED, CLOSED_BY_CLIENT, SHUTTING_DOWN, UNKNOWN, WORKER_CRASHED, client_reason
from ..sessions.manager import SessionManager
from ..sessions.peers import boot_of
from ..sessions.session import Session, SessionKind
from .page_operations import EncodedObservation, Render, Theme

COOKIE = VISITOR_COOKIE
# Any program can send new cookies, so the number of visitors is bounded.
_MAX_VISITORS = 1000
_FORGOTTEN_AFTER_S = 3600.0
# An open page keeps its session from expiring, but only for this long after its last action: a forgotten tab must not
# hold a slot.
_KEPT_S = 300.0
_KEEP_PERIOD_S = 5.0
# Episodes of visitors that left stay readable for their return, until all of them together need more than this.
_MAX_ORPHANED_BYTES = 128 * 1024 * 1024
_STOPPED_WAITING = (
    "The page no longer waits. Coroutines and tools are interrupted; other code runs to its end, and the next action "
    "comes after it."
)
_T = TypeVar("_T")

Activity = Literal["none", "ready", "busy", "lost"]
MAX_ENTRIES: Final = 1000  # `MAX_ACTION_LOGS` of the contract
_MAX_BYTES: Final = 32 * 1024 * 1024  # of one history: an observation may hold an image


class ActionLog(BaseModel):
    """One action and its result; `step_count` includes it."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    timestamp: str
    action: dict[str, Any]
    observation: dict[str, Any]
    reward: float | None = None
    done: bool
    step_count: int


class EpisodeState(BaseModel):
    """The state of an episode with its newest actions; `is_reset` until the first step."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    episode_id: str | None = None
    step_count: int
    current_observation: dict[str, Any] | None = None
    action_logs: list[ActionLog] = []
    is_reset: bool = True


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An entry of the history, as JSON text without the closing brace: only the page gets the duration after it.

    Text, so that a step is encoded once for any number of watchers.
    """

    # {"timestamp":"2026-01-01T00:00:00Z","action":{"move":"up"},"observation":{"cell":3},"reward":1.0,"done":false,
    #  "step_count":1        <- `action_log` closes it here; `json` adds ,"duration_ms":0.4 first
    text: bytes
    duration_ms: float
    is_step: bool = True

    @classmethod
    def of_step(
        cls, timestamp: str, action: bytes, outcome: EncodedObservation, *, step_count: int, duration_ms: float
    ) -> HistoryEntry:
        """Make the entry of a step."""
        head = b'{"timestamp":' + encode(timestamp) + b',"action":' + action + b',"observation":' + outcome.observation
        return cls(head + outcome.tail + b',"step_count":' + str(step_count).encode(), duration_ms)

    @classmethod
    def of_call(cls, timestamp: str, fields: dict[str, Any], *, duration_ms: float) -> HistoryEntry:
        """Make the entry of a tool call."""
        return cls(encode({"timestamp": timestamp, **fields})[:-1], duration_ms, is_step=False)

    def json(self) -> bytes:
        """Return the entry for the page."""
        return self.text + b',"duration_ms":' + str(round(self.duration_ms, 1)).encode() + b"}"

    def action_log(self) -> bytes:
        """Return the entry as an `ActionLog`."""
        return self.text + b"}"


@dataclass(slots=True)
class VisitorEpisode:
    """An episode and its newest entries."""

    episode_id: str | None = None
    step_count: int = 0
    has_begun: bool = False
    seed: Any = None
    last: EncodedObservation | None = None
    render: bytes = field(default_factory=lambda: Render().json())
    entries: deque[HistoryEntry] = field(default_factory=deque)
    _bytes: int = 0

    def add(self, entry: HistoryEntry) -> None:
        """Append an entry; drops the oldest when there are too many, or too many bytes."""
        self.entries.append(entry)
        self._bytes += len(entry.text)
        while len(self.entries) > MAX_ENTRIES or (self._bytes > _MAX_BYTES and len(self.entries) > 1):
            self._bytes -= len(self.entries.popleft().text)

    @property
    def size(self) -> int:
        """Its size in memory, in bytes."""
        return self._bytes + len(self.render) + (0 if self.last is None else len(self.last.observation))

    def json(self) -> bytes:
        """Return the episode's state, for the page."""
        outcome = self.last or EncodedObservation(b"null", b"null", None, False)
        # To the page `is_reset` says that there is an episode; in the contract's frame (`state`), that it has no step.
        names = {"episode_id": self.episode_id, "step_count": self.step_count, "seed": self.seed}
        head = encode({**names, "is_reset": self.has_begun})
        return head[:-1] + b',"current_observation":' + outcome.observation + outcome.tail + b"}"

    def log(self) -> bytes:
        """Return the history, for the page."""
        return b"[" + b",".join(entry.json() for entry in self.entries) + b"]"

    def state(self) -> bytes:
        """Return the episode as an `EpisodeState`."""
        steps = [entry.action_log() for entry in self.entries if entry.is_step]
        observation = b"null" if self.last is None else self.last.observation
        head = encode({"episode_id": self.episode_id, "step_count": self.step_count})[:-1]
        logs = b'"action_logs":[' + b",".join(steps) + b"]"
        is_reset = b"false" if steps else b"true"
        return head + b',"current_observation":' + observation + b"," + logs + b',"is_reset":' + is_reset + b"}"


class Watcher(Protocol):
    """Watches a visitor's episode. Called on the loop; must not block."""

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Receive a frame; `is_state` is true if the episode has changed with it."""
        ...

    def shut_down(self, reason: str) -> None:
        """Handle the end of the server: no more frames follow."""
        ...


class Visitor:
    """One visitor, with a session and the episode in it.

        none -- enter --> ready <-- one action at a time --> busy
         ^                  |
         | end              | the session expires, gives its slot away, or an operator ends it: `lose`
         +------------------+--> lost -- reset: enter(renew=True) --> ready, in a new session

    The session is soft: it counts, and is the first to give its slot to a session that needs one. While `lost`, steps,
    calls and states raise `SessionLost` with the reason. Only a reset opens a new session, so that a visitor never
    continues in a fresh environment unawares.
    """

    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors
        self.session: Session | None = None
        self.lost: str | None = None  # why the last session ended, until a reset or `end`
        # Done at the end of the session: one future per wait in `unless_gone`, because each may be on another loop.
        self._gone: set[asyncio.Future[None]] = set()
        self._cancelled = asyncio.Event()  # set by `cancel`; ends the wait for the running work
        self.episode = VisitorEpisode()  # outlives its session, so that the page can still show it
        self.watchers: set[Watcher] = set()
        self.turn = asyncio.Lock()  # two tabs share the visitor: their actions run one after the other
        self.busy = 0
        self.theme: Theme = "light"  # the colours of its page
        self.n = 0  # the number of the last frame; a page that misses one loads the whole state again
        self.used_at = visitors.clock()

    # -- the session ----------------------------------------------------------------------------------------------

    @property
    def activity(self) -> Activity:
        """The session's state."""
        if self.busy:
            return "busy"
        if self.lost is not None:
            return "lost"
        return "none" if self.session is None else "ready"

    @property
    def unused_s(self) -> float:
        """Seconds since the visitor's last action."""
        return self._visitors.clock() - self.used_at

    def touch(self) -> None:
        """Record that the visitor acts now."""
        self.used_at = self._visitors.clock()

    async def enter(self, *, renew: bool) -> Session:
        """Return the visitor's session, or open one. The caller holds `turn`.

        Args:
            renew: Whether a lost session may be replaced.

        Raises:
            SessionLost: The session was lost, and may not be replaced.
            SessionCapacityError: All slots are in use.
            EnvironmentFactoryError: The constructor raised.
        """
        self.touch()
        session = self.session
        if session is not None and not session.is_ending:
            return session
        if session is not None:  # it ended, and the event that says so has not reached this loop yet
            self.lose(client_reason(session.close_reason))
        if self.lost is not None and not renew:
            raise SessionLost(self.lost)
        session = await self._open()
        self.session, self.lost = session, None
        self.episode = VisitorEpisode()
        return session

    async def _open(self) -> Session:
        reserved: list[Session] = []

        def note(session: Session) -> None:  # a constructor may hang, and an operator end its session
            reserved.append(session)
            self._visitors.by_session[session.id] = self
            self._visitors.on_session(session)

        try:
            return await self.unless_gone(self._visitors.manager.open(SessionKind.SOFT, on_reserved=note))
        except BaseException:
            for session in reserved:
                self._visitors.by_session.pop(session.id, None)
            raise

    async def unless_gone(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for work in the session, but not beyond the session's end: environment code may hang forever.

        Raises:
            SessionLost: The session ended first.
            RequestCancelled: The visitor has cancelled the wait.
        """
        self._cancelled = asyncio.Event()  # of this loop, and of this work
        running = asyncio.ensure_future(work)
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gone.add(gone)
        cancelled = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait((running, gone, cancelled), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if gone.done():
                raise SessionLost(self.lost or CLOSED)
            raise RequestCancelled(_STOPPED_WAITING)
        finally:
            running.cancel()  # code in the session's lane that cannot be interrupted runs on until it returns
            self._gone.discard(gone)
            cancelled.cancel()

    def cancel(self) -> bool:
        """Stop waiting for the running work, and interrupt it if possible; return whether any work ran."""
        self._cancelled.set()
        return self.busy > 0

    def end(self) -> bool:
        """End the session on its visitor's request; return whether the visitor had a session."""
        session = self._release()  # before the close: its event must find no visitor to report a loss to
        self.lost = None
        self.episode = VisitorEpisode()
        if session is not None:
            session.close(CLOSED_BY_CLIENT)
        self.publish_activity()
        return session is not None

    def lose(self, reason: str) -> None:
        """Record that the session has ended without its visitor's request."""
        self._release()
        self.lost = reason
        self.publish_activity()

    def _release(self) -> Session | None:
        session, self.session = self.session, None
        for gone in self._gone:
            if not gone.done():
                gone.set_result(None)
        if session is not None:
            self._visitors.by_session.pop(session.id, None)
        return session

    # -- frames for watchers --------------------------------------------------------------------------------------

    def publish_activity(self) -> None:
        """Publish the state of the session."""
        self._publish(encode({"type": "session", "state": self.activity, "reason": self.lost}))

    def publish_error(self, detail: str, code: str) -> None:
        """Publish a failure."""
        self._publish(encode({"type": "error", "detail": detail, "code": code}))

    def publish_event(self, data: dict[str, object], timestamp: str) -> None:
        """Publish a progress or log message of a running step."""
        self._publish(encode({"type": "event", "data": data, "timestamp": timestamp}))

    def begin(self, outcome: EncodedObservation, render: Render, episode_id: str | None, *, seed: Any = None) -> None:
        """Begin an episode, and publish it."""
        self.episode = VisitorEpisode(episode_id, has_begun=True, seed=seed, last=outcome, render=render.json())
        head = encode({"type": "reset", "episode_id": episode_id, "seed": seed})[:-1]
        self._publish(
            head + b',"observation":' + outcome.observation + outcome.tail + b',"render":' + self.episode.render + b"}",
            is_state=True,
        )

    def stepped(
        self,
        entry: HistoryEntry,
        outcome: EncodedObservation,
        render: Render,
        *,
        episode_id: str | None,
        step_count: int,
    ) -> None:
        """Add a step."""
        episode = self.episode
        episode.episode_id, episode.step_count = episode_id, step_count
        episode.last, episode.render = outcome, render.json()
        episode.add(entry)
        self._publish(b'{"type":"step","entry":' + entry.json() + b',"render":' + episode.render + b"}", is_state=True)

    def called(self, entry: HistoryEntry) -> None:
        """Add the call of a tool."""
        self.episode.add(entry)
        self._publish(b'{"type":"call","entry":' + entry.json() + b"}")

    def snapshot(self) -> bytes:
        """Return the whole state, for a new watcher."""
        episode = self.episode
        session = encode({"state": self.activity, "reason": self.lost})
        parts = (
            b'{"type":"hello","n":',
            str(self.n).encode(),
            b',"episode":',
            episode.json(),
            b',"log":',
            episode.log(),
        )
        return b"".join((*parts, b',"render":', episode.render, b',"session":', session, b"}"))

    def state_update(self) -> bytes:
        """Return the contract's frame: the whole episode."""
        return b'{"type":"state_update","episode_state":' + self.episode.state() + b"}"

    def _publish(self, frame: bytes, *, is_state: bool = False) -> None:
        # Frames are JSON objects; the number goes before the closing brace: {"type":"error",...,"n":7}
        self.n += 1
        frame = frame[:-1] + b',"n":' + str(self.n).encode() + b"}"
        for watcher in tuple(self.watchers):  # a copy: a watcher with a broken socket removes itself
            watcher.changed(self, frame, is_state=is_state)


class Visitors:
    """All visitors of one server; `by_session` maps the ids of open sessions to visitors.

    Args:
        manager: Its sessions.
        clock: A steady clock.
        on_session: Called with each new session of a visitor, before its environment is built.
    """

    def __init__(
        self,
        manager: SessionManager,
        clock: Callable[[], float] = time.monotonic,
        on_session: Callable[[Session], object] = lambda session: None,
    ) -> None:
        self.manager = manager
        self.clock = clock
        self.on_session = on_session
        self._known: OrderedDict[bytes, Visitor] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.by_session: dict[str, Visitor] = {}
        self._moves = 0  # of the place of the shared visitor, as its last request has seen them
        self.shared = Visitor(self)  # of programs without a cookie: in the contract, all clients share one episode
        manager.listeners.append(self._on_event)

    def new_key(self) -> str:
        """Make the value of a new browser's cookie."""
        return self.manager.peers.mark(secrets.token_urlsafe(24))

    def of(self, key: str | None) -> Visitor:
        """Return the visitor of a cookie, or a new one; without a cookie, return the shared visitor."""
        self._wake()
        if key is None:
            self._follow_moves()
            return self.shared
        digest = _digest(key)
        visitor = self._known.get(digest)
        if visitor is None:
            self._forget()
            visitor = self._known[digest] = Visitor(self)
        self._known.move_to_end(digest)
        return visitor

    def _follow_moves(self) -> None:
        """Lose the shared visitor's session if another process has answered for it since, and has hung or ended.

        That process had the episode. Here a step would go on in an older one, or begin a fresh one unnoticed.
        """
        moves = self.manager.peers.shared_moves
        if moves != self._moves:
            self._moves = moves
            session = self.shared.session
            self.shared.lose(client_reason(WORKER_CRASHED))
            if session is not None:
                session.close(WORKER_CRASHED)

    def rename(self, key: str) -> str | None:
        """Return a new key for a visitor whose process is gone; None if its key names this process.

        Requests with the old key could reach another process each time.
        """
        peers = self.manager.peers
        if boot_of(key) in (None, peers.boot) and peers.absence(key) is None:
            return None
        new_key = self.new_key()
        self._known[_digest(new_key)] = self.of(key)  # the page's open socket still uses the old one
        return new_key

    def find(self, key: str | None) -> Visitor:
        """Return the visitor of a cookie that continues an episode.

        The visitor of an unknown cookie has lost its session: the server may have restarted since.
        """
        if key is None or _digest(key) in self._known:
            return self.of(key)
        # Do not store it: a request with an invented cookie must not use memory.
        unknown = Visitor(self)
        absence = self.manager.peers.absence(key)
        unknown.lost = absence.reason if isinstance(absence, SessionLost) else UNKNOWN
        return unknown

    def all(self) -> list[Visitor]:
        """List all visitors."""
        return [self.shared, *self._known.values()]

    def _forget(self) -> None:
        """Drop visitors without a page, an action or, unless long unused, a session; least recently used first."""
        for digest, visitor in list(self._known.items()):
            # Ordered by last use: behind the first that is neither old nor too many, all others are younger.
            is_old = visitor.unused_s > _FORGOTTEN_AFTER_S
            if not (is_old or len(self._known) >= _MAX_VISITORS):
                return
            if not visitor.watchers and not visitor.busy and (is_old or visitor.session is None):
                del self._known[digest]
                visitor.end()

    # -- on the loop ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Remember the loop of the requests, and start the timer of `_keep` there."""
        # Not in the constructor: applications are built before a loop runs, and may be started more than once.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(_KEEP_PERIOD_S, self._keep)

    def _keep(self) -> None:
        """Keep sessions from expiring while their page is open and in use."""
        assert self._loop is not None
        for visitor in self.all():
            session = visitor.session
            if session is not None and session.is_ending:
                visitor.lose(client_reason(session.close_reason))
            elif session is not None and visitor.watchers and session.is_idle and visitor.unused_s < _KEPT_S:
                session.touch()
        self._tidy()
        self._timer = self._loop.call_later(_KEEP_PERIOD_S, self._keep)

    def _tidy(self) -> None:
        """Free the episodes of visitors that left, except the newest."""
        orphaned = 0
        for visitor in reversed(self._known.values()):
            if visitor.session is None and not visitor.watchers:
                orphaned += visitor.episode.size
                if orphaned > _MAX_ORPHANED_BYTES:
                    visitor.episode = VisitorEpisode()

    def _on_event(self, event: SessionEvent) -> None:
        """Handle the end of a session, on any thread."""
        # Most sessions belong to no visitor; for those, nothing is scheduled on the loop.
        loop = self._loop
        is_over = event.name in ("closed", "abandoned")
        if is_over and event.session_id in self.by_session and loop is not None:
            try:
                loop.call_soon_threadsafe(self._ended, event)
            except RuntimeError:  # the loop is closed
                return

    def _ended(self, event: SessionEvent) -> None:
        visitor = self.by_session.get(event.session_id)
        if visitor is not None:
            visitor.lose(client_reason(event.reason))

    def shut_down(self) -> None:
        """Drop all visitors and close their watchers, since the server stops."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None
        for visitor in self.all():
            if visitor.session is not None:
                visitor.lose(SHUTTING_DOWN)
            for watcher in tuple(visitor.watchers):
                watcher.shut_down(SHUTTING_DOWN)
        self._known.clear()
        self.shared = Visitor(self)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
