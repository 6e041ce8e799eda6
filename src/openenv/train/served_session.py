"""Agent sessions of any served environment: each tool call of a model is a step.

The environment's tools become the session's tools. Typed actions become one tool with the action's fields as arguments,
or one tool per member of a union. `env_family` knows the special cases OpenSpiel and Reasoning Gym.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openenv.client.env_client import GenericEnvClient
from openenv.errors import (
    ExecutionError,
    RequestValidationError,
    RolloutError,
    ToolCallError,
    ToolTransportError,
    message_of,
)
from openenv.protocol.json_values import PROMPT_KEY, reply_reward
from openenv.protocol.schema import resolve_reference
from openenv.protocol.tool_messages import RESERVED_TOOL_NAMES, Tool
from openenv.rollout.agents.dialogue import FRAME_FIELDS, Json
from openenv.rollout.agents.served_episode import (
    action_schema,
    described,
    environment_facts,
    has_tools,
    served_tools,
    transport_failed,
)
from openenv.rollout.run.agent_sessions import (
    Message,
    ResourceSessionFactory,
    StepEnvSessionAdapter,
    ToolResult,
    VerifyResult,
    plain,
)
from openenv.rollout.run.collect import REWARD_SUM
from openenv.types import StepResult

_HIDDEN_FIELDS = frozenset({"metadata"})
"""Fields of actions that are not for the player."""


# ---- which environment ----


@dataclass(frozen=True, slots=True)
class EnvFamily:
    """Special rules for playing an environment; none by default."""

    tool_name: str = "act"
    """The name of the tool for typed actions."""
    introduction: str = ""
    """A text before the first observation."""
    action_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to every action."""
    reset_arguments: Mapping[str, Any] = field(default_factory=dict)
    tasks: Callable[[], Iterator[Json]] | None = None
    """Makes the starts of episodes if the caller chooses none."""
    add_to_observation: Callable[[Mapping[str, Any]], Json] = lambda observation: {}
    """Makes additional fields of an observation for the player."""


def env_family(spec: str, config: Mapping[str, Any] | None = None) -> EnvFamily:
    """Return the special rules for an environment.

    Args:
        spec: `openspiel:GAME`, `reasoning_gym:DATASET`, or any other name or address.
        config: The dataset's configuration of `reasoning_gym`; arguments of `reset` for all others.

    Raises:
        ValueError: The variant is missing, or the environment has no variants.
    """
    arguments = dict(config or {})
    if "://" in spec:
        return EnvFamily(reset_arguments=arguments)
    name, colon, variant = spec.partition(":")
    if name == "openspiel" and variant:
        return EnvFamily(
            tool_name="play_move",
            introduction=f"You play {variant}. Call play_move with an action_id that is in legal_actions.",
            action_fields={"game_name": variant},
            reset_arguments=arguments,
            add_to_observation=_tic_tac_toe_board if variant == "tic_tac_toe" else lambda observation: {},
        )
    if name == "reasoning_gym" and variant:
        # Two versions of this environment are published, with different names for the same arguments. Each ignores
        # the other's.
        one = {"dataset_name": variant, "dataset_config": arguments, "size": 1}
        other = {"task_name": variant, "task_config": arguments, "dataset_size": 1}
        return EnvFamily(tool_name="answer", reset_arguments={**one, **other}, tasks=_random_seeds)
    if name in ("openspiel", "reasoning_gym"):
        raise ValueError(f"{spec!r} names no variant: write openspiel:GAME or reasoning_gym:DATASET")
    if colon:
        raise ValueError(
            f"{spec!r}: only openspiel:GAME and reasoning_gym:DATASET have variants. For any other environment write "
            "its name or address, and the arguments of its reset as --dataset-config"
        )
    return EnvFamily(reset_arguments=arguments)


def _random_seeds() -> Iterator[Json]:
    """Make seeds: in a dataset with one question, each seed gives another question."""
    while True:
        yield {"seed": random.randrange(2**31)}


def _tic_tac_toe_board(observation: Mapping[str, Any]) -> Json:
    """Draw the board of OpenSpiel's tic-tac-toe; an empty cell has the number of its action.

    `info_state` has three planes of nine cells: empty, X, O.
    """
    planes = observation.get("info_state")
    if not isinstance(planes, Sequence) or len(planes) != 27:
        return {}
    cells = [str(n) for n in range(9)]
    for n in range(9):
        if planes[9 + n] > 0.5:
            cells[n] = "X"
        elif planes[18 + n] > 0.5:
            cells[n] = "O"
    return {"board": "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))}


# ---- tools of typed actions ----


@dataclass(frozen=True, slots=True)
class ActionTool:
    """A tool, and the constant fields of its actions."""

    tool: Tool
    fields: Mapping[str, Any]


def action_tools(schema: Mapping[str, Any], family: EnvFamily) -> list[ActionTool]:
    """Make tools from the JSON schema of actions: one, or one per member of a union.

    Raises:
        RolloutError: The actions are not JSON objects.
    """
    members = [resolve_reference(one, schema) for one in schema.get("oneOf") or schema.get("anyOf") or [schema]]
    if not all(one.get("type") == "object" or "properties" in one for one in members):
        raise RolloutError("The actions of this environment are not JSON objects, so they cannot become tools")
    made = [_action_tool(one, schema, family, is_only=len(members) == 1) for one in members]
    return list({one.tool.name: one for one in made}.values())


def _action_tool(member: Mapping[str, Any], root: Mapping[str, Any], family: EnvFamily, *, is_only: bool) -> ActionTool:
    properties: Mapping[str, Any] = member.get("properties") or {}
    constants = {name: value["const"] for name, value in properties.items() if "const" in value}
    decided = {**constants, **{name: value for name, value in family.action_fields.items() if name in properties}}
    free = {name: value for name, value in properties.items() if name not in decided and name not in _HIDDEN_FIELDS}
    schema: Json = {"type": "object", "properties": free}
    if required := [name for name in member.get("required") or () if name in free]:
        schema["required"] = required
    if "$defs" in root and '"$ref"' in json.dumps(free):
        schema["$defs"] = root["$defs"]
    name = family.tool_name if is_only else _member_name(member, constants)
    description = str(member.get("description") or f"Take an action of kind {member.get('title') or name}.")
    return ActionTool(Tool(name=name, description=description, input_schema=schema), decided)


def _member_name(member: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
    """Return a tool's name for a member of a union: its discriminator, or its title in snake case."""
    text = next((value for value in constants.values() if isinstance(value, str)), None)
    if text is None:
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(member.get("title") or "act")).lower()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", text)[:60]
    return f"act_{name}" if name in RESERVED_TOOL_NAMES else name


# ---- sessions ----


class ServedSession(StepEnvSessionAdapter):
    """An episode of a served environment. `ServedSessionFactory` creates it.

    The model reads the reason of a refused action and may continue. A failure of the server ends the episode with its
    error.
    """

    def __init__(self, client: Any, **arguments: Any) -> None:
        self._rewards: list[float | None] = []
        super().__init__(client, **arguments)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Take the step for this call. The model reads the error of a refused action.

        Raises:
            KeyError: The tool does not exist.
            OpenEnvError: The server or the environment failed.
        """
        try:
            result = super().call_tool(name, arguments)
        except ToolTransportError:
            raise
        except (RequestValidationError, ToolCallError) as exc:
            return ToolResult(error=message_of(exc))
        self._rewards.append(result.metadata["reward"])
        return result

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """Return the last reward of the episode; the metrics contain the sum, which `collect` reports."""
        rewards = [float(reward) for reward in self._rewards if reward is not None]
        return VerifyResult(
            env_reward=rewards[-1] if rewards else None,
            done=bool(self._last is not None and self._last.done),
            metrics={"steps": len(self._rewards), REWARD_SUM: sum(rewards) if rewards else None},
            artifacts={"final_state": plain(self._state), "transcript_length": len(transcript)},
        )

    def _read_state(self) -> Any:
        try:
            return super()._read_state()
        except ExecutionError:  # the environment has no state, and episodes do not need it
            return None


class ServedSessionFactory(ResourceSessionFactory[ServedSession]):
    """Creates sessions of a served environment with any kind of actions.

    Args:
        url: The server.
        family: Special rules for playing it.
        client_options: More arguments of the client, such as `token`.

    Raises:
        RolloutError: The server does not answer, or its actions cannot become tools.
    """

    def __init__(
        self, url: str, family: EnvFamily | None = None, client_options: Mapping[str, Any] | None = None
    ) -> None:
        self._url = url
        self._family = family or EnvFamily()
        self._client_options = dict(client_options or {})
        schema = action_schema(url, self._client_options)
        self._actions: dict[str, Mapping[str, Any]] = {}
        if listed := _listed_tools(url, schema, self._client_options):
            self.tools = [_tool(one) for one in listed]
        else:
            made = action_tools(schema, self._family)
            self.tools = [one.tool for one in made]
            self._actions = {one.tool.name: one.fields for one in made}
        self._description = described(environment_facts(url, self._client_options))

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> ServedSession:
        """Start an episode.

        Args:
            task: Arguments of `reset`, such as `{"seed": 1}`, or None.
            seed, episode_id: More arguments of `reset`.

        Raises:
            TypeError: The task is not a mapping.
            OpenEnvError: The server does not start the episode.
        """
        if task is not None and not isinstance(task, Mapping):
            raise TypeError(
                f"a task of a served environment has the arguments of reset, such as {{'seed': 1}}: {task!r}"
            )
        return ServedSession(
            GenericEnvClient(self._url, **self._client_options).sync(),
            task=task,
            seed=seed,
            episode_id=episode_id,
            tool_specs=self.tools,
            action_builder=self._action,
            initial_messages_builder=self._first_messages,
            tool_result_builder=self._result,
            reset_kwargs={**self._family.reset_arguments, **(task or {})},
        )

    def _action(self, name: str, arguments: dict[str, Any]) -> Json:
        if name in self._actions:
            return {**arguments, **self._actions[name]}
        return {"type": "call_tool", "tool_name": name, "arguments": arguments}

    def _first_messages(self, first: StepResult[Any], task: Any) -> list[Message]:
        shown = self._shown(first.observation)
        text = ""
        if isinstance(shown, str):
            text = shown
        elif shown:
            text = json.dumps(shown, ensure_ascii=False)
        introduction = self._family.introduction or self._description
        parts = (introduction, text or "The episode has begun. Act with the tools.")
        return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]

    def _shown(self, observation: Any) -> Any:
        """Return the player's view: the text of `to_prompt()`, a single text field, or all fields except None."""
        if not isinstance(observation, Mapping):
            return plain(observation)
        metadata = observation.get("metadata")
        if isinstance(metadata, Mapping) and isinstance(metadata.get(PROMPT_KEY), str):
            return metadata[PROMPT_KEY]
        fields = {name: value for name, value in observation.items() if name not in FRAME_FIELDS and value is not None}
        fields |= self._family.add_to_observation(observation)
        only = next(iter(fields.values())) if len(fields) == 1 else None
        return only if isinstance(only, str) else fields

    def _result(self, name: str, arguments: dict[str, Any], step: StepResult[Any], state: Any) -> ToolResult:
        done, metadata = bool(step.done), {"reward": reply_reward(step.reward, step.metadata), "state": plain(state)}
        seen = step.observation
        if not isinstance(seen, Mapping) or name in self._actions or "tool_name" not in seen:
            return ToolResult(data=self._shown(seen), done=done, metadata=metadata)
        if error := seen.get("error"):
            text = str(error.get("message") if isinstance(error, Mapping) else error)
            if transport_failed(seen):
                raise ToolTransportError(name, text)
            return ToolResult(error=text, done=done, metadata=metadata)
        result = seen.get("result")
        if isinstance(result, Mapping) and "data" in result:  # as MCP wraps it
            result = result["data"]
        return ToolResult(data=result, done=done, metadata=metadata)


def _listed_tools(url: str, schema: Mapping[str, Any], client_options: Mapping[str, Any]) -> list[Json]:
    """Ask a server for its tools if its actions are tool calls, or plain `Action` objects without fields."""
    if has_tools(schema):
        return served_tools(url, client_options)
    if schema.get("type") != "object" or set(schema.get("properties") or {}) - _HIDDEN_FIELDS:
        return []
    try:
        return served_tools(url, client_options)
    except (RequestValidationError, ExecutionError):  # an environment without tools
        return []


def _tool(listed: Mapping[str, Any]) -> Tool:
    schema = listed.get("input_schema") or listed.get("inputSchema") or {"type": "object", "properties": {}}
    return Tool(name=listed["name"], description=listed.get("description") or "", input_schema=dict(schema))
