"""Episodes that are played for a check: the actions, and what came back. Knows clients; must not judge."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...client.generic import GenericEnvClient
from ...client.sync_client import SyncEnvClient
from .json_schema import Unmakeable, make

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
