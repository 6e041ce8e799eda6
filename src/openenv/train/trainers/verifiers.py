"""verifiers: served environments as a taskset, also for prime-rl. Needs verifiers (0.4 or newer).

The taskset's ID is `openenv_taskset`: `--env.taskset.id openenv_taskset` with
`--env.taskset.url http://localhost:8000`.
`openenv.adapters.verifiers` does the opposite: it serves environments written for verifiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from openenv.adapters import importing
from openenv.client.env_client import GenericEnvClient
from openenv.client.rewards import reward_history
from openenv.errors import OpenEnvError
from openenv.rollout.agents.dialogue import AnswerRefused
from openenv.rollout.agents.served_episode import EpisodeFailed, EpisodeRules, RewardRule, served_dialogue

with importing("verifiers>=0.4", needed_by="openenv.train.trainers.verifiers"):
    import verifiers.v1 as vf

__all__ = ["ServedData", "ServedEnv", "ServedEnvConfig", "ServedTask", "ServedTaskset", "ServedTasksetConfig"]


class ServedTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The server of the environment, and the starts of its episodes."""

    url: str
    """The server."""
    resets: list[dict[str, Any]] = Field(default_factory=list)
    """Arguments of the environment's `reset`; each entry becomes a task."""
    seeds: int = Field(default=0, ge=0)
    """The number of additional tasks, with the seeds 0, 1, ... An empty taskset gets one task without a seed."""
    system: str = ""
    """The system message."""
    max_turns: int = Field(default=20, ge=1)
    """The largest number of replies in an episode."""
    reward: RewardRule = "sum"
    """The sum of all rewards of an episode, or the last one."""
    client: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the client, such as `token`."""


class ServedData(vf.TaskData):  # type: ignore[misc]
    """The start of one episode, and how it is played."""

    url: str
    reset: dict[str, Any]
    system: str
    max_turns: int
    reward: RewardRule
    client: dict[str, Any]


class ServedTask(vf.Task[ServedData]):  # type: ignore[misc]
    """One start of an episode, scored by the environment."""


class ServedTaskset(vf.Taskset[ServedTask, ServedTasksetConfig]):  # type: ignore[misc]
    """One task per start."""

    def load(self) -> Iterator[ServedTask]:
        """Yield the tasks."""
        config = self.config
        starts = [*config.resets, *({"seed": seed} for seed in range(config.seeds))] or [{}]
        for number, start in enumerate(starts):
            data = ServedData(
                name=f"{config.url}#{number}",
                prompt=None,
                url=config.url,
                reset=start,
                system=config.system,
                max_turns=config.max_turns,
                reward=config.reward,
                client=config.client,
            )
            yield ServedTask(data, config.task)


class ServedEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The player: by default a plain conversation, without a program."""

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())


class ServedEnv(vf.Env[ServedEnvConfig]):  # type: ignore[misc]
    """Plays the user's side of the conversation with the environment's observations.

    A reply without a valid action costs a turn, and the model reads the reason. A failure of the server or the
    environment is an error of the episode: verifiers retries or drops it, without a reward.
    """

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode.

        Raises:
            EpisodeFailed: The server or the environment failed.
            NoRewards: The environment has never given a reward.
        """
        data: ServedData = task.data
        dialogue = await asyncio.to_thread(served_dialogue, data.url, data.system, data.client, calls_tools=False)
        rules = EpisodeRules(dialogue, data.reward, history=reward_history(data.url))
        async with GenericEnvClient(data.url, **data.client) as client:
            try:
                first = await client.reset(**data.reset)
            except (OpenEnvError, OSError) as exc:
                raise rules.fail(exc) from exc
            rules.begin(first)
            message = "\n\n".join(str(one["content"]) for one in dialogue.opening(first.observation))
            async with agents.player.interaction(task) as interaction:
                for _ in range(data.max_turns):
                    segment = await interaction.turn(message)
                    if segment.terminated:
                        break
                    message = await self._answered(client, rules, segment.last_reply)
                    if rules.is_over:
                        break
        interaction.trace.record_reward("openenv_reward", rules.final_reward())

    async def _answered(self, client: GenericEnvClient, rules: EpisodeRules, text: str) -> str:
        answer = {"role": "assistant", "content": text}
        try:
            (action,) = rules.dialogue.actions(answer)
            shown = rules.take(await client.step(action))
        except AnswerRefused as exc:
            shown = str(exc)
        except EpisodeFailed:
            raise
        except (OpenEnvError, OSError) as exc:
            shown = rules.refuse(exc)
        return "\n".join(str(one["content"]) for one in rules.dialogue.reply(answer, [shown]))
