"""One episode of a served environment inside a trainer's loop; the adapters for trainers share it.

`EpisodeRules` computes the reward and the end of an episode, without IO. `ServedEpisode` plays one with a blocking
client. A failure of the server is never scored: the episode has no reward, and its `failure` has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from openenv.client.env_client import GenericEnvClient
from openenv.client.network import NO_SERVER, ConnectionOptions, with_token
from openenv.client.rewards import RewardHistory, reward_history
from openenv.client.schema_client import ask, read_schemas
from openenv.errors import (
    NonFiniteReward,
    OpenEnvError,
    RequestValidationError,
    RolloutError,
    ToolCallError,
    ToolTransportError,
    message_of,
)
from openenv.protocol.json_values import finite_reward, reply_reward
from openenv.protocol.tool_messages import ToolErrorType
from openenv.types import StepResult

from .dialogue import Dialogue, Json, Prompt, TextDialogue, ToolDialogue, WrittenToolDialogue

RewardRule = Literal["sum", "last"]

EPISODE_OVER = "The episode is over."
"""The model reads this if it acts after the end."""

_SCHEMA_TIMEOUT_S = 30.0


class EpisodeFailed(RolloutError):
    """An infrastructure failure ended the episode, so it has no reward."""

    code = "EPISODE_FAILED"


class EpisodeRules:
    """The reward and the end of an episode.

    Args:
        dialogue: Converts observations for the model.
        reward: `sum` adds all rewards of the episode, `last` takes the last one.
        history: The rewards of the environment in this run; `reward_history` has one per server.

    Raises:
        ValueError: The rule is unknown.
    """

    def __init__(self, dialogue: Dialogue, reward: RewardRule = "sum", *, history: RewardHistory | None = None) -> None:
        if reward not in ("sum", "last"):
            raise ValueError(f"reward must be 'sum' or 'last', not {reward!r}")
        self.dialogue = dialogue
        self._rule = reward
        self._history = history or RewardHistory()
        self._reward = 0.0
        self._has_ended = False
        self.is_over = True  # until it begins
        self.failure: EpisodeFailed | None = None
        """The reason why the episode has no reward, or None."""

    @property
    def reward(self) -> float | None:
        """The reward so far; None if the episode failed."""
        return None if self.failure is not None else self._reward

    def final_reward(self) -> float | None:
        """Return the reward at the end of the episode; None if the episode failed.

        Raises:
            NoRewards: The environment has never given a reward.
        """
        if self.failure is None and not self._has_ended:
            self._has_ended = True  # a trainer may ask twice
            self._history.end_episodes()
        return self.reward

    def begin(self, result: StepResult[Any]) -> str:
        """Start an episode with the result of `reset`; return the model's view of it.

        Raises:
            EpisodeFailed: The reward is not a finite number.
        """
        self._reward, self.failure, self.is_over, self._has_ended = 0.0, None, bool(result.done), False
        self._checked(result)
        return self.dialogue.shown(result.observation)

    def take(self, result: StepResult[Any]) -> str:
        """Count the result of a step; return the model's view of it.

        Raises:
            EpisodeFailed: The environment could not reach its own tool, or the reward is not a finite number.
        """
        if transport_failed(result.observation):
            raise self.fail(RolloutError(self.dialogue.shown(result.observation)))
        reward = self._checked(result)
        if reward is not None:
            self._reward = self._history.value(reward) + (self._reward if self._rule == "sum" else 0.0)
        self.is_over = self.is_over or bool(result.done)
        return self.dialogue.shown(result.observation)

    def _checked(self, result: StepResult[Any]) -> Any:
        try:
            reward = reply_reward(result.reward, result.metadata)
            if reward is not None and self._rule == "sum":
                finite_reward(float(reward) + self._reward)  # finite numbers may add up to infinity
        except NonFiniteReward as exc:
            raise self.fail(exc) from exc
        return reward

    def refuse(self, error: Exception) -> str:
        """Return the error of a refused action for the model.

        Raises:
            EpisodeFailed: The error has another cause than the action.
        """
        if isinstance(error, (RequestValidationError, ToolCallError)) and not isinstance(error, ToolTransportError):
            return f"Error: {message_of(error)}"
        raise self.fail(error)

    def fail(self, error: Exception) -> EpisodeFailed:
        """Mark the episode as failed, and return the exception to raise."""
        if self.failure is None:
            self.failure = EpisodeFailed(f"{type(error).__name__}: {message_of(error)}")
            self.failure.__cause__ = error
        self.is_over = True
        return self.failure


def transport_failed(observation: Any) -> bool:
    """Return whether an observation reports that the environment could not reach its tool."""
    error = observation.get("error") if isinstance(observation, Mapping) else None
    return isinstance(error, Mapping) and error.get("error_type") == ToolErrorType.TRANSPORT_ERROR.value


class ServedEpisode(EpisodeRules):
    """Plays episodes of a served environment one after another in one session, with a blocking client.

    Args:
        url: The server.
        dialogue: How the model talks with the environment; `served_dialogue` finds it.
        reward: `sum` adds all rewards of an episode, `last` takes the last one.
        client_options: More arguments of the client, such as `token`.
    """

    def __init__(
        self,
        url: str,
        dialogue: Dialogue,
        *,
        reward: RewardRule = "sum",
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dialogue, reward, history=reward_history(url))
        self._url = url
        self._client_options = dict(client_options or {})
        self._client = GenericEnvClient(url, **self._client_options).sync()
        self._first: Any = None

    def opening(self, **start: Any) -> list[Json]:
        """Start an episode, and return the first messages of the conversation; raises the errors of `reset`."""
        self.reset(**start)
        return self.dialogue.opening(self._first)

    def reset(self, **start: Any) -> str:
        """Start an episode, in a new session if the last one failed; return the model's view.

        Raises:
            OpenEnvError: The server does not start the episode.
        """
        if self.failure is not None:  # the old session may be broken
            self._client.close()
            self._client = GenericEnvClient(self._url, **self._client_options).sync()
        try:
            result = self._client.reset(**start)
        except OpenEnvError as exc:
            self.fail(exc)
            raise
        self._first = result.observation
        return self.begin(result)

    def act(self, action: Json) -> str:
        """Take an action; return the model's view of the result, or the error of a refused action.

        Raises:
            EpisodeFailed: The server or the environment failed; every later action until `reset` raises it again.
        """
        if self.failure is not None:
            raise self.failure
        if self.is_over:
            return EPISODE_OVER
        try:
            return self.take(self._client.step(action))
        except EpisodeFailed:
            raise
        except (OpenEnvError, OSError) as exc:
            return self.refuse(exc)

    def close(self) -> None:
        """End the session."""
        self._client.close()


def environment_facts(url: str, client_options: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Ask a server for the metadata of its environment; empty if it does not say."""
    try:
        headers = with_token(None, (client_options or {}).get("token"))
        return dict(ask(url, "/metadata", ConnectionOptions(connect_timeout_s=_SCHEMA_TIMEOUT_S, headers=headers)))
    except (OpenEnvError, TypeError, ValueError):  # labels and descriptions: the episodes run without them
        return {}


def environment_name(url: str, client_options: Mapping[str, Any] | None = None) -> str:
    """Ask a server for the name of its environment; empty if it does not say."""
    return str(environment_facts(url, client_options).get("name") or "")


def described(facts: Mapping[str, Any]) -> str:
    """Return the description in an environment's metadata; empty for a generated one, such as `Maze environment`."""
    text = str(facts.get("description") or "").strip()
    return "" if len(text.split()) == 2 and text.lower().endswith(" environment") else text


def served_prompt(
    url: str, client_options: Mapping[str, Any] | None = None, *, template: str = "", text_only: bool = False
) -> Prompt:
    """Return the form of the messages of a served environment, with its description and its template.

    Args:
        url: The server.
        client_options: More arguments of the client, such as `token`.
        template: Replaces the environment's template.
        text_only: Whether the model reads only the observation's text.

    Raises:
        ValueError: A template has no place for the observation.
    """
    facts = {} if text_only else environment_facts(url, client_options)
    own = str(facts.get("prompt_template") or "")
    return Prompt(description=described(facts), template=template or own, text_only=text_only)


def action_schema(url: str, client_options: Mapping[str, Any] | None = None) -> Json:
    """Ask a server for the JSON schema of its actions.

    Raises:
        RolloutError: The server does not answer.
    """
    try:
        headers = with_token(None, (client_options or {}).get("token"))
        options = ConnectionOptions(connect_timeout_s=_SCHEMA_TIMEOUT_S, headers=headers)
        schema: Json = dict(read_schemas(url, options)["action"])
    except (OpenEnvError, KeyError, TypeError, ValueError) as exc:
        problem = message_of(exc).replace(NO_SERVER, "").strip(" .")
        raise RolloutError(f"{url} does not describe its actions ({problem}). Is the server running?") from exc
    return schema


def served_tools(url: str, client_options: Mapping[str, Any] | None = None) -> list[Json]:
    """Ask a server for the tools of its environment in a short session."""
    with GenericEnvClient(url, **dict(client_options or {})).sync() as client:
        client.reset()
        listed = client.step({"type": "list_tools"})
    return list(listed.observation.get("tools") or [])


def has_tools(schema: Mapping[str, Any]) -> bool:
    """Return whether actions of this schema are tool calls."""
    return "tool_name" in (schema.get("properties") or {})


def served_dialogue(
    url: str,
    system: str = "",
    client_options: Mapping[str, Any] | None = None,
    *,
    calls_tools: bool = True,
    prompt: Prompt | None = None,
) -> Dialogue:
    """Return the dialogue for a served environment: with tool calls if it has tools, else with texts.

    Args:
        url: The server.
        system: The system message.
        client_options: More arguments of the client, such as `token`.
        calls_tools: Whether the model supports tool calls. If False, it writes calls into its text.
        prompt: The form of the messages; by default `served_prompt`.

    Raises:
        RolloutError: The server does not answer.
    """
    schema = action_schema(url, client_options)
    form = prompt or served_prompt(url, client_options)
    if not has_tools(schema):
        return TextDialogue(system, schema, form)
    tools = served_tools(url, client_options)
    return ToolDialogue(tools, system, form) if calls_tools else WrittenToolDialogue(tools, system, form)
