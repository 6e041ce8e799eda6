"""PettingZoo, both ways: serve its environments of many agents, and use a served one as its `ParallelEnv`.

Needs pettingzoo. A step has an action for each living agent, and the observation has everything by agent. Environments
of turns (`AECEnv`) are served by PettingZoo's own conversion; `pettingzoo.utils.parallel_to_aec` is the way back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from types import new_class
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, Field, create_model, field_validator

from openenv.client.network import ConnectionOptions, with_token
from openenv.client.schema_client import read_schemas
from openenv.client.vector.vector_env import VectorEnv, is_environment
from openenv.env.environment import Environment
from openenv.errors import NonFiniteReward, SlotsFailed
from openenv.protocol.json_values import finite_reward
from openenv.server.vectors import schemas_of
from openenv.types import Action, EnvironmentMetadata, Observation, State

from .gymnasium.served_gymnasium import make_picklable
from .gymnasium.spaces import SomeSpace, describe, from_wire, space_of, to_wire

try:
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
except ImportError as exc:
    raise ModuleNotFoundError(
        "openenv.adapters.pettingzoo needs PettingZoo: pip install pettingzoo", name=exc.name
    ) from exc

AGENTS_KEY: Final = "x-pettingzoo-agents"
"""The key in the schemas that names the agents, with their spaces."""
_TIMEOUT_S = 30.0

MakeEnv = Callable[[], Any]


# ---- serving ----


class AgentActions(Action):
    """An action for each living agent."""

    actions: dict[str, Any] = Field(description="Actions by agent")


class AgentObservations(Observation):
    """The observation and reward of each agent; `agents` lists the living ones."""

    agents: list[str] = Field(default_factory=list)
    observations: dict[str, Any] = Field(default_factory=dict)
    rewards: dict[str, float] = Field(default_factory=dict)
    terminations: dict[str, bool] = Field(default_factory=dict)
    truncations: dict[str, bool] = Field(default_factory=dict)
    infos: dict[str, dict[str, Any]] = Field(default_factory=dict)


class ServedPettingZoo(Environment[AgentActions, AgentObservations, State]):
    """Base of the classes that `pettingzoo_environment` makes.

    The reward of an observation is the sum over the agents; an episode is over when none lives.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    name: ClassVar[str]
    make: ClassVar[MakeEnv]
    action_cls: ClassVar[type[AgentActions]]
    observation_cls: ClassVar[type[AgentObservations]]

    def __init__(self) -> None:
        super().__init__()
        self._env = type(self).make()
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Begin an episode."""
        observations, infos = self._env.reset(seed=seed, options=options)
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        return self._seen(observations, infos)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Take an action for each living agent.

        Raises:
            ValueError: The actions do not match the living agents.
        """
        # PettingZoo ignores missing and unknown agents. A typo in a name would then look like a lazy agent.
        living, named = list(self._env.agents), list(action.actions)
        if sorted(living) != sorted(named):
            raise ValueError(f"there must be an action for each of {living}, not for {named}")
        self._state.step_count += 1
        observations, rewards, terminations, truncations, infos = self._env.step(dict(action.actions))
        # PettingZoo removes finished agents from `agents`; an empty list is the end of the episode.
        is_over = not self._env.agents
        return self._seen(
            observations,
            infos,
            rewards={agent: float(reward) for agent, reward in rewards.items()},
            terminations={agent: bool(value) for agent, value in terminations.items()},
            truncations={agent: bool(value) for agent, value in truncations.items()},
            reward=float(sum(rewards.values())),
            done=is_over,
            # The episode counts as terminated if any agent terminated in the last step, else as truncated.
            terminated=is_over and any(terminations.values()),
            truncated=is_over and not any(terminations.values()),
        )

    def _seen(self, observations: Mapping[str, Any], infos: Mapping[str, Any], **fields: Any) -> Any:
        # Each agent has its space: agents of one environment may see different things.
        wire = {agent: to_wire(self._env.observation_space(agent), value) for agent, value in observations.items()}
        infos_by_agent = {agent: {str(key): value for key, value in info.items()} for agent, info in infos.items()}
        return self.observation_cls(agents=list(self._env.agents), observations=wire, infos=infos_by_agent, **fields)

    @property
    def state(self) -> State:
        """The episode's id and step count."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(name=self.name, description=f"PettingZoo's {self.name}")

    def close(self) -> None:
        """Close the PettingZoo environment."""
        self._env.close()


def pettingzoo_environment(make: Callable[..., Any], **kwargs: Any) -> type[ServedPettingZoo]:
    """Make an `Environment` class of a PettingZoo environment; its models are `action_cls` and `observation_cls`.

    Args:
        make: A function that makes one, such as `parallel_env` or `env` in a module of PettingZoo.
        kwargs: For the function.

    Raises:
        TypeError: It makes something else.
        UnsupportedSpace: A space of an agent cannot be described.
    """

    def make_parallel() -> Any:
        env = make(**kwargs)
        if isinstance(env, ParallelEnv):
            return env
        if isinstance(env, AECEnv):
            # Environments that declare it convert exactly. Others take turns: each step moves one agent.
            is_parallel = env.metadata.get("is_parallelizable", False)
            return aec_to_parallel(env) if is_parallel else turn_based_aec_to_parallel(env)
        raise TypeError(f"{type(env).__name__} is not a PettingZoo environment: return a ParallelEnv or an AECEnv")

    # Spaces and names belong to instances, so one is made and closed.
    sample = make_parallel()
    try:
        actions = {agent: sample.action_space(agent) for agent in sample.possible_agents}
        agents = {
            agent: {"action": describe(space), "observation": describe(sample.observation_space(agent))}
            for agent, space in actions.items()
        }
        name = str(sample.metadata.get("name") or type(sample.unwrapped).__name__)
    finally:
        sample.close()

    def check(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
        return {agent: _action(actions, agent, value) for agent, value in values.items()}

    # Class names appear in schemas, and must be identifiers.
    title = "".join(part for part in name.title() if part.isalnum())
    # Each agent has its space, so one validator checks the dict as a whole.
    validators: Any = {"check_actions": field_validator("actions")(classmethod(check))}
    members = {
        "__doc__": f"PettingZoo's {name}.",
        "__module__": __name__,
        "name": name,
        "make": staticmethod(make_parallel),
        "action_cls": create_model(
            f"{title}Actions", __base__=_described(AgentActions, agents), __validators__=validators
        ),
        "observation_cls": create_model(f"{title}Observations", __base__=_described(AgentObservations, agents)),
    }
    made = new_class(f"{title}Environment", (ServedPettingZoo,), exec_body=lambda space: space.update(members))
    make_picklable(made, pettingzoo_environment, (make, kwargs))
    return made


def _described(base: type[AgentActions] | type[AgentObservations], agents: dict[str, Any]) -> Any:
    config = ConfigDict(**{**base.model_config, "json_schema_extra": {AGENTS_KEY: agents}})
    return type(f"{base.__name__}Base", (base,), {"model_config": config, "__module__": __name__})


def _action(spaces: Mapping[str, SomeSpace], agent: str, value: Any) -> Any:
    """Return an agent's action as a value of its space.

    Raises:
        ValueError: There is no such agent, or the space has no such value.
    """
    if agent not in spaces:
        raise ValueError(f"unknown agent {agent!r}")
    read = from_wire(spaces[agent], value)
    # Converting alone would accept values outside of the bounds.
    if not spaces[agent].contains(read):
        raise ValueError(f"{value!r} is not in the action space of {agent}")
    return read


# ---- using a served environment ----


class ServedParallelEnv(ParallelEnv):  # type: ignore[misc]
    """A served environment of many agents behind PettingZoo's parallel interface.

    A session that is lost raises; no reward is made up for it.

    Args:
        url: The server; or a class of `pettingzoo_environment`, which runs in a process of this machine.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`.

    Raises:
        ValueError: The server's schemas name no agents.
        UnsupportedSpace: A space is of another kind, or too large.
    """

    def __init__(self, url: str | type[ServedPettingZoo], *, token: str | None = None, **options: Any) -> None:
        if isinstance(url, str) and not is_environment(url, options.get("workers")):
            connection = ConnectionOptions(connect_timeout_s=_TIMEOUT_S, headers=with_token(None, token))
            schemas = read_schemas(url, connection)
        else:
            schemas = schemas_of(url)
        described = schemas.get("action", {}).get(AGENTS_KEY)
        if not isinstance(described, dict):
            raise ValueError(f"{url} serves no environment of many agents")
        self.metadata = {"name": url if isinstance(url, str) else url.name, "render_modes": []}
        self.render_mode = None
        self.possible_agents = list(described)
        self.agents: list[str] = []
        if not all(isinstance(spaces, Mapping) for spaces in described.values()):
            raise ValueError(f"{url} describes no spaces of its agents")
        self.action_spaces = {agent: space_of(spaces.get("action")) for agent, spaces in described.items()}
        self.observation_spaces = {agent: space_of(spaces.get("observation")) for agent, spaces in described.items()}
        self._env: VectorEnv[Any, Any] = VectorEnv(url, 1, autoreset="disabled", token=token, **options)

    def action_space(self, agent: str) -> SomeSpace:
        """Return the action space of an agent."""
        return self.action_spaces[agent]

    def observation_space(self, agent: str) -> SomeSpace:
        """Return the observation space of an agent."""
        return self.observation_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        # Options are sent only if they are given: environments without that parameter would refuse it.
        extra: dict[str, Any] = {} if options is None else {"options": options}
        fields = self._only(lambda: self._env.reset(seed=seed, **extra))
        return self._observations(fields), self._infos(fields)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Take an action for each living agent.

        Raises:
            NonFiniteReward: A reward is NaN, infinite or not a number.
        """
        wire = {agent: to_wire(self.action_spaces[agent], action) for agent, action in actions.items()}
        fields = self._only(lambda: self._env.step([{"actions": wire}]))
        # PettingZoo gives every agent a reward in every step, so a missing one was not a number.
        rewards = {agent: _reward(value) for agent, value in fields["rewards"].items()}
        ends = (dict(fields[name]) for name in ("terminations", "truncations"))
        return (self._observations(fields), rewards, *ends, self._infos(fields))

    def close(self) -> None:
        """End the session."""
        self._env.close()

    def _only(self, work: Callable[[], Any]) -> Mapping[str, Any]:
        try:
            result = work()
        # The single slot's error is the caller's error.
        except SlotsFailed as exc:
            raise exc.errors[0] from None
        fields: Mapping[str, Any] = result.observations[0]
        # As in PettingZoo, `agents` shrinks while an episode goes on.
        self.agents = list(fields["agents"])
        return fields

    def _observations(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            agent: from_wire(self.observation_spaces[agent], value) for agent, value in fields["observations"].items()
        }

    def _infos(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {agent: dict(info) for agent, info in (fields.get("infos") or {}).items()}


def _reward(value: Any) -> float:
    reward = finite_reward(value)
    if reward is None:
        raise NonFiniteReward.of(value)
    return float(reward)
