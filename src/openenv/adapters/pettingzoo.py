"""PettingZoo, both ways: serve its environments of several agents, and use served ones as its environments.

Needs pettingzoo. A step takes an action for each agent in the observation's `acting`: all living agents in a parallel
environment, the agent whose turn it is in an environment of turns (`AECEnv`). Environments of turns whose agents act at
the same time are served by PettingZoo's own conversion to parallel ones.

    parallel    agents: a b c    acting: a b c    {"actions": {"a": 0, "b": 2, "c": 1}}
    turns       agents: a b c    acting: b        {"actions": {"b": 2}}
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from types import new_class
from typing import Annotated, Any, ClassVar, Final, Generic

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from openenv.adapters import importing
from openenv.client.network import ConnectionOptions, with_token
from openenv.client.schema_client import read_schemas
from openenv.client.vector.vector_env import VectorEnv, is_environment
from openenv.env.environment import Environment
from openenv.errors import NonFiniteReward, RequestValidationError, SlotsFailed
from openenv.protocol.json_values import finite_reward
from openenv.server.vectors import schemas_of
from openenv.types import Action, ActT, EnvironmentMetadata, Observation, ObsT, State

with importing("pettingzoo>=1.27", needed_by="openenv.adapters.pettingzoo"):
    import pettingzoo
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.env_registry.exceptions import PettingZooRegistryError
    from pettingzoo.utils.conversions import aec_to_parallel

from .gymnasium.served_gymnasium import RENDER_KEY, make_picklable, picture_of
from .gymnasium.spaces import SomeSpace, UnsupportedSpace, checker, describe, from_wire, schema_of, space_of, to_wire

AGENTS_KEY: Final = "x-pettingzoo-agents"
"""The key in the schemas that names the agents, with their spaces."""
TURNS_KEY: Final = "x-pettingzoo-turns"
"""The key in the schemas that says whether agents act one after another."""
_TIMEOUT_S = 30.0

MakeEnv = Callable[..., Any]


# ---- serving ----


class AgentActions(Action):
    """An action for each acting agent."""

    actions: dict[str, Any] = Field(description="Actions by agent")


class AgentObservations(Observation):
    """The observation and reward of each agent."""

    agents: list[str] = Field(default_factory=list, description="The living agents")
    acting: list[str] = Field(default_factory=list, description="The agents that the next step needs an action of")
    observations: dict[str, Any] = Field(default_factory=dict)
    rewards: dict[str, float] = Field(default_factory=dict)
    terminations: dict[str, bool] = Field(default_factory=dict)
    truncations: dict[str, bool] = Field(default_factory=dict)
    infos: dict[str, dict[str, Any]] = Field(default_factory=dict)


class ServedPettingZoo(Environment[ActT, ObsT, State], Generic[ActT, ObsT]):
    """Base of the classes that `pettingzoo_environment` makes.

    The reward of an observation is the sum over the agents; an episode is over when none lives. `reset` takes
    PettingZoo's `options`; with `render=True` each observation's metadata holds a picture.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    name: ClassVar[str]
    make: ClassVar[MakeEnv]
    action_cls: ClassVar[type[AgentActions]]
    observation_cls: ClassVar[type[AgentObservations]]
    spaces: ClassVar[Mapping[str, SomeSpace]]
    """The observation space of each agent."""

    def __init__(self) -> None:
        super().__init__()
        self._env = type(self).make()
        self._is_rendered = False
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        options: dict[str, Any] | None = None,
        render: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Begin an episode."""
        # PettingZoo fixes the render mode at construction, so a change of mode needs a new environment.
        if render != self._is_rendered:
            self._env.close()
            self._env = type(self).make(render_mode="rgb_array") if render else type(self).make()
            self._is_rendered = render
        begun = self._env.reset(seed=seed, options=options)
        self._state = State(episode_id=episode_id or str(uuid.uuid4()))
        if begun is None:  # an environment of turns returns nothing
            return self._observed(self._views(), self._env.infos)
        return self._observed(*begun)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Take an action for each acting agent.

        Raises:
            RequestValidationError: The actions do not match the acting agents.
        """
        # PettingZoo ignores missing and unknown agents. A typo in a name would then look like a lazy agent.
        acting, named = self._acting(), list(action.actions)
        if sorted(acting) != sorted(named):
            raise RequestValidationError(f"there must be an action for each of {acting}, not for {named}")
        self._state.step_count += 1
        if isinstance(self._env, AECEnv):
            results = self._take_turn(action.actions[acting[0]]) if acting else ({}, {}, {}, {}, {})
        else:
            results = self._env.step({agent: action.actions[str(agent)] for agent in self._env.agents})
        observations, rewards, terminations, truncations, infos = results
        # PettingZoo removes finished agents from `agents`; an empty list is the end of the episode.
        is_over = not self._env.agents
        return self._observed(
            observations,
            infos,
            rewards={str(agent): float(reward) for agent, reward in rewards.items()},
            terminations={str(agent): bool(value) for agent, value in terminations.items()},
            truncations={str(agent): bool(value) for agent, value in truncations.items()},
            reward=float(sum(rewards.values())),
            done=is_over,
            # The episode counts as terminated if any agent terminated in the last step, else as truncated.
            terminated=is_over and any(terminations.values()),
            truncated=is_over and not any(terminations.values()),
        )

    def _acting(self) -> list[str]:
        if isinstance(self._env, AECEnv):
            return [str(self._env.agent_selection)] if self._env.agents else []
        return [str(agent) for agent in self._env.agents]

    def _take_turn(self, action: Any) -> tuple[Any, ...]:
        env = self._env
        env.step(action)
        ends = dict(env.terminations), dict(env.truncations)
        views, rewards, infos = self._views(), dict(env.rewards), dict(env.infos)
        # Finished agents leave with an empty turn each, which nobody has to send.
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            views[env.agent_selection] = env.observe(env.agent_selection)
            env.step(None)
        if env.agents:  # a view may depend on whose turn it is, such as the mask of legal moves
            views[env.agent_selection] = env.observe(env.agent_selection)
        return views, rewards, *ends, infos

    def _views(self) -> dict[Any, Any]:
        return {agent: self._env.observe(agent) for agent in self._env.agents}

    def _observed(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any], **fields: Any) -> Any:
        # Each agent has its space: agents of one environment may see different things. PettingZoo allows numbers as
        # names of agents and keys of infos, JSON only texts.
        wire = {str(agent): to_wire(self.spaces[str(agent)], value) for agent, value in observations.items()}
        plain = {str(agent): {str(key): value for key, value in info.items()} for agent, info in infos.items()}
        return self.observation_cls(
            agents=[str(agent) for agent in self._env.agents],
            acting=self._acting(),
            observations=wire,
            infos=plain,
            metadata={RENDER_KEY: picture_of(self._env.render())} if self._is_rendered else {},
            **fields,
        )

    @property
    def state(self) -> State:
        """The episode's id and step count."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Describe the environment."""
        return EnvironmentMetadata(
            name=self.name, description=f"PettingZoo's {self.name}", version=pettingzoo.__version__
        )

    def close(self) -> None:
        """Close the PettingZoo environment."""
        self._env.close()


def pettingzoo_target(name: str) -> type[ServedPettingZoo[Any, Any]]:
    """Make the class that `openenv serve pettingzoo:NAME` serves.

    Raises:
        ValueError: There is no such environment, or its spaces cannot be described.
    """
    try:
        return pettingzoo_environment(name)
    except (PettingZooRegistryError, TypeError) as exc:
        raise ValueError(str(exc)) from exc


def pettingzoo_environment(make: str | MakeEnv, **kwargs: Any) -> type[ServedPettingZoo[Any, Any]]:
    """Make an `Environment` class of a PettingZoo environment; its models are `action_cls` and `observation_cls`.

    Args:
        make: A registered ID such as `classic/tictactoe_v3`; a module with `parallel_env` or `env`, such as
            `mpe2.simple_spread_v3`, or `module:function`; or a function that makes one.
        kwargs: For the function.

    Raises:
        TypeError: It makes something else.
        ValueError: There is no such environment.
        UnsupportedSpace: A space of an agent cannot be described.
    """
    maker = _maker_of(make) if isinstance(make, str) else make

    def make_table(**more: Any) -> Any:
        env = maker(**kwargs, **more)
        if isinstance(env, ParallelEnv):
            return env
        if not isinstance(env, AECEnv):
            raise TypeError(f"{type(env).__name__} is not a PettingZoo environment: return a ParallelEnv or an AECEnv")
        # Environments that declare it convert exactly.
        return aec_to_parallel(env) if env.metadata.get("is_parallelizable", False) else env

    # Spaces and names belong to instances, so one is made and closed.
    sample = make_table()
    try:
        names = getattr(sample, "possible_agents", None)
        if not names:
            raise UnsupportedSpace(f"{type(sample.unwrapped).__name__} does not name its possible_agents")
        actions = {str(agent): sample.action_space(agent) for agent in names}
        views = {str(agent): sample.observation_space(agent) for agent in names}
        name = str(sample.metadata.get("name") or type(sample.unwrapped).__name__)
    finally:
        sample.close()
    models = _models(name, actions, views, takes_turns=isinstance(sample, AECEnv))
    members = {
        "__doc__": f"PettingZoo's {name}.",
        "__module__": __name__,
        "name": name,
        "make": staticmethod(make_table),
        "spaces": views,
        **models,
    }
    base: Any = ServedPettingZoo
    made: type[ServedPettingZoo[Any, Any]] = new_class(
        f"{_title(name)}Environment",
        (base[models["action_cls"], models["observation_cls"]],),
        exec_body=lambda space: space.update(members),
    )
    make_picklable(made, pettingzoo_environment, (make, kwargs))
    return made


def _maker_of(name: str) -> MakeEnv:
    """Return the function that makes an environment, by its ID or its module. Parallel environments come first.

    Raises:
        ValueError: There is no such environment.
    """
    for kind in ("parallel", "aec"):
        try:
            return partial(pettingzoo.make, kind, pettingzoo.spec(kind, name).id)
        except PettingZooRegistryError as exc:
            unknown = exc
    place, _, wanted = name.partition(":")
    if not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(str(unknown))
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{place}.".startswith(f"{exc.name}."):
            raise
        raise ValueError(f"PettingZoo has no environment {name!r}, and there is no module {place}") from None
    for function in (wanted,) if wanted else ("parallel_env", "env"):
        if callable(made := getattr(module, function, None)):
            maker: MakeEnv = made
            return maker
    raise ValueError(f"the module {place} has no function {wanted or 'parallel_env or env'}")


def _title(name: str) -> str:
    """Return a name as an identifier: class names appear in schemas."""
    return "".join(part for part in name.title() if part.isalnum())


def _models(
    name: str, actions: Mapping[str, SomeSpace], views: Mapping[str, SomeSpace], *, takes_turns: bool
) -> dict[str, Any]:
    """Make the models of actions and observations, with the spaces of each agent in their schemas."""
    agents = {agent: {"action": describe(actions[agent]), "observation": describe(views[agent])} for agent in actions}
    extra = {AGENTS_KEY: agents, TURNS_KEY: takes_turns}
    checkers = {agent: checker(space) for agent, space in actions.items()}

    def check(values: Any) -> Any:
        if not isinstance(values, Mapping):
            raise ValueError("there must be an object with an action for each acting agent")
        return {agent: _checked(checkers, agent, value) for agent, value in values.items()}

    # Each agent has its space, so one validator checks the dict as a whole.
    action_field = Annotated[dict[str, Any], BeforeValidator(check), _schema(actions)]
    observation_field = Annotated[dict[str, Any], _schema(views)]
    return {
        "action_cls": create_model(
            f"{_title(name)}Actions",
            __base__=_described(AgentActions, extra),
            actions=(action_field, Field(description="Actions by agent")),
        ),
        "observation_cls": create_model(
            f"{_title(name)}Observations",
            __base__=_described(AgentObservations, extra),
            observations=(observation_field, Field(default_factory=dict)),
        ),
    }


def _schema(spaces: Mapping[str, SomeSpace]) -> WithJsonSchema:
    # No agent is required: finished agents and those that wait for their turn are left out.
    properties = {agent: {"title": agent, **schema_of(space)} for agent, space in spaces.items()}
    return WithJsonSchema({"type": "object", "properties": properties, "additionalProperties": False})


def _described(base: type[AgentActions] | type[AgentObservations], extra: dict[str, Any]) -> Any:
    config = ConfigDict(**{**base.model_config, "json_schema_extra": extra})
    return type(f"{base.__name__}Base", (base,), {"model_config": config, "__module__": __name__})


def _checked(checkers: Mapping[str, Callable[[Any], Any]], agent: str, value: Any) -> Any:
    """Return an agent's action as a value of its space.

    Raises:
        ValueError: There is no such agent, or the space has no such value.
    """
    if agent not in checkers:
        raise ValueError(f"unknown agent {agent!r}")
    try:
        return checkers[agent](value)
    except ValueError as exc:
        raise ValueError(f"the action of {agent}: {exc}") from None


# ---- using a served environment ----


class _ServedAgents:
    """One session of a served environment of several agents, with their spaces.

    A session that is lost raises; no reward is made up for it.
    """

    _TURNS: ClassVar[bool]
    """Whether agents act one after another."""

    agents: list[str]

    def __init__(
        self, url: str | type[ServedPettingZoo[Any, Any]], *, token: str | None = None, **options: Any
    ) -> None:
        if isinstance(url, str) and not is_environment(url, options.get("workers")):
            connection = ConnectionOptions(connect_timeout_s=_TIMEOUT_S, headers=with_token(None, token))
            schemas = read_schemas(url, connection)
        else:
            schemas = schemas_of(url)
        schema = schemas.get("action", {})
        described = schema.get(AGENTS_KEY)
        if not isinstance(described, dict):
            raise ValueError(f"{url} serves no environment of many agents")
        if not all(isinstance(spaces, Mapping) for spaces in described.values()):
            raise ValueError(f"{url} describes no spaces of its agents")
        if self._TURNS and not schema.get(TURNS_KEY):
            raise ValueError(f"the agents of {url} act at the same time: use parallel_to_aec(ServedParallelEnv(url))")
        self.metadata = {
            "name": url if isinstance(url, str) else url.name,
            "render_modes": [],
            "is_parallelizable": not self._TURNS,
        }
        self.render_mode = None
        self.possible_agents = list(described)
        self.agents = []
        self.acting: list[str] = []
        """The agents that the next step needs an action of."""
        self.action_spaces = {agent: space_of(spaces.get("action")) for agent, spaces in described.items()}
        self.observation_spaces = {agent: space_of(spaces.get("observation")) for agent, spaces in described.items()}
        self._env: VectorEnv[Any, Any] = VectorEnv(url, 1, autoreset="disabled", token=token, **options)

    def action_space(self, agent: str) -> SomeSpace:
        """Return the action space of an agent."""
        return self.action_spaces[agent]

    def observation_space(self, agent: str) -> SomeSpace:
        """Return the observation space of an agent."""
        return self.observation_spaces[agent]

    def close(self) -> None:
        """End the session."""
        self._env.close()

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> Mapping[str, Any]:
        # Options are sent only if they are given: environments without that parameter would refuse it.
        extra: dict[str, Any] = {} if options is None else {"options": options}
        return self._only(lambda: self._env.reset(seed=seed, **extra))

    def _act(self, actions: Mapping[str, Any]) -> Mapping[str, Any]:
        wire = {agent: to_wire(self.action_spaces[agent], action) for agent, action in actions.items()}
        return self._only(lambda: self._env.step([{"actions": wire}]))

    def _only(self, work: Callable[[], Any]) -> Mapping[str, Any]:
        try:
            result = work()
        # The single slot's error is the caller's error.
        except SlotsFailed as exc:
            raise exc.errors[0] from None
        fields: Mapping[str, Any] = result.observations[0]
        self.acting = list(fields.get("acting", fields["agents"]))  # older servers do not send it
        return fields

    def _observations(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            agent: from_wire(self.observation_spaces[agent], value) for agent, value in fields["observations"].items()
        }

    def _rewards(self, fields: Mapping[str, Any]) -> dict[str, float]:
        # PettingZoo gives every agent a reward in every step, so a missing one was not a number.
        return {agent: _reward(value) for agent, value in fields["rewards"].items()}

    def _infos(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {agent: dict(info) for agent, info in (fields.get("infos") or {}).items()}


class ServedParallelEnv(_ServedAgents, ParallelEnv):  # type: ignore[misc]
    """A served environment of several agents behind PettingZoo's parallel interface.

    If agents take turns, `step` uses the action of the agent in `acting` and ignores the others, as PettingZoo's own
    conversion does.

    Args:
        url: The server; or a class of `pettingzoo_environment`, which runs in a process of this machine.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`.

    Raises:
        ValueError: The server's schemas name no agents.
        UnsupportedSpace: A space is of another kind, or too large.
    """

    _TURNS = False

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        fields = self._reset(seed, options)
        self.agents = list(fields["agents"])
        return self._observations(fields), self._infos(fields)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Take an action for each living agent.

        Raises:
            NonFiniteReward: A reward is NaN, infinite or not a number.
        """
        takes_turns = len(self.acting) < len(self.agents)
        fields = self._act({agent: actions[agent] for agent in self.acting} if takes_turns else actions)
        # As in PettingZoo, `agents` shrinks while an episode goes on.
        self.agents = list(fields["agents"])
        ends = (dict(fields[name]) for name in ("terminations", "truncations"))
        return (self._observations(fields), self._rewards(fields), *ends, self._infos(fields))


class ServedAECEnv(_ServedAgents, AECEnv):  # type: ignore[misc]
    """A served environment of turns behind PettingZoo's interface of turns: `agent_iter`, `last`, `step`.

    Args:
        url: The server; or a class of `pettingzoo_environment`, which runs in a process of this machine.
        token: Sent as `Authorization: Bearer`; by default `OPENENV_TOKEN`.
        options: For `VectorEnv`.

    Raises:
        ValueError: The server's schemas name no agents, or its agents act at the same time.
        UnsupportedSpace: A space is of another kind, or too large.
    """

    _TURNS = True

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode."""
        fields = self._reset(seed, options)
        self.agents = list(fields["agents"])
        self.agent_selection = self.acting[0]
        self._skip_agent_selection: str | None = None
        self._views = self._observations(fields)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: self._infos(fields).get(agent, {}) for agent in self.agents}

    def observe(self, agent: str) -> Any:
        """Return what an agent saw last."""
        return self._views[agent]

    def step(self, action: Any) -> None:
        """Take the action of `agent_selection`; None for a finished agent, which then leaves.

        Raises:
            NonFiniteReward: A reward is NaN, infinite or not a number.
            ValueError: A finished agent acts.
        """
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        fields = self._act({agent: action})
        self._cumulative_rewards[agent] = 0.0
        self._views |= self._observations(fields)
        self.rewards = self._rewards(fields)
        # The server has removed the agents that finished now. Here each of them leaves with a turn.
        self.agents = list(self.rewards)
        self.terminations = dict(fields["terminations"])
        self.truncations = dict(fields["truncations"])
        self.infos = {each: self._infos(fields).get(each, {}) for each in self.agents}
        self._cumulative_rewards = {each: self._cumulative_rewards.get(each, 0.0) for each in self.agents}
        self._accumulate_rewards()
        self.agent_selection = self.acting[0] if self.acting else agent
        self._deads_step_first()


def _reward(value: Any) -> float:
    reward = finite_reward(value)
    if reward is None:
        raise NonFiniteReward.of(value)
    return float(reward)
