"""What the checks of a served environment work with: its address, its schemas, the plan, and episodes played so far.

Knows how to ask a server; must not judge what it answers.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...client.env_client import GenericEnvClient, SyncEnvClient
from ...client.options import with_token
from ...errors import OpenEnvError, RequestValidationError, ServerError, SessionCapacityError, message_of
from .json_schema import Unmakeable, make
from .manifest import Manifest
from .served_package import NotServed, Subject

# episodes: Episodes that are played for a check: the actions, and what came back. Knows clients; must not judge.


PLAN = "validation/runtime.json"
_LONGEST = 65536
_MADE_STEPS = 4
_TOOL_FIELDS = {"tool_name", "arguments"}
LIST_TOOLS = "list_tools"


class PlannedReset(BaseModel):
    """What the measured episode begins with."""

    model_config = ConfigDict(extra="forbid")
    episode_id: str = Field(default="validate", min_length=1, max_length=128)
    seed: int = Field(default=7, ge=0, le=2**32 - 1)
    options: dict[str, Any] = Field(default_factory=dict)


class Plan(BaseModel):
    """The actions of the measured episode, as a package gives them or as they are made from its schema."""

    model_config = ConfigDict(extra="forbid")
    plan_schema_version: Literal["1"] = "1"
    reset: PlannedReset = Field(default_factory=PlannedReset)
    actions: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=100)]
    _made: bool = False

    @property
    def is_made(self) -> bool:
        """Whether the actions are only made from the schema, so that a refusal says little."""
        return self._made


class NoPlan(Exception):
    """There are no actions to check with; the text says why and what to do."""


def read_plan(path: Path) -> Plan:
    """Read the plan of a package.

    Raises:
        NoPlan: It cannot be read, or it is none.
    """
    try:
        text = path.read_bytes()
        if len(text) > _LONGEST:
            raise NoPlan(f"{path.name} is longer than {_LONGEST} bytes")
        return Plan.model_validate_json(text)
    except OSError as error:
        raise NoPlan(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, one['loc'])) or path.name}: {one['msg']}" for one in error.errors()[:3])
        raise NoPlan(f"{path.name} is no plan: {where}") from error


def make_plan(schema: Mapping[str, Any]) -> Plan:
    """Make a plan from the schema of an environment's actions.

    Raises:
        NoPlan: No action can be made.
    """
    if has_tool_actions(schema):
        # Tools may be dear or do harm: without a plan they are listed, not called.
        plan = Plan(actions=[{"type": LIST_TOOLS}] * 2)
    else:
        try:
            plan = Plan(actions=[make(schema, variant) for variant in range(_MADE_STEPS)])
        except Unmakeable as error:
            raise NoPlan(f"no action can be made from the schema ({error}); write {PLAN} with actions") from error
        except ValidationError as error:
            raise NoPlan(f"actions are no objects; write {PLAN} with actions") from error
    plan._made = True
    return plan


def has_tool_actions(schema: Mapping[str, Any]) -> bool:
    """Say whether actions of this schema are calls of tools."""
    return set(schema.get("properties", {})) >= _TOOL_FIELDS


def is_tool_call(action: Mapping[str, Any] | None) -> bool:
    """Say whether an action calls a tool."""
    return action is not None and action.get("type") == "call_tool"


@dataclass(frozen=True, slots=True)
class Moment:
    """What came back from a reset or a step."""

    observation: dict[str, Any]
    reward: Any
    done: bool
    metadata: dict[str, Any]
    action: dict[str, Any] | None = None

    @property
    def whole(self) -> dict[str, Any]:
        """The observation as its schema describes it: with reward and end."""
        return {**self.observation, "reward": self.reward, "done": self.done}

    @property
    def core(self) -> dict[str, Any]:
        """What must be the same when an episode is repeated; metadata may tell the time of day."""
        return {name: value for name, value in self.whole.items() if name != "metadata"}

    def json(self) -> dict[str, Any]:
        """Return it as a line of a record."""
        return {"action": self.action, "observation": self.observation, "reward": self.reward, "done": self.done}


@dataclass(slots=True)
class Episode:
    """An episode that was played."""

    moments: list[Moment] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rewards(self) -> list[Any]:
        """The rewards of its steps."""
        return [moment.reward for moment in self.moments[1:]]

    def text(self) -> str:
        """Write the episode down, one moment per line."""
        return "\n".join(json.dumps(moment.json(), sort_keys=True, allow_nan=False) for moment in self.moments)


Client = SyncEnvClient[Any, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Door:
    """How sessions of a server are opened."""

    url: str
    token: str | None = None
    reply_s: float = 60.0

    def open(self) -> Client:
        """Return a client with a session of its own; a context manager."""
        client = GenericEnvClient(
            base_url=self.url,
            token=self.token,
            message_timeout_s=self.reply_s,
            connect_timeout_s=60.0,
            protocol="v1",
            mode="simulation",
        )
        return client.sync()


def reset(env: Client, plan: Plan, **changes: Any) -> Moment:
    """Begin an episode as planned, but for some changes."""
    given = {**plan.reset.options, "seed": plan.reset.seed, "episode_id": plan.reset.episode_id, **changes}
    return _moment(env.reset(**given))


def step(env: Client, action: dict[str, Any]) -> Moment:
    """Do a step."""
    return _moment(env.step(dict(action)), action)


def play(env: Client, plan: Plan, *, with_states: bool = False, **changes: Any) -> Episode:
    """Play an episode as planned, until it is done."""
    episode, started = Episode(), time.monotonic()
    episode.moments.append(reset(env, plan, **changes))
    if with_states:
        episode.states.append(env.state())
    for action in plan.actions:
        if episode.moments[-1].done:
            break
        episode.moments.append(step(env, action))
        if with_states:
            episode.states.append(env.state())
    episode.seconds = time.monotonic() - started
    return episode


def _moment(result: Any, action: dict[str, Any] | None = None) -> Moment:
    metadata = {**(result.observation.get("metadata") or {}), **(result.metadata or {})}
    return Moment(result.observation, result.reward, bool(result.done), metadata, action)


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
