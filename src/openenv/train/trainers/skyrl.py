"""SkyRL: a served environment as a text environment of SkyRL-Gym. Needs skyrl-gym (0.3 or newer).

Register it once before SkyRL starts:
`skyrl_gym.register(id="openenv", entry_point="openenv.train.trainers.skyrl:ServedTextEnv")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openenv.adapters import importing
from openenv.rollout.agents.dialogue import AnswerRefused, conversation_of
from openenv.rollout.agents.served_episode import ServedEpisode, served_dialogue

with importing("skyrl-gym>=0.3", needed_by="openenv.train.trainers.skyrl"):
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

Conversation = list[dict[str, str]]


class ServedTextEnv(BaseTextEnv):  # type: ignore[misc]
    """One session of a served environment; actions and observations are texts.

    Args:
        env_config: The settings of all rows: `url`, and perhaps `max_turns`, `system` and `client` (arguments of the
            client, such as `token`).
        extras: A row of the dataset. Its key `reset` (or the one in `extra_info`) has the arguments for `reset` of the
            environment; its `url` and `max_turns` take precedence over the settings.

    Raises:
        ValueError: `url` is missing.
        RolloutError: The server does not answer.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        row = {**((extras or {}).get("extra_info") or {}), **(extras or {})}
        settings = {**dict(env_config or {}), **{key: row[key] for key in ("url", "max_turns") if key in row}}
        if "url" not in settings:
            raise ValueError("the environment needs a `url`, in its configuration or in the row")
        self.max_turns = int(settings.get("max_turns") or 10)
        self._start = dict(row.get("reset") or {})
        client = dict(settings.get("client") or {})
        dialogue = served_dialogue(str(settings["url"]), str(settings.get("system") or ""), client, calls_tools=False)
        self._episode = ServedEpisode(str(settings["url"]), dialogue, client_options=client)

    def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        """Start an episode; the first observation follows the prompt of the row.

        A system message of the prompt takes precedence over the setting `system`. Either comes first.

        Raises:
            OpenEnvError: The server does not start the episode.
            ValueError: The prompt has several system messages.
        """
        self.turns = 0
        opening = self._episode.opening(**self._start)
        return conversation_of(prompt, opening), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Take the action in a reply. A reply without a valid action costs a turn, and the model reads the reason.

        Raises:
            EpisodeFailed: The server or the environment failed, so the episode has no reward.
            NoRewards: The environment has never given a reward.
        """
        self.turns += 1
        before = self._earned()
        answer = {"role": "assistant", "content": action}
        try:
            (taken,) = self._episode.dialogue.actions(answer)
            shown = self._episode.act(taken)
        except AnswerRefused as exc:
            shown = str(exc)
        done = self._episode.is_over or self.turns >= self.max_turns
        observations = [] if done else self._episode.dialogue.reply(answer, [shown])
        reward = self._earned() - before
        if done:
            self._episode.final_reward()
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})

    def _earned(self) -> float:
        """Return the reward so far.

        Raises:
            EpisodeFailed: The episode has failed, so it has no reward.
        """
        reward = self._episode.reward
        if reward is None:
            assert self._episode.failure is not None
            raise self._episode.failure
        return reward

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns, and whether the episode ended."""
        return {"turns": self.turns, "ended": float(self._episode.is_over)}

    def close(self) -> None:
        """End the session."""
        self._episode.close()
