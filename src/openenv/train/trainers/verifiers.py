"""verifiers: served environments as one of its tasksets. Needs verifiers (0.4 or newer); prime-rl trains with it.

The module's name is the taskset's ID: `--env.taskset.id openenv.train.trainers.verifiers` with
`--env.taskset.url http://localhost:8000`.
`openenv.adapters.verifiers` is the other way: it serves environments of verifiers'.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from openenv.client.env_client import GenericEnvClient
from openenv.errors import OpenEnvError
from openenv.rollout.agents.dialogue import AnswerRefused
from openenv.rollout.agents.served_episode import EpisodeFailed, EpisodeRules, RewardRule, served_dialogue

try:
    import verifiers.v1 as vf
except ImportError as exc:
    raise ModuleNotFoundError(
        "openenv.train.trainers.verifiers needs verifiers: pip install 'verifiers>=0.4'", name=exc.name
    ) from exc

__all__ = ["ServedData", "ServedEnv", "ServedEnvConfig", "ServedTask", "ServedTaskset", "ServedTasksetConfig"]


class ServedTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Where the environment is served, and where its episodes begin."""

    url: str
    """The server."""
    resets: list[dict[str, Any]] = Field(default_factory=list)
    """A task for each, with the arguments of the environment's `reset`."""
    seeds: int = Field(default=0, ge=0)
    """So many tasks more, with the seeds 0, 1, ...; one task without a seed where there is no other."""
    system: str = ""
    """What the model is asked to do."""
    max_turns: int = Field(default=20, ge=1)
    """How many answers an episode has at most."""
    reward: RewardRule = "sum"
    """The sum of all rewards of an episode, or the last one."""
    client: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the client, such as `token`."""


class ServedData(vf.TaskData):  # type: ignore[misc]
    """Where one episode begins, and how it is played."""

    url: str
    reset: dict[str, Any]
    system: str
    max_turns: int
    reward: RewardRule
    client: dict[str, Any]


class ServedTask(vf.Task[ServedData]):  # type: ignore[misc]
    """One start of an episode; the environment scores it."""


class ServedTaskset(vf.Taskset[ServedTask, ServedTasksetConfig]):  # type: ignore[misc]
    """A task for each start."""

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
    """The player: by default a plain conversation, without a program of its own."""

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())


class ServedEnv(vf.Env[ServedEnvConfig]):  # type: ignore[misc]
    """Plays the user's side of the conversation: what the environment shows are its messages.

    An answer that is no action costs a turn, and the model reads why. A server or an environment that fails is an error
    of the episode, which verifiers retries or leaves out; no reward is recorded for it.
    """

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode.

        Raises:
            EpisodeFailed: The server or the environment failed.
        """
        data: ServedData = task.data
        dialogue = await asyncio.to_thread(served_dialogue, data.url, data.system, data.client, calls_tools=False)
        rules = EpisodeRules(dialogue, data.reward)
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
        interaction.trace.record_reward("openenv_reward", rules.reward)

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
