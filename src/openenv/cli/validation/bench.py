"""What the checks of a served environment work with: its address, its schemas, the plan, and episodes played so far.

Knows how to ask a server; must not judge what it answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from ...client.options import with_token
from ...errors import OpenEnvError, RequestValidationError, ServerError, SessionCapacityError, message_of
from .episodes import PLAN, Client, Door, Episode, NoPlan, Plan, make_plan, play, read_plan
from .manifest import Manifest
from .subject import NotServed, Subject

_T = TypeVar("_T")
_FREE_S = 5.0


class Fault(Exception):
    """A check has failed.

    Args:
        problems: What is wrong.
        mend: What to do about it.
    """

    def __init__(self, *problems: str, mend: str | None = None, measured: dict[str, Any] | None = None) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.mend = mend
        self.measured = measured or {}


class Skip(Exception):
    """A check cannot be done; the text says why."""


class Bench:
    """A served environment that is being checked.

    Args:
        door: Where sessions are opened.
        manifest: What the environment promises, where that is known.
        folder: Its package, where that is known.
        subject: The process that serves it, where it is ours.
    """

    def __init__(
        self,
        door: Door,
        *,
        manifest: Manifest | None = None,
        folder: Path | None = None,
        subject: Subject | None = None,
        http_timeout_s: float = 60.0,
    ) -> None:
        self.door = door
        self.manifest = manifest
        self.folder = folder
        self.subject = subject
        self.http_timeout_s = http_timeout_s
        self.slowest_s = 0.0
        self._made: dict[str, Any] = {}
        self._failed: dict[str, str] = {}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the server over HTTP and return what it answers as JSON.

        Raises:
            Fault: It does not answer, or with an error.
        """
        url = self.door.url.rstrip("/") + path
        headers = with_token(None, self.door.token)
        try:
            reply = httpx2.request(
                method, url, json=body, headers=headers, timeout=self.http_timeout_s, trust_env=False
            )
            reply.raise_for_status()
            return reply.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise Fault(f"{method} {path}: {message_of(error)}") from error

    def _once(self, what: str, make: Callable[[], _T]) -> _T:
        """Do something once for all checks; the first that needs it has its failure, later ones are skipped."""
        if what in self._failed:
            raise Skip(f"unmet dependency: {what} ({self._failed[what]})")
        if what not in self._made:
            try:
                self._made[what] = make()
            except Fault as fault:
                self._failed[what] = str(fault)
                raise
        made: _T = self._made[what]
        return made

    @property
    def schema(self) -> dict[str, Any]:
        """The schemas that the server publishes."""
        return self._once("schemas", self._read_schema)

    def _read_schema(self) -> dict[str, Any]:
        found = self.ask("GET", "/schema")
        if not isinstance(found, dict):
            raise Fault("GET /schema: no object")
        return found

    @property
    def plan(self) -> Plan:
        """The actions to check with: the package's own, or some that fit the schema.

        Raises:
            Skip: There are none.
        """
        return self._once("actions to check with", self._find_plan)

    def _find_plan(self) -> Plan:
        declared = self.manifest.execution if self.manifest is not None else None
        path = None if self.folder is None else self.folder / (declared.probe_path if declared else PLAN)
        try:
            if path is not None and (declared is not None or path.exists()):
                return read_plan(path)
            action = self.schema.get("action")
            return make_plan(action if isinstance(action, dict) else {})
        except NoPlan as error:
            raise Skip(str(error)) from error

    @contextlib.contextmanager
    def session(self) -> Iterator[Client]:
        """Open a session; what a server or an environment does wrong in it is a fault.

        Raises:
            Fault: It cannot be opened, or a call fails.
            Skip: All sessions are taken, or no action is known that fits.
        """
        try:
            with self._admitted() as env:
                yield env
        except SessionCapacityError as error:
            raise Skip(f"all sessions of the server are taken: {message_of(error)}") from error
        except RequestValidationError as error:
            if self.plan.is_made:
                text = f"an action that fits the schema was refused ({message_of(error)}); write {PLAN} with actions"
                raise Skip(text) from error
            raise Fault(f"a planned action was refused: {message_of(error)}", mend=f"correct {PLAN}") from error
        except OpenEnvError as error:
            mend = "return an observation for a bad move, and raise for a failure only"
            raise Fault(f"{type(error).__name__}: {message_of(error)}", mend=mend) from error

    def _admitted(self) -> Client:
        """Open a session; one that has just ended may hold its slot a little longer."""
        deadline = time.monotonic() + _FREE_S
        while True:
            env = self.door.open()
            try:
                env.connect()
                env.state()
            except SessionCapacityError:
                env.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            except ServerError:  # it has a session: what is wrong with its state is for another check
                return env
            except BaseException:
                env.close()
                raise
            else:
                return env

    @property
    def first(self) -> Episode:
        """The measured episode, with the state after each call."""
        return self._once("an episode", lambda: self.play(with_states=True))

    @property
    def again(self) -> Episode:
        """The same episode once more, in another session."""
        _ = self.first
        return self._once("a second episode", self.play)

    @property
    def elsewhere(self) -> Episode:
        """The same episode in another process, in which Python's sets have another order.

        Raises:
            Skip: There is no package to start one from.
        """
        _ = self.first
        return self._once("a second process", self._play_elsewhere)

    def _play_elsewhere(self) -> Episode:
        if self.folder is None:
            raise Skip("only a package can be started a second time")
        try:
            with Subject(self.folder, hash_seed=4711) as other:
                door = Door(other.url, self.door.token, self.door.reply_s)
                return Bench(door, manifest=self.manifest, folder=self.folder, subject=other).first
        except NotServed as error:
            raise Fault(f"a second server did not start: {last_line(str(error))}") from error

    def play(self, **options: Any) -> Episode:
        """Play an episode in a session of its own."""
        with self.session() as env:
            episode = play(env, self.plan, **options)
        self.slowest_s = max(self.slowest_s, episode.seconds)
        return episode


def last_line(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
