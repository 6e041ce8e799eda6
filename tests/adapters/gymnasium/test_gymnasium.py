"""Gymnasium both ways over a real server: its environments served, served environments used as its own."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

import http_calls
from environments import Idle
from openenv import GenericEnvClient, Observation, create_app
from openenv.adapters.gymnasium import GymnasiumEnv, GymnasiumVectorEnv, gymnasium_environment
from openenv.adapters.gymnasium.spaces import (
    UnsupportedSpace,
    checker,
    derive,
    describe,
    from_wire,
    schema_of,
    space_of,
    to_wire,
)
from openenv.client.vector.vector_env import VectorEnv
from openenv.env.binding import infer_models
from openenv.errors import ClientModeError, NonFiniteReward, NoRewards, RequestValidationError, SlotsFailed
from openenv.protocol.codec import MSGPACK
from openenv.protocol.json_values import decode, encode
from openenv.server.loading import TargetError, load_app
from openenv.server.local import LocalEnv
from openenv.types import Action
from servers import Serve

SPACES: dict[str, gymnasium.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=-1),
    "box": spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    "unbounded": spaces.Box(np.array([-np.inf, 0.1]), np.array([np.inf, 7.5]), dtype=np.float64),
    "bytes": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "scalar": spaces.Box(0, 1, (), np.float32),
    "multi_discrete": spaces.MultiDiscrete([3, 4], start=[1, 0]),
    "multi_binary": spaces.MultiBinary([2, 2]),
    "text": spaces.Text(5, min_length=0, charset="abc"),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,), np.float32))),
    "dict": spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.MultiBinary(3)})}),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(one, other))


class Mirror(gymnasium.Env[Any, Any]):
    """Shows the last action; its actions are its observations."""

    def __init__(self, space: gymnasium.Space[Any], render_mode: str | None = None) -> None:
        self.action_space = self.observation_space = space
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = render_mode
        self.last: Any = None
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        self.last = self.observation_space.sample()
        return self.last, {"options": options}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.last = action
        self.steps += 1
        return action, np.float32(0.5), self.steps == 3, self.steps == 4, {"steps": np.int64(self.steps)}

    def render(self) -> Any:
        return np.full((2, 3, 3), self.steps, np.uint8)


@pytest.fixture
def mirror(serve: Serve) -> Callable[[str], str]:
    """Serve the mirror of a space."""

    def start(name: str) -> str:
        cls = gymnasium_environment(lambda **kwargs: Mirror(SPACES[name], **kwargs))
        url: str = serve(create_app(cls, cls.action_cls, cls.observation_cls, max_concurrent_envs=32)).url
        return url

    return start


@pytest.fixture(scope="module")
def cart_pole(serve_once: Serve) -> str:
    """A server of CartPole."""
    url: str = serve_once(load_app("gymnasium:CartPole-v1")).url
    return url


@pytest.mark.parametrize("name", SPACES)
def test_a_space_survives_its_description(name: str) -> None:
    space = SPACES[name]
    assert space_of(decode(encode(describe(space)))) == space
    assert schema_of(space)


@pytest.mark.parametrize("name", SPACES)
def test_values_survive_both_encodings(name: str) -> None:
    space = SPACES[name]
    space.seed(3)
    for _ in range(20):
        value = space.sample()
        plain = decode(encode({"v": to_wire(space, value)}))["v"]
        packed = MSGPACK.decode(MSGPACK.encode({"v": to_wire(space, value)}), binary=True)["v"]
        for back in (checker(space)(plain), checker(space)(packed)):
            assert same(back, value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=6))
def test_what_is_no_value_is_a_value_error(junk: Any) -> None:
    for space in SPACES.values():
        try:
            assert space.contains(checker(space)(junk))
        except ValueError:
            pass


@pytest.mark.parametrize("junk", [300, -1, 0.5, "1", None, 1e300, 2**70, True])
def test_a_number_that_is_no_byte_does_not_become_one(junk: Any) -> None:
    space = spaces.Box(0, 255, (1,), np.uint8)
    if junk is True:
        assert checker(space)([junk]) == [1]
    else:
        with pytest.raises(ValueError):
            checker(space)([junk])


def test_numbers_that_json_lost_are_nan() -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert [math.isnan(number) for number in from_wire(space, [None, 1.0])] == [True, False]


def test_other_spaces_are_refused() -> None:
    with pytest.raises(UnsupportedSpace):
        describe(spaces.Sequence(spaces.Discrete(2)))
    with pytest.raises(UnsupportedSpace):
        space_of({"type": "Sphere"})


@pytest.mark.parametrize("name", SPACES)
def test_actions_and_observations_of_every_space_travel(name: str, mirror: Callable[[str], str]) -> None:
    env = GymnasiumEnv(mirror(name))
    try:
        assert env.action_space == SPACES[name]
        assert env.observation_space == SPACES[name]
        env.action_space.seed(1)
        first, info = env.reset(seed=5, options={"level": 2})
        assert env.observation_space.contains(first)
        assert info == {"options": {"level": 2}}
        for turn in range(1, 4):
            action = env.action_space.sample()
            observation, reward, terminated, truncated, info = env.step(action)
            assert same(observation, action)
            assert env.observation_space.contains(observation)
            assert (reward, terminated, truncated, info) == (0.5, turn == 3, False, {"steps": turn})
    finally:
        env.close()


def test_a_served_environment_passes_gymnasiums_checker(cart_pole: str) -> None:
    env = GymnasiumEnv(cart_pole)
    try:
        check_env(env, skip_render_check=True)
    finally:
        env.close()


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_a_served_episode_is_the_same_as_a_local_one(cart_pole: str, codec: Any) -> None:
    served, local = GymnasiumEnv(cart_pole, codec=codec), gymnasium.make("CartPole-v1")
    try:
        assert np.array_equal(served.reset(seed=7)[0], local.reset(seed=7)[0])
        local.action_space.seed(7)
        for _ in range(200):
            action = local.action_space.sample()
            one, other = served.step(action), local.step(action)
            assert np.array_equal(one[0], other[0])
            assert one[0].dtype == other[0].dtype
            assert one[1:4] == other[1:4]
            if one[2] or one[3]:
                break
        assert one[2]
    finally:
        served.close()
        local.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_many_sessions_are_a_gymnasium_vector(cart_pole: str, mode: Any) -> None:
    served = GymnasiumVectorEnv(cart_pole, 4, autoreset=mode, connections=2)
    local = gymnasium.make_vec(
        "CartPole-v1", 4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": served.metadata["autoreset_mode"]}
    )
    try:
        assert served.action_space == local.action_space
        assert served.observation_space == local.observation_space
        assert np.array_equal(served.reset(seed=3)[0], local.reset(seed=3)[0])
        over = np.zeros(4, bool)
        for _ in range(12):
            actions = np.ones(4, np.int64)
            one, other = served.step(actions), local.step(actions)
            fresh = ~over
            over |= other[2] | other[3]
            still = fresh & ~over if mode == "same_step" else fresh
            assert np.array_equal(one[0][still], other[0][still])  # an episode that began by itself has no seed
            assert np.array_equal(one[1], other[1])
            assert np.array_equal(one[2][fresh], other[2][fresh])
            if mode == "same_step" and (other[2] & fresh).any():
                ended = np.flatnonzero(other[2] & fresh)[0]
                assert np.array_equal(one[4]["final_obs"][ended], other[4]["final_obs"][ended])
        assert over.any()
        assert one[1].dtype == np.float64
        assert served.observation_space.contains(one[0])
    finally:
        served.close()
        local.close()


def test_vectors_of_nested_spaces_are_batched(mirror: Callable[[str], str]) -> None:
    env = GymnasiumVectorEnv(mirror("dict"), 3)
    try:
        observations, _ = env.reset(seed=[1, 2, 3])
        assert env.observation_space.contains(observations)
        actions = env.action_space.sample()
        assert same(env.step(actions)[0], actions)
    finally:
        env.close()


def test_an_action_outside_its_space_is_refused(cart_pole: str) -> None:
    env = GymnasiumEnv(cart_pole)
    try:
        env.reset()
        for wrong in (2, -1):
            with pytest.raises(RequestValidationError, match="is not in Discrete"):
                env.step(wrong)
        env.step(1)
    finally:
        env.close()
    with pytest.raises(ClientModeError):
        env.reset()


def test_the_schemas_tell_the_spaces(cart_pole: str) -> None:
    schemas = http_calls.get(f"{cart_pole}/schema").json()
    assert schemas["action"]["x-gymnasium-space"] == {"type": "Discrete", "n": 2, "start": 0}
    assert schemas["action"]["properties"]["action"]["maximum"] == 1
    box = schemas["observation"]["x-gymnasium-space"]
    assert (box["type"], box["shape"], box["dtype"]) == ("Box", [4], "<f4")
    assert box["high"][1] == "inf"
    assert http_calls.get(f"{cart_pole}/metadata").json()["name"] == "CartPole-v1"


def test_old_clients_can_play_as_well(cart_pole: str) -> None:
    with GenericEnvClient(base_url=cart_pole).sync() as env:
        assert len(env.reset(seed=1).observation["observation"]) == 4
        result = env.step({"action": 1})
        assert result.reward == 1.0
        assert result.observation["terminated"] is False


def test_pictures_come_on_request(mirror: Callable[[str], str]) -> None:
    url = mirror("discrete")
    env = GymnasiumEnv(url, render_mode="rgb_array")
    plain = GymnasiumEnv(url)
    try:
        env.reset()
        env.step(np.int64(0))
        picture = env.render()
        assert picture.shape == (2, 3, 3)
        assert (picture == 1).all()
        plain.reset()
        assert plain.render() is None
    finally:
        env.close()
        plain.close()


def test_an_environment_of_ones_own_may_be_translated(serve: Serve) -> None:
    cls = gymnasium_environment("CartPole-v1")

    class Push(Action):
        left: bool = False

    class Angle(Observation):
        angle: float = 0.0

    class Own(cls):  # type: ignore[valid-type, misc]
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            super().reset(seed=seed)
            return Angle(angle=1.0)

        def step(self, action: Push, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return Angle(angle=-1.0 if action.left else 1.0, reward=1.0, done=action.left)

    url = serve(create_app(Own, Push, Angle, max_concurrent_envs=2)).url
    for where in (url, GenericEnvClient(base_url=url)):
        env = GymnasiumEnv(
            where,
            action_space=spaces.Discrete(2),
            observation_space=spaces.Box(-2, 2, (1,), np.float32),
            to_action=lambda value: {"left": bool(value)},
            from_observation=lambda fields: np.array([fields["angle"]], np.float32),
        )
        assert env.reset()[0] == [1.0]
        assert env.step(1)[0] == [-1.0]
        env.close()


class Inner(BaseModel):
    """A model in a model."""

    grid: Annotated[list[Annotated[list[int], Field(min_length=2, max_length=2)]], Field(min_length=3, max_length=3)]
    flag: bool = False


class Order(Action):
    """One field of every kind that has a space."""

    count: int = Field(ge=-1, lt=4)
    colour: Literal["red", "green"]
    weight: float = Field(ge=0, le=2)
    word: str = Field(max_length=4)
    inner: Inner


class Receipt(Observation):
    """The same, seen."""

    count: int = Field(0, ge=-1, lt=4)
    colour: Literal["red", "green"] = "red"
    weight: float = 0.0
    word: str = Field("", max_length=4)
    inner: Inner = Inner(grid=[[0, 0]] * 3)


class Shop(Idle):
    """Repeats an order."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Receipt:
        return Receipt()

    def step(self, action: Order, timeout_s: float | None = None, **kwargs: Any) -> Receipt:
        return Receipt(**action.model_dump(exclude={"metadata"}), reward=1.0)


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_spaces_are_read_from_models_where_their_fields_have_some(serve: Serve, codec: Any) -> None:
    env = GymnasiumEnv(serve(create_app(Shop, Order, Receipt)).url, codec=codec)
    try:
        assert env.action_space["count"] == spaces.Discrete(5, start=-1)  # type: ignore[index]
        assert env.action_space["inner"]["grid"].shape == (3, 2)  # type: ignore[index]
        env.action_space.seed(2)
        assert env.observation_space.contains(env.reset()[0])
        for _ in range(10):
            action = env.action_space.sample()
            observation = env.step(action)[0]
            assert same(observation, action)
            assert env.observation_space.contains(observation)
    finally:
        env.close()


@pytest.mark.parametrize(
    "field", [int, str, list[int], int | None, dict[str, int], Annotated[list[str], Field(min_length=1, max_length=1)]]
)
def test_models_with_other_fields_have_no_space(field: Any) -> None:
    class Other(Action):
        thing: field

    with pytest.raises(UnsupportedSpace):
        derive(Other.model_json_schema())
    with pytest.raises(UnsupportedSpace, match="no fields"):
        derive(Action.model_json_schema())


def test_an_environment_without_spaces_asks_for_them(serve: Serve) -> None:
    class Free(Action):
        text: str

    url = serve(create_app(Shop, Free, Receipt)).url
    with pytest.raises(ValueError, match="pass action_space="):
        GymnasiumEnv(url)


class Rare(Idle):
    """Pays what the action says, as text; `none` is a missing reward. Each episode has two steps."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.steps = 0
        return Observation()

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self.steps += 1
        return Observation(reward=None if action.text == "none" else float(action.text), done=self.steps == 2)


class Wish(Action):
    text: str


PAYS = ["none", "1.5", "nan", "inf", "-inf"]
OF_RARE: dict[str, Any] = {
    "action_space": spaces.Discrete(len(PAYS)),
    "observation_space": spaces.Discrete(1),
    "to_action": lambda number: {"text": PAYS[int(number)]},
    "from_observation": lambda fields: 0,
}


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_missing_reward_is_zero_and_one_that_is_not_finite_is_a_failure(serve: Serve, protocol: Any) -> None:
    url = serve(create_app(Rare, Wish, Observation, max_concurrent_envs=8)).url
    one = GymnasiumEnv(url, **OF_RARE, protocol=protocol)
    many = GymnasiumVectorEnv(url, 2, **OF_RARE, protocol=protocol)
    for broken in range(2, len(PAYS)):
        one.reset()
        assert one.step(0)[1] == 0.0
        with pytest.raises(NonFiniteReward):
            one.step(broken)
        many.reset()
        assert many.step(np.array([0, 1]))[1].tolist() == [0.0, 1.5]
        with pytest.raises(SlotsFailed) as caught:
            many.step(np.array([0, broken]))
        assert isinstance(caught.value.errors[1], NonFiniteReward)
    one.close()
    many.close()


def test_an_environment_that_never_gives_a_reward_stops_the_run(serve: Serve) -> None:
    url = serve(create_app(Rare, Wish, Observation, max_concurrent_envs=16)).url
    envs = GymnasiumVectorEnv(url, 16, **OF_RARE, autoreset="same_step")
    envs.reset()
    with pytest.raises(NoRewards, match="No reward in 64 episodes"):
        for _ in range(9):
            assert envs.step(np.zeros(16, int))[1].tolist() == [0.0] * 16
    envs.close()


def test_the_class_says_which_models_it_has() -> None:
    cls = gymnasium_environment("CartPole-v1")
    models = infer_models(cls)
    assert (models.action, models.observation) == (cls.action_cls, cls.observation_cls)


def test_environments_that_answer_at_once_run_inline(serve: Serve) -> None:
    quick, other = (
        gymnasium_environment("CartPole-v1"),
        gymnasium_environment(lambda **kwargs: Mirror(SPACES["box"], **kwargs)),
    )
    assert (quick.RUNS_INLINE, other.RUNS_INLINE) == (True, False)
    for cls, runner, expected in ((quick, "auto", "inline"), (quick, "thread", "thread"), (other, "auto", "thread")):
        server = serve(create_app(cls, cls.action_cls, cls.observation_cls, runner=runner))
        assert server.manager.runner.name == expected


def test_the_class_works_without_a_server() -> None:
    with LocalEnv(gymnasium_environment("CartPole-v1")).sync() as env:
        assert env.reset(seed=1).observation is not None


def test_an_unknown_id_is_reported_in_one_line() -> None:
    with pytest.raises(TargetError, match="NoSuchEnv"):
        load_app("gymnasium:NoSuchEnv-v0")


def test_plain_dicts_work_in_vectors_too(cart_pole: str) -> None:
    with VectorEnv(cart_pole, 3) as env:
        first = env.reset(seed=1)
        assert first.observations[0] is not None
        assert first.observations[0]["observation"].shape == (4,)
        assert env.step([{"action": 0}] * 3).rewards.tolist() == [1.0] * 3


def test_without_gymnasium_the_extra_is_named() -> None:
    script = "import sys; sys.modules['gymnasium'] = None; from openenv.adapters.gymnasium import GymnasiumEnv"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "openenv.adapters.gymnasium needs Gymnasium: pip install 'gymnasium>=1.0'"
    )
