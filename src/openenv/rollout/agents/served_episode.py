"""An episode of a served environment inside a trainer's own loop: what adapters for trainers share.

`EpisodeRules` has the reward and the end of an episode and does no IO; `ServedEpisode` plays one over a blocking
client. A failure of the server never becomes a reward: the episode then has none, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import httpx2

from openenv.client.env_client import GenericEnvClient
from openenv.client.network import http_url, with_token
from openenv.errors import (
    OpenEnvError,
    RequestValidationError,
    RolloutError,
    ToolCallError,
    ToolTransportError,
    message_of,
)
from openenv.protocol.tool_messages import ToolErrorType
from openenv.types import StepResult

from .dialogue import Dialogue, Json, TextDialogue, ToolDialogue, WrittenToolDialogue

RewardRule = Literal["sum", "last"]

EPISODE_OVER = "The episode is over."
"""What a model reads that acts after the end."""

_SCHEMA_TIMEOUT_S = 30.0


class EpisodeFailed(RolloutError):
    """An episode failed for a reason that is not the policy's, so it has no reward."""

    code = "EPISODE_FAILED"


class EpisodeRules:
    """The reward of an episode so far, and how it ended.

    Args:
        dialogue: Says what the model sees of an observation.
        reward: `sum` of all rewards of the episode, or the `last` one.

    Raises:
        ValueError: There is no such rule.
    """

    def __init__(self, dialogue: Dialogue, reward: RewardRule = "sum") -> None:
        if reward not in ("sum", "last"):
            raise ValueError(f"reward must be 'sum' or 'last', not {reward!r}")
        self.dialogue = dialogue
        self._rule = reward
        self._reward = 0.0
        self.is_over = True  # until it begins
        self.failure: EpisodeFailed | None = None
        """Why the episode has no reward; None where it may have one."""

    @property
    def reward(self) -> float | None:
        """The reward so far; None where the episode failed."""
        return None if self.failure is not None else self._reward

    def begin(self, result: StepResult[Any]) -> str:
        """Begin an episode with the result of `reset`; return what the model sees of it."""
        self._reward, self.failure, self.is_over = 0.0, None, bool(result.done)
        return self.dialogue.shown(result.observation)

    def take(self, result: StepResult[Any]) -> str:
        """Count the result of a step; return what the model sees of it.

        Raises:
            EpisodeFailed: The environment could not reach its own tool.
        """
        if transport_failed(result.observation):
            raise self.fail(RolloutError(self.dialogue.shown(result.observation)))
        if result.reward is not None:
            self._reward = float(result.reward) + (self._reward if self._rule == "sum" else 0.0)
        self.is_over = self.is_over or bool(result.done)
        return self.dialogue.shown(result.observation)

    def refuse(self, error: Exception) -> str:
        """Return what the model reads of an action that was refused.

        Raises:
            EpisodeFailed: The action is not what is wrong.
        """
        if isinstance(error, (RequestValidationError, ToolCallError)) and not isinstance(error, ToolTransportError):
            return f"Error: {message_of(error)}"
        raise self.fail(error)

    def fail(self, error: Exception) -> EpisodeFailed:
        """Note that the episode failed, and return the exception to raise."""
        if self.failure is None:
            self.failure = EpisodeFailed(f"{type(error).__name__}: {message_of(error)}")
            self.failure.__cause__ = error
        self.is_over = True
        return self.failure


def transport_failed(observation: Any) -> bool:
    """Say whether an observation is that of a tool which the environment could not reach."""
    error = observation.get("error") if isinstance(observation, Mapping) else None
    return isinstance(error, Mapping) and error.get("error_type") == ToolErrorType.TRANSPORT_ERROR.value


class ServedEpisode(EpisodeRules):
    """Episodes of a served environment, one after another in one session, over a blocking client.

    Args:
        url: The server.
        dialogue: How the model talks with the environment; `served_dialogue` finds it.
        reward: `sum` of all rewards of an episode, or the `last` one.
        client_options: Further arguments of the client, such as `token`.
    """

    def __init__(
        self,
        url: str,
        dialogue: Dialogue,
        *,
        reward: RewardRule = "sum",
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dialogue, reward)
        self._url = url
        self._client_options = dict(client_options or {})
        self._client = GenericEnvClient(url, **self._client_options).sync()
        self._first: Any = None

    def opening(self, **start: Any) -> list[Json]:
        """Begin an episode, and return the messages that begin the conversation; raises as `reset` does."""
        self.reset(**start)
        return self.dialogue.opening(self._first)

    def reset(self, **start: Any) -> str:
        """Begin an episode, in a new session where the last one failed; return what the model sees.

        Raises:
            OpenEnvError: The server does not begin one.
        """
        if self.failure is not None:  # what is left of that session cannot be trusted
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
        """Take an action; return what the model sees of it, or reads of why it was refused.

        Raises:
            EpisodeFailed: The server or the environment failed; so does every action until `reset`.
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


def action_schema(url: str, client_options: Mapping[str, Any] | None = None) -> Json:
    """Ask a server for the JSON schema of its actions.

    Raises:
        RolloutError: There is no such server.
    """
    try:
        headers = with_token(None, (client_options or {}).get("token"))
        answer = httpx2.get(f"{http_url(url)}/schema", headers=headers, timeout=_SCHEMA_TIMEOUT_S, trust_env=False)
        schema: Json = answer.raise_for_status().json()["action"]
    except (httpx2.HTTPError, ValueError, KeyError) as exc:
        raise RolloutError(f"{url} does not say what its actions are ({message_of(exc)}). Is a server there?") from exc
    return schema


def served_tools(url: str, client_options: Mapping[str, Any] | None = None) -> list[Json]:
    """Ask a server for the tools of its environment, in a session that is closed again."""
    with GenericEnvClient(url, **dict(client_options or {})).sync() as client:
        client.reset()
        listed = client.step({"type": "list_tools"})
    return list(listed.observation.get("tools") or [])


def has_tools(schema: Mapping[str, Any]) -> bool:
    """Say whether actions of this schema are tool calls."""
    return "tool_name" in (schema.get("properties") or {})


def served_dialogue(
    url: str, system: str = "", client_options: Mapping[str, Any] | None = None, *, calls_tools: bool = True
) -> Dialogue:
    """Return how a model talks with a served environment: by its tools where it has them, else by texts.

    Args:
        url: The server.
        system: What the model is asked to do.
        client_options: Further arguments of the client, such as `token`.
        calls_tools: Whether answers have tool calls; where not, the model writes them into its text.

    Raises:
        RolloutError: There is no such server.
    """
    schema = action_schema(url, client_options)
    if not has_tools(schema):
        return TextDialogue(system, schema)
    tools = served_tools(url, client_options)
    return ToolDialogue(tools, system) if calls_tools else WrittenToolDialogue(tools, system)
