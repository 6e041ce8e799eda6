"""Calls that are watched: when each was asked for, began, ended and was answered, and what surrounds its run.

A session makes its calls with whatever factory it is given; while nobody watches, that is the plain class, and none of
this is there. Knows sessions' calls; must not know what is made of the times.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from functools import partial
from time import perf_counter
from typing import Any

from ..runners import Dispatcher
from ..sessions.events import RequestOrigin
from ..sessions.manager import SessionManager
from ..sessions.operations import Operation
from ..sessions.session import Done, Session, SessionCall
from .prometheus import Histograms

Surrounding = Callable[["WatchedCall"], AbstractContextManager[None]]
PHASES = ("wait", "run", "reply")
CURRENT: ContextVar[WatchedCall | None] = ContextVar("openenv_call", default=None)


class CallWatch:
    """What is done about each call of a manager's sessions; nothing until somebody asks for it."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._is_on = False
        self.times = _Times()
        self.names_calls = False
        self.surroundings: tuple[Surrounding, ...] = ()

    def begin(self) -> None:
        """Time each call from now on, in a histogram for each phase, by kind of call."""
        if not self._is_on:
            self._is_on = True
            self._manager.make_calls_with(partial(WatchedCall, self), observe_step=self._observe_step)

    def _observe_step(self, wait_s: float, run_s: float, reply_s: float) -> None:
        self.times["step"].observe(wait_s, run_s, reply_s)

    def name_calls(self) -> None:
        """Let `CURRENT` be the call that runs or is answered, from now on."""
        self.names_calls = self._is_on = True
        self._manager.make_calls_with(partial(WatchedCall, self), with_origins=True)

    def surround(self, surrounding: Surrounding) -> None:
        """Run each call inside a context of its own from now on."""
        self.surroundings += (surrounding,)
        self.name_calls()


class _Times(dict[str, Histograms]):
    """The times of calls, by kind; a kind that is new gets its histograms."""

    def __missing__(self, kind: str) -> Histograms:
        return self.setdefault(kind, Histograms(len(PHASES)))


class WatchedCall(SessionCall):
    """A call that notes its times. The plain methods are called by name: `super()` costs more than they do."""

    __slots__ = ("_inside", "_watch", "asked", "began", "ended")

    def __init__(
        self,
        watch: CallWatch,
        session: Session,
        operation: Operation,
        argument: Any,
        done: Done,
        hub: Dispatcher,
        origin: RequestOrigin | None = None,
    ) -> None:
        SessionCall.__init__(self, session, operation, argument, done, hub, origin)
        self._watch = watch
        self._inside: ExitStack | None = None
        self.began = 0.0
        self.asked = perf_counter()

    @property
    def session_id(self) -> str:
        """Whose call it is."""
        return self._session.id

    def run(self) -> None:
        """Do the work, in the lane."""
        self.began = perf_counter()
        if self._watch.names_calls:
            self._enter()
        SessionCall.run(self)

    async def _run_in_loop(self) -> None:
        self.began = perf_counter()
        if self._watch.names_calls:
            self._enter()
        await SessionCall._run_in_loop(self)

    def _enter(self) -> None:
        self._inside = stack = ExitStack()
        stack.callback(CURRENT.reset, CURRENT.set(self))
        for surrounding in self._watch.surroundings:
            stack.enter_context(surrounding(self))

    def settle(self, error: BaseException | None = None) -> None:
        """Tell the requester, on its own loop."""
        self.ended = perf_counter()
        if self._inside is not None:
            # Before anything is handed on: other calls' answers may follow in the context in which this one's is.
            inside, self._inside = self._inside, None
            inside.close()
        SessionCall.settle(self, error)

    def deliver(self) -> None:
        """Hand the outcome over."""
        if self._watch.names_calls:
            token = CURRENT.set(self)
            try:
                self._done(self.result, self.error)
            finally:
                CURRENT.reset(token)
        else:
            self._done(self.result, self.error)
        began, ended = self.began, self.ended
        if began:  # else it was refused before its turn
            self._watch.times[self.kind].observe(began - self.asked, ended - began, perf_counter() - ended)
