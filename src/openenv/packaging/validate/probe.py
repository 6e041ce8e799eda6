"""Episodes played against a served environment for its checks: the plan of actions, and a `Probe` that plays it.

A probe asks and records; it must not judge. Whatever several checks need (the schemas, the plan, the first episode, the
same episode in a second process) is made once, and its failure is reported once.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from pydantic import ValidationError

from openenv.client.env_client import GenericEnvClient, SyncEnvClient
from openenv.client.network import ProtocolChoice, with_token
from openenv.errors import OpenEnvError, RequestValidationError, ServerError, SessionCapacityError, message_of
from openenv.protocol.schema import Unmakeable

from .json_schema import make
from .manifest import NormalizedManifest, NormalizedManifestV2
from .recording import RuntimePlan, RuntimePlanError, read_runtime_plan
from .report import UNMET
from .rules import CheckFailed, CheckNotApplicable, CheckSkipped
from .served_package import NotServed, PackageServer

PLAN = "validation/runtime.json"
# A fixed ID and seed: repeated episodes must be able to be equal.
_RESET = {"episode_id": "validate", "seed": 7}
# A few different actions. More would cost time and seldom show more.
_GENERATED_STEPS = 4
_TOOL_FIELDS = {"tool_name", "arguments"}
LIST_TOOLS = "list_tools"


def read_plan(path: Path) -> RuntimePlan:
    """Read the plan of a package; it may leave out everything but its actions.

    Raises:
        CheckSkipped: It cannot be read, or it is invalid.
    """
    try:
        return read_runtime_plan(path, {"plan_schema_version": "1", "reset": _RESET})
    except RuntimePlanError as error:
        raise CheckSkipped(str(error)) from error


def _plan_of(actions: list[Any]) -> RuntimePlan:
    return RuntimePlan.model_validate({"plan_schema_version": "1", "reset": _RESET, "actions": actions})


def make_plan(schema: Mapping[str, Any]) -> RuntimePlan:
    """Generate a plan from the schema of an environment's actions.

    Raises:
        CheckSkipped: No action can be generated.
    """
    if has_tool_actions(schema):
        # Calling a tool may cost money or do harm: without a plan, tools are listed and not called.
        return _plan_of([{"type": LIST_TOOLS}] * 2)
    try:
        return _plan_of([make(schema, variant) for variant in range(_GENERATED_STEPS)])
    except Unmakeable as error:
        problem = f"no action can be generated ({error}): give the field `examples`, or write {PLAN} with actions"
        raise CheckSkipped(problem) from error
    except ValidationError as error:
        raise CheckSkipped(f"generated actions are not objects; write {PLAN} with actions") from error


def has_tool_actions(schema: Mapping[str, Any]) -> bool:
    """Return whether actions of this schema are calls of tools."""
    # Recognised by its fields, because the class of the server's actions is unknown here.
    return set(schema.get("properties", {})) >= _TOOL_FIELDS


def is_tool_call(action: Mapping[str, Any] | None) -> bool:
    """Return whether an action calls a tool."""
    return action is not None and action.get("type") == "call_tool"


@dataclass(frozen=True, slots=True)
class Moment:
    """The result of a reset or a step."""

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
        """The parts of an episode that a repetition must reproduce; metadata may contain the time."""
        return {name: value for name, value in self.whole.items() if name != "metadata"}

    def json(self) -> dict[str, Any]:
        """Return the moment as a line of a record."""
        return {"action": self.action, "observation": self.observation, "reward": self.reward, "done": self.done}


@dataclass(slots=True)
class ProbeEpisode:
    """An episode that was played for a check."""

    moments: list[Moment] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rewards(self) -> list[Any]:
        """The rewards of its steps."""
        return [moment.reward for moment in self.moments[1:]]

    def text(self) -> str:
        """Return the episode as JSON lines, one per moment."""
        return "\n".join(json.dumps(moment.json(), sort_keys=True, allow_nan=False) for moment in self.moments)


Client = SyncEnvClient[Any, dict[str, Any], dict[str, Any]]


def reset(env: Client, plan: RuntimePlan, **changes: Any) -> Moment:
    """Begin an episode as planned, with some arguments changed."""
    options = {**plan.reset.options, "seed": plan.reset.seed, "episode_id": plan.reset.episode_id, **changes}
    return _moment(env.reset(**options))


def step(env: Client, action: dict[str, Any]) -> Moment:
    """Make a step."""
    # A copy: the client may add fields, and the plan is used again.
    return _moment(env.step(dict(action)), action)


def play(env: Client, plan: RuntimePlan, *, with_states: bool = False, **changes: Any) -> ProbeEpisode:
    """Play an episode as planned, until it is done."""
    episode, started = ProbeEpisode(), time.monotonic()
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
    # As in `graders.episode_of`: either place, or both.
    metadata = {**(result.observation.get("metadata") or {}), **(result.metadata or {})}
    return Moment(result.observation, result.reward, bool(result.done), metadata, action)


_T = TypeVar("_T")
# A session ends on the server a moment after its client has gone.
_FREE_S = 5.0


@dataclass(slots=True, kw_only=True)
class Probe:
    """A client of the environment under test, with everything that checks share."""

    url: str
    token: str | None = None
    reply_s: float = 60.0  # how long a reply in a session may take
    http_timeout_s: float = 60.0
    manifest: NormalizedManifest | None = None  # None for a running server or an invalid manifest
    folder: Path | None = None  # the package, if there is one
    package: PackageServer | None = None  # the server that this command started, if any
    declares: bool = True  # whether there could be a manifest: a file has none
    slowest_s: float = field(default=0.0, init=False)  # of the episodes that were played
    _is_generated: bool = field(default=False, init=False)  # actions made from the schema: a refusal proves little
    _cache: dict[str, Any] = field(default_factory=dict, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send an HTTP request and return the JSON of the reply.

        Raises:
            CheckFailed: The server does not reply, or with an error.
        """
        try:
            # An error status is a failure of the check that asked.
            reply = self.request(method, path, body)
            reply.raise_for_status()
            return reply.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise CheckFailed(f"{method} {path}: {message_of(error)}") from error

    def request(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        """Send an HTTP request and return the reply with any status."""
        return httpx2.request(
            method,
            self.url.rstrip("/") + path,
            json=body,
            headers=with_token(None, self.token),
            timeout=self.http_timeout_s,
            # No proxy: the server is usually on this machine.
            trust_env=False,
            follow_redirects=True,
        )

    def _once(self, what: str, make: Callable[[], _T]) -> _T:
        """Do something once for all checks: the first check that needs it fails with it, later ones are skipped."""
        # The first check that needs a broken part fails. Later ones are skipped, so that one fault is reported once.
        if what in self._failures:
            raise CheckSkipped(f"{UNMET}{what} ({self._failures[what]})")
        if what not in self._cache:
            try:
                self._cache[what] = make()
            except CheckFailed as failure:
                self._failures[what] = str(failure)
                raise
        cached: _T = self._cache[what]
        return cached

    @property
    def promises(self) -> NormalizedManifest:
        """The manifest; raises CheckSkipped if it is missing or invalid."""
        if self.manifest is None and not self.declares:
            raise CheckNotApplicable("a file declares nothing")
        if self.manifest is None:
            raise CheckSkipped("nothing is declared without a valid manifest")
        return self.manifest

    @property
    def schema(self) -> dict[str, Any]:
        """The schemas that the server publishes."""
        return self._once("schemas", self._read_schema)

    def _read_schema(self) -> dict[str, Any]:
        schemas = self.ask("GET", "/schema")
        if not isinstance(schemas, dict):
            raise CheckFailed("GET /schema: no object")
        return schemas

    @property
    def plan(self) -> RuntimePlan:
        """The actions to check with: the package's own, or some that fit the schema.

        Raises:
            CheckSkipped: There are none.
        """
        return self._once("actions to check with", self._find_plan)

    def _find_plan(self) -> RuntimePlan:
        declared = self.manifest.execution if isinstance(self.manifest, NormalizedManifestV2) else None
        # A single Python file may have its plan beside it.
        root = self.folder.parent if self.folder is not None and self.folder.is_file() else self.folder
        name = declared.probe_path if declared else PLAN
        path = None if root is None else root / name
        # A declared plan must exist; the default one may be missing.
        if path is not None and (declared is not None or path.exists()):
            return read_plan(path)
        action = self.schema.get("action")
        self._is_generated = True
        return make_plan(action if isinstance(action, dict) else {})

    def open(self, protocol: ProtocolChoice = "v1") -> Client:
        """Return a client with a separate session, as a context manager."""
        client = GenericEnvClient(
            base_url=self.url,
            token=self.token,
            message_timeout_s=self.reply_s,
            connect_timeout_s=60.0,
            protocol=protocol,
            # Reset and step exist in this mode only, so it is fixed against the user's variable.
            mode="simulation",
        )
        return client.sync()

    @contextlib.contextmanager
    def session(self, protocol: ProtocolChoice = "v1") -> Iterator[Client]:
        """Open a session; an error of the server or the environment in it fails the check.

        Raises:
            CheckFailed: It cannot be opened, or a call fails.
            CheckSkipped: All sessions are taken, or no suitable action is known.
        """
        try:
            with self._admitted(protocol) as env:
                yield env
        except SessionCapacityError as error:
            raise CheckSkipped(f"all sessions of the server are taken: {message_of(error)}") from error
        except RequestValidationError as error:
            # A schema cannot express every rule of an environment. Without a plan the check has no valid action.
            if self._is_generated:
                text = f"an action that fits the schema was refused ({message_of(error)}); write {PLAN} with actions"
                raise CheckSkipped(text) from error
            raise CheckFailed(f"a planned action was refused: {message_of(error)}", fix=f"correct {PLAN}") from error
        except OpenEnvError as error:
            fix = "return an observation for a bad move, and raise for a failure only"
            raise CheckFailed(f"{type(error).__name__}: {message_of(error)}", fix=fix) from error

    def _admitted(self, protocol: ProtocolChoice) -> Client:
        """Open a session; one that has just ended may hold its slot a little longer."""
        deadline = time.monotonic() + _FREE_S
        while True:
            env = self.open(protocol)
            try:
                # Connecting is lazy; asking for the state makes the server admit the session.
                env.connect()
                env.state()
            except SessionCapacityError:
                env.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            except ServerError:  # the session exists; another check judges its state
                return env
            except BaseException:
                env.close()
                raise
            else:
                return env

    @property
    def first(self) -> ProbeEpisode:
        """The measured episode, with the state after each call."""
        return self._once("an episode", lambda: self.play(with_states=True))

    @property
    def again(self) -> ProbeEpisode:
        """The same episode once more, in another session."""
        _ = self.first
        return self._once("a second episode", self.play)

    @property
    def elsewhere(self) -> ProbeEpisode:
        """Play the same episode in another process, so that the order of Python's sets differs.

        Raises:
            CheckSkipped: The package cannot be started a second time.
        """
        _ = self.first
        return self._once("a second process", self._play_elsewhere)

    def _play_elsewhere(self) -> ProbeEpisode:
        if self.package is None:
            raise CheckSkipped("only a package can be started a second time")
        try:
            with self.package.another() as other:
                # The copy has an empty cache, so it plays its own first episode.
                return replace(self, url=other.url, package=other).first
        except NotServed as error:
            raise CheckFailed(f"a second server did not start: {last_line(str(error))}") from error

    def play(self, **options: Any) -> ProbeEpisode:
        """Play an episode in a separate session."""
        with self.session() as env:
            episode = play(env, self.plan, **options)
        self.slowest_s = max(self.slowest_s, episode.seconds)
        return episode


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"
