"""Visitors of the page: whose session is whose, what each has seen of it, and who is told of changes.

A browser is known by a cookie; programs without one are all the same visitor, as in the contract. A visitor's session
is a soft one: counted, and the first to go when somebody else needs its slot. One that is gone is remembered with the
reason, and never replaced in silence. Knows sessions; must not know requests, sockets or environments.
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

from ..errors import SessionLost
from ..protocol.json_values import encode
from ..sessions.events import SessionEvent
from ..sessions.lifetime import CLOSED, CLOSED_BY_CLIENT, SHUTTING_DOWN, UNKNOWN, client_reason
from ..sessions.manager import SessionManager
from ..sessions.session import Session, SessionKind
from .page_operations import EncodedObservation, Render

# episode: The episode that a visitor plays: where it stands, and its newest actions, as custom pages and frames show them.
#
# Entries are kept as JSON text, so that a step is encoded once however many look on. Knows shapes; must not know
# sessions, sockets or environments.


MAX_ENTRIES: Final = 1000
_MAX_BYTES: Final = 32 * 1024 * 1024


class ActionLog(BaseModel):
    """One action and what it led to.

    Args:
        timestamp: When it was taken.
        action: Its fields.
        observation: What was observed after it.
        reward: What it earned.
        done: Whether it ended the episode.
        step_count: The episode's steps with it.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    timestamp: str
    action: dict[str, Any]
    observation: dict[str, Any]
    reward: float | None = None
    done: bool
    step_count: int


class EpisodeState(BaseModel):
    """Where an episode stands.

    Args:
        episode_id: Its name, if it has one.
        step_count: Steps taken.
        current_observation: The last observation.
        action_logs: The newest actions.
        is_reset: Whether no step was taken since the last reset.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    episode_id: str | None = None
    step_count: int
    current_observation: dict[str, Any] | None = None
    action_logs: list[ActionLog] = []
    is_reset: bool = True


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An entry of the log, without its closing brace: how long it took is for the page only."""

    text: bytes
    duration_ms: float
    is_step: bool = True

    @classmethod
    def of_step(
        cls, timestamp: str, action: bytes, outcome: EncodedObservation, *, step_count: int, duration_ms: float
    ) -> HistoryEntry:
        """Write down a step."""
        head = b'{"timestamp":' + encode(timestamp) + b',"action":' + action + b',"observation":' + outcome.observation
        return cls(head + outcome.tail + b',"step_count":' + str(step_count).encode(), duration_ms)

    @classmethod
    def of_call(cls, timestamp: str, fields: dict[str, Any], *, duration_ms: float) -> HistoryEntry:
        """Write down the call of a tool."""
        return cls(encode({"timestamp": timestamp, **fields})[:-1], duration_ms, is_step=False)

    def json(self) -> bytes:
        """Return it as the page reads it."""
        return self.text + b',"duration_ms":' + str(round(self.duration_ms, 1)).encode() + b"}"

    def action_log(self) -> bytes:
        """Return it as an `ActionLog`."""
        return self.text + b"}"


@dataclass(slots=True)
class VisitorEpisode:
    """An episode and its log, which holds the newest entries only."""

    episode_id: str | None = None
    step_count: int = 0
    has_begun: bool = False
    last: EncodedObservation | None = None
    render: bytes = field(default_factory=lambda: Render().json())
    entries: deque[HistoryEntry] = field(default_factory=deque)
    _bytes: int = 0

    def add(self, entry: HistoryEntry) -> None:
        """Append an entry; the oldest go when there are too many, or too much."""
        self.entries.append(entry)
        self._bytes += len(entry.text)
        while len(self.entries) > MAX_ENTRIES or (self._bytes > _MAX_BYTES and len(self.entries) > 1):
            self._bytes -= len(self.entries.popleft().text)

    @property
    def size(self) -> int:
        """How much of it is kept, in bytes."""
        return self._bytes + len(self.render) + (0 if self.last is None else len(self.last.observation))

    def json(self) -> bytes:
        """Return where it stands, for the page."""
        outcome = self.last or EncodedObservation(b"null", b"null", None, False)
        head = encode({"episode_id": self.episode_id, "step_count": self.step_count, "is_reset": self.has_begun})
        return head[:-1] + b',"current_observation":' + outcome.observation + outcome.tail + b"}"

    def log(self) -> bytes:
        """Return the entries, for the page."""
        return b"[" + b",".join(entry.json() for entry in self.entries) + b"]"

    def state(self) -> bytes:
        """Return it as an `EpisodeState`."""
        steps = [entry.action_log() for entry in self.entries if entry.is_step]
        observation = b"null" if self.last is None else self.last.observation
        head = encode({"episode_id": self.episode_id, "step_count": self.step_count})[:-1]
        logs = b'"action_logs":[' + b",".join(steps) + b"]"
        is_reset = b"false" if steps else b"true"
        return head + b',"current_observation":' + observation + b"," + logs + b',"is_reset":' + is_reset + b"}"


COOKIE = "openenv_visitor"
_MOST = 1000
_FORGOTTEN_AFTER_S = 3600.0
_KEPT_S = 300.0
_KEEP_PERIOD_S = 5.0
_MOST_LEFT_BEHIND = 128 * 1024 * 1024
_T = TypeVar("_T")

Activity = Literal["none", "ready", "busy", "lost"]


def new_key() -> str:
    """Make up what a browser is known by."""
    return secrets.token_urlsafe(24)


class Watcher(Protocol):
    """Somebody who looks on; called on the loop, and not to be waited for."""

    def changed(self, visitor: Visitor, frame: bytes, *, is_state: bool) -> None:
        """Take a frame; `is_state` says whether the episode has changed with it."""
        ...

    def leave(self, reason: str) -> None:
        """Nothing more will come."""
        ...


class Visitor:
    """One visitor, and the episode that is played.

    Args:
        manager: Opens the session.
        players: Who plays in which session, by its id.
        clock: Tells how long ago something was.
    """

    def __init__(
        self,
        manager: SessionManager,
        players: dict[str, Visitor],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._players = players
        self._clock = clock
        self.session: Session | None = None
        self.lost: str | None = None
        self._gone = asyncio.Event()
        self.episode = VisitorEpisode()
        self.watchers: set[Watcher] = set()
        self.turn = asyncio.Lock()
        self.busy = 0
        self.n = 0
        self.used_at = clock()

    # -- the session ----------------------------------------------------------------------------------------------

    @property
    def activity(self) -> Activity:
        """What the session is doing."""
        if self.busy:
            return "busy"
        if self.lost is not None:
            return "lost"
        return "none" if self.session is None else "ready"

    @property
    def unused_s(self) -> float:
        """Seconds since the visitor has done something."""
        return self._clock() - self.used_at

    def touch(self) -> None:
        """Note that the visitor does something."""
        self.used_at = self._clock()

    async def enter(self, *, anew: bool) -> Session:
        """Return the visitor's session, opened if there is none. The caller has the visitor's turn.

        Args:
            anew: Whether a session that was lost may be replaced.

        Raises:
            SessionLost: It was, and may not.
            SessionCapacityError: There is no free slot.
            EnvironmentFactoryError: The constructor raised.
        """
        self.touch()
        session = self.session
        if session is not None and not session.is_ending:
            return session
        if session is not None:
            self.lose(client_reason(session.close_reason))
        if self.lost is not None and not anew:
            raise SessionLost(self.lost)
        session = await self._open()
        self.session, self.lost = session, None
        self.episode = VisitorEpisode()
        return session

    async def _open(self) -> Session:
        reserved: list[Session] = []

        def note(session: Session) -> None:  # its constructor may hang, and somebody end it
            reserved.append(session)
            self._players[session.id] = self

        self._gone = asyncio.Event()
        try:
            session = await self.unless_gone(self._manager.open(SessionKind.SOFT, on_reserved=note))
        except BaseException:
            for session in reserved:
                self._players.pop(session.id, None)
            raise
        self._gone = asyncio.Event()  # the first may belong to a loop that ends with the opening
        return session

    async def unless_gone(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for something in the session, but not beyond the session's end: whatever hangs there may hang for ever.

        Raises:
            SessionLost: The session has ended first.
        """
        running, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise SessionLost(self.lost or CLOSED)
            return running.result()
        finally:
            running.cancel()
            gone.cancel()

    def end(self) -> bool:
        """End the session, as its visitor wishes; say whether there was one."""
        session = self._let_go()
        self.lost = None
        self.episode = VisitorEpisode()
        if session is not None:
            session.close(CLOSED_BY_CLIENT)
        self.tell_activity()
        return session is not None

    def lose(self, reason: str) -> None:
        """Take note that the session has ended, and not because its visitor wished it."""
        self._let_go()
        self.lost = reason
        self.tell_activity()

    def _let_go(self) -> Session | None:
        session, self.session = self.session, None
        self._gone.set()
        if session is not None:
            self._players.pop(session.id, None)
        return session

    # -- telling --------------------------------------------------------------------------------------------------

    def tell_activity(self) -> None:
        """Tell what the session is doing."""
        self._tell(encode({"type": "session", "state": self.activity, "reason": self.lost}))

    def tell_error(self, detail: str, code: str) -> None:
        """Tell that something failed."""
        self._tell(encode({"type": "error", "detail": detail, "code": code}))

    def tell_event(self, data: dict[str, object], timestamp: str) -> None:
        """Tell what the environment says while a step runs."""
        self._tell(encode({"type": "event", "data": data, "timestamp": timestamp}))

    def begin(self, outcome: EncodedObservation, render: Render, episode_id: str | None) -> None:
        """Begin an episode."""
        self.episode = VisitorEpisode(episode_id, has_begun=True, last=outcome, render=render.json())
        head = b'{"type":"reset","episode_id":' + encode(episode_id) + b',"observation":' + outcome.observation
        self._tell(head + outcome.tail + b',"render":' + self.episode.render + b"}", is_state=True)

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
        self._tell(b'{"type":"step","entry":' + entry.json() + b',"render":' + episode.render + b"}", is_state=True)

    def called(self, entry: HistoryEntry) -> None:
        """Add the call of a tool."""
        self.episode.add(entry)
        self._tell(b'{"type":"call","entry":' + entry.json() + b"}")

    def hello(self) -> bytes:
        """Return all that there is to see, for somebody who begins to look on."""
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
        """Return the contract's frame: the whole of the episode."""
        return b'{"type":"state_update","episode_state":' + self.episode.state() + b"}"

    def _tell(self, frame: bytes, *, is_state: bool = False) -> None:
        self.n += 1
        frame = frame[:-1] + b',"n":' + str(self.n).encode() + b"}"
        for watcher in tuple(self.watchers):
            watcher.changed(self, frame, is_state=is_state)


class Visitors:
    """All visitors of one server.

    Args:
        manager: The server's sessions.
        clock: Tells how long ago something was.
    """

    def __init__(self, manager: SessionManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = manager
        self._clock = clock
        self._known: OrderedDict[bytes, Visitor] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._players: dict[str, Visitor] = {}
        self.shared = self._new()
        manager.listeners.append(self._heard)

    def of(self, key: str | None) -> Visitor:
        """Return the visitor with a cookie's value; None is whoever has no cookie."""
        self._wake()
        if key is None:
            return self.shared
        digest = _digest(key)
        visitor = self._known.get(digest)
        if visitor is None:
            self._forget()
            visitor = self._known[digest] = self._new()
        self._known.move_to_end(digest)
        return visitor

    def find(self, key: str | None) -> Visitor:
        """Return the same, for somebody who goes on; whoever is not known has lost what there was, if anything."""
        digest = None if key is None else _digest(key)
        if digest is None or digest in self._known:
            return self.of(key)
        stranger = self._new()
        stranger.lost = UNKNOWN
        return stranger

    def _new(self) -> Visitor:
        return Visitor(self._manager, self._players, self._clock)

    def player(self, session_id: str) -> Visitor | None:
        """Return who plays in a session."""
        return self._players.get(session_id)

    def all(self) -> list[Visitor]:
        """List them."""
        return [self.shared, *self._known.values()]

    def _forget(self) -> None:
        """Make room: those who have left come first, then those who were not heard of for longest. Players stay."""
        for digest, visitor in list(self._known.items()):
            is_over = visitor.unused_s > _FORGOTTEN_AFTER_S
            if not (is_over or len(self._known) >= _MOST):
                return
            if not visitor.watchers and not visitor.busy and (is_over or visitor.session is None):
                del self._known[digest]
                visitor.end()

    # -- on the loop ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Remember the loop that visitors come on, and look after them there."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(_KEEP_PERIOD_S, self._keep)

    def _keep(self) -> None:
        """Keep the sessions of those who have the page open and have not gone away from it."""
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
        """Throw away what visitors have left behind, but for the newest."""
        left = 0
        for visitor in reversed(self._known.values()):
            if visitor.session is None and not visitor.watchers:
                left += visitor.episode.size
                if left > _MOST_LEFT_BEHIND:
                    visitor.episode = VisitorEpisode()

    def _heard(self, event: SessionEvent) -> None:
        """A session has ended; told from any thread."""
        loop = self._loop
        if event.name == "closed" and event.session_id in self._players and loop is not None:
            try:
                loop.call_soon_threadsafe(self._ended, event)
            except RuntimeError:  # the loop is closed
                return

    def _ended(self, event: SessionEvent) -> None:
        visitor = self._players.get(event.session_id)
        if visitor is not None:
            visitor.lose(client_reason(event.reason))

    def leave(self) -> None:
        """Forget everybody, since the server stops; those who look on are told."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None
        for visitor in self.all():
            if visitor.session is not None:
                visitor.lose(SHUTTING_DOWN)
            for watcher in tuple(visitor.watchers):
                watcher.leave(SHUTTING_DOWN)
        self._known.clear()
        self.shared = self._new()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
