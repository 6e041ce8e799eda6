"""A manifest of behaviours, each with an id and one test, and each test run over every transport."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from pydantic import BaseModel, Field

from behaviours import Manifest
from openenv.env.environment import Environment
from openenv.errors import (
    EnvironmentFactoryError,
    ExecutionError,
    NonFiniteReward,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
)
from openenv.types import Action, Observation, State
from waiting import wait_until

MANIFEST = {
    "round-trip": "reset, step and state reach the environment and come back",
    "episode.seed": "seed and episode_id are passed to reset",
    "reset.filter": "keywords that reset does not name are dropped",
    "reset.open": "a reset with **kwargs gets every keyword",
    "reward.types": "rewards are bool, int, float or None",
    "reward.broken": "a reward that is not a finite number is an error (v1, HTTP: None with a note); the session lives",
    "episode.end": "done, terminated and truncated arrive; unset flags stay away",
    "metadata": "metadata arrives inside the observation and beside it",
    "action.invalid": "an action that does not fit is a RequestValidationError and the session lives",
    "env.raises": "an exception in the environment is an ExecutionError with its message and the session lives",
    "env.raises.reset": "an exception in reset is an ExecutionError and the next reset works",
    "state.first": "state may be asked for before the first reset",
    "state.own": "a state arrives with the fields of its own class",
    "sessions.apart": "two sessions are independent",
    "sessions.capacity": "a full server is a SessionCapacityError with both counts",
    "sessions.factory": "a constructor that fails is an EnvironmentFactoryError with its reason, and frees the slot",
    "sessions.child": "new_session makes a client with a session of its own",
    "close.frees": "close ends the session, closes the environment and frees the slot",
    "close.lost": "after close only reset works, in a new session",
    "payload.large": "messages of 2 MB pass both ways",
    "payload.unicode": "any text passes unchanged",
    "payload.values": "values without a JSON form of their own arrive encoded",
    "episodes.sequential": "many episodes run on one session and one environment",
    "env.async": "environments that override the async methods work alike",
    "env.slow": "a slow step delays no other session",
    "env.exit": "an environment that tries to exit does not end its server",
}
behaviour = Manifest(MANIFEST)


class Do(Action):
    what: str = ""
    value: Any = None


class Saw(Observation):
    text: str = ""
    value: Any = None
    seen: dict[str, Any] = Field(default_factory=dict)


class Inside(State):
    history: list[str] = Field(default_factory=list)


class Lab(Environment[Do, Saw, Inside]):
    """Does what its action says."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    built = 0
    closed = 0
    gate: threading.Event

    def __init__(self) -> None:
        super().__init__()
        type(self).built += 1
        self.history: list[str] = []
        self.episode: str | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Saw:
        self.history, self.episode = [], episode_id
        if kwargs.pop("fail", False):
            raise RuntimeError("no episode today")
        return Saw(text="ready", seen={"seed": seed, "episode_id": episode_id, **kwargs})

    def step(self, action: Do, timeout_s: float | None = None, **kwargs: Any) -> Saw:
        if action.what == "raise":
            raise ValueError("that did not work: ünïcode")
        if action.what == "exit":
            raise SystemExit(3)
        if action.what == "wait":
            assert self.gate.wait(20)
        self.history.append(action.what)
        if action.what == "reward":
            return Saw(reward=action.value)
        if action.what == "broken reward":
            return Saw(reward=float(action.value))
        if action.what == "end":
            return Saw(done=True, terminated=True, truncated=False)
        if action.what == "metadata":
            return Saw(metadata={"deep": {"er": [1, 2]}})
        if action.what == "values":
            return Saw(value={"bytes": b"\xff\x00", "tuple": (1, 2), "model": Model(a=1)})
        return Saw(text=action.what, value=action.value)

    @property
    def state(self) -> Inside:
        return Inside(episode_id=self.episode, step_count=len(self.history), history=self.history)

    def close(self) -> None:
        type(self).closed += 1


class Model(BaseModel):
    a: int


class AsyncLab(Lab):
    """The same, with coroutines; the synchronous methods are never called."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Saw:
        await asyncio.sleep(0)
        return super().reset(seed, episode_id, **kwargs)

    async def step_async(self, action: Do, timeout_s: float | None = None, **kwargs: Any) -> Saw:
        await asyncio.sleep(0)
        return super().step(action)

    def reset(self, *args: Any, **kwargs: Any) -> Saw:
        raise AssertionError("the asynchronous one is meant")

    def step(self, *args: Any, **kwargs: Any) -> Saw:
        raise AssertionError("the asynchronous one is meant")


class Picky(Lab):
    def reset(self, level: int = 1) -> Saw:  # type: ignore[override]
        return Saw(seen={"level": level})


@pytest.fixture
def lab() -> type[Lab]:
    """A class of its own for each test, so that its counts are the test's."""
    return fresh(Lab)


def fresh(cls: type[Lab]) -> type[Lab]:
    return type(cls.__name__, (cls,), {"built": 0, "closed": 0, "gate": threading.Event()})


def fields(result: Any) -> dict[str, Any]:
    """An observation as a dict, whichever way it came."""
    found = result.observation
    return found.model_dump() if isinstance(found, BaseModel) else found


def state_fields(state: Any) -> dict[str, Any]:
    return state.model_dump() if isinstance(state, BaseModel) else state


@behaviour("round-trip")
def test_reset_step_and_state_make_a_round_trip(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    first = client.reset()
    assert (fields(first)["text"], first.reward, first.done) == ("ready", None, False)
    assert fields(client.step({"what": "look"}))["text"] == "look"
    assert state_fields(client.state())["step_count"] == 1


@behaviour("episode.seed")
def test_seed_and_episode_id_reach_reset(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    assert fields(client.reset(seed=7, episode_id="e-1"))["seen"] == {"seed": 7, "episode_id": "e-1"}
    assert state_fields(client.state())["episode_id"] == "e-1"


@behaviour("reset.filter")
def test_keywords_that_reset_does_not_name_are_dropped(way: Any) -> None:
    client = way.serve(fresh(Picky), Do, Saw).client()
    assert fields(client.reset(level=3, seed=1, unknown="x"))["seen"] == {"level": 3}


@behaviour("reset.open")
def test_an_open_reset_gets_every_keyword(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    seen = fields(client.reset(level=3, options={"a": [1]}))["seen"]
    assert seen == {"seed": None, "episode_id": None, "level": 3, "options": {"a": [1]}}


@behaviour("reward.types")
def test_rewards_keep_their_type(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    for reward in (True, False, 3, -2, 0.25, None):
        found = client.step({"what": "reward", "value": reward}).reward
        assert found == reward
        expected = float if way.is_http and reward is not None else type(reward)
        assert type(found) is expected


@behaviour("reward.broken")
def test_a_reward_that_is_not_a_finite_number_is_an_error_and_the_step_counts(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    for count, value in enumerate(("nan", "inf", "-inf"), start=1):
        if way.publishes_null:
            result = client.step({"what": "broken reward", "value": value})
            assert result.reward is None
            assert result.metadata == {"nonfinite_reward": value}
        else:
            with pytest.raises(NonFiniteReward) as caught:
                client.step({"what": "broken reward", "value": value})
            assert (caught.value.code, caught.value.details["value"]) == ("NON_FINITE_REWARD", value)
        assert state_fields(client.state())["step_count"] == count
    assert client.step({"what": "reward", "value": 0.5}).reward == 0.5
    assert client.reset().done is False


@behaviour("episode.end")
def test_the_end_of_an_episode_and_its_cause_arrive(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    going_on = client.step({"what": "look"})
    assert going_on.done is False
    assert fields(going_on).get("terminated") is None
    if not way.is_local:
        assert not {"terminated", "truncated"} & set(fields(going_on))
    ended = client.step({"what": "end"})
    assert ended.done is True
    assert (fields(ended)["terminated"], fields(ended)["truncated"]) == (True, False)


@behaviour("metadata")
def test_metadata_arrives_inside_and_beside(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    assert client.reset().metadata is None
    result = client.step({"what": "metadata"})
    assert result.metadata == fields(result)["metadata"] == {"deep": {"er": [1, 2]}}


@behaviour("action.invalid")
def test_an_action_that_does_not_fit_is_refused_and_the_session_lives(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    client.step({"what": "first"})
    for action, loc in (({"what": 7}, ["what"]), ({"what": "x", "nonsense": 1}, ["nonsense"])):
        with pytest.raises(RequestValidationError) as caught:
            client.step(action)
        assert caught.value.details["errors"][0]["loc"] == loc
    client.step({"what": "second"})
    assert state_fields(client.state())["history"] == ["first", "second"]


@behaviour("env.raises")
def test_an_exception_of_the_environment_is_reported_and_the_session_lives(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    client.step({"what": "first"})
    for _ in range(2):
        with pytest.raises(ExecutionError, match="that did not work: ünïcode"):
            client.step({"what": "raise"})
    client.step({"what": "second"})
    assert state_fields(client.state())["history"] == ["first", "second"]


@behaviour("env.raises.reset")
def test_a_reset_that_fails_is_reported_and_the_next_one_works(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw, sessions=1).client()
    for _ in range(2):
        with pytest.raises(ExecutionError, match="no episode today"):
            client.reset(fail=True)
    assert fields(client.reset())["text"] == "ready"
    # Over HTTP the session that a failed reset has opened is closed: its name may not have reached the client.
    assert lab.built == (3 if way.is_http else 1)


@behaviour("state.first")
def test_state_may_be_asked_for_before_the_first_reset(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    assert state_fields(client.state())["step_count"] == 0
    assert fields(client.reset())["text"] == "ready"


@behaviour("state.own")
def test_a_state_has_the_fields_of_its_own_class(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset(episode_id="e")
    client.step({"what": "a"})
    assert state_fields(client.state()) == {"episode_id": "e", "step_count": 1, "history": ["a"]}


@behaviour("sessions.apart")
def test_two_sessions_are_independent(way: Any, lab: type[Lab]) -> None:
    first, second = way.serve(lab, Do, Saw).client(), way.client()
    first.reset(episode_id="one")
    second.reset(episode_id="two")
    first.step({"what": "a"})
    second.step({"what": "b"})
    first.step({"what": "c"})
    second.reset(episode_id="three")
    assert state_fields(first.state()) == {"episode_id": "one", "step_count": 2, "history": ["a", "c"]}
    assert state_fields(second.state()) == {"episode_id": "three", "step_count": 0, "history": []}


@behaviour("sessions.capacity")
def test_a_full_server_says_so_and_a_freed_slot_can_be_had(way: Any, lab: type[Lab]) -> None:
    if way.is_local:
        pytest.skip("there is no limit in process")
    holder, late = way.serve(lab, Do, Saw, sessions=1).client(), way.client()
    holder.reset()
    for _ in range(3):
        with pytest.raises(SessionCapacityError) as caught:
            late.reset()
        assert (caught.value.active_sessions, caught.value.max_sessions) == (1, 1)
    assert fields(holder.step({"what": "still here"}))["text"] == "still here"
    holder.close()
    assert fields(late.reset())["text"] == "ready"


@behaviour("sessions.factory")
def test_a_constructor_that_fails_is_reported_with_its_reason(way: Any, lab: type[Lab]) -> None:
    broken = threading.Event()
    broken.set()

    def make_lab() -> Lab:
        if broken.is_set():
            raise OSError("no display")
        return lab()

    client = way.serve(make_lab, Do, Saw, sessions=1).client()
    for _ in range(2):
        with pytest.raises(EnvironmentFactoryError) as caught:
            client.reset()
        assert caught.value.factory_name == "make_lab"
        assert "no display" in (caught.value.reason or "")
    broken.clear()
    assert fields(client.reset())["text"] == "ready"


@behaviour("sessions.child")
def test_a_new_session_of_a_client_is_its_own(way: Any, lab: type[Lab]) -> None:
    if way.is_http:
        pytest.skip("a client of HTTP has one session")
    client = way.serve(lab, Do, Saw).client()
    client.reset(episode_id="parent")
    child = client.new_session()
    child.reset(episode_id="child")
    child.step({"what": "a"})
    assert state_fields(client.state())["episode_id"] == "parent"
    assert state_fields(client.state())["step_count"] == 0
    assert lab.built == 2


@behaviour("close.frees")
def test_close_closes_the_environment_and_frees_its_slot(way: Any, lab: type[Lab], serve: Any) -> None:
    way.serve(lab, Do, Saw, sessions=1)
    for number in range(1, 4):
        client = way.client()
        client.reset()
        client.close()
        wait_until(lambda number=number: lab.closed == number)  # type: ignore[misc]
        if way.server is not None:
            way.server.wait_for(lambda: way.server.manager.active == 0)


@behaviour("close.lost")
def test_after_close_only_reset_works(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    client.step({"what": "a"})
    if way.is_http:
        client.close()
        with pytest.raises(SessionLost):
            client.step({"what": "b"})
        return  # a closed HTTP client stays closed, as its library's does
    client.close()
    with pytest.raises(SessionLost):
        client.step({"what": "b"})
    with pytest.raises(SessionLost):
        client.state()
    client.reset()
    assert state_fields(client.state())["history"] == []


@behaviour("payload.large")
def test_large_messages_pass_both_ways(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    text = "0123456789abcdef" * (2 * 1024 * 1024 // 16)
    assert fields(client.step({"what": "big", "value": text}))["value"] == text
    assert fields(client.step({"what": "small"}))["text"] == "small"


@behaviour("payload.unicode")
def test_any_text_passes_unchanged(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    for text in ("żółć", "日本語", "🌍👩‍🚀", "\x00\x1f\x7f", 'quote " back \\ slash', "line\nfeed\u2028", ""):
        assert fields(client.step({"what": text, "value": {text: [text]}}))["value"] == {text: [text]}
        assert fields(client.step({"what": text}))["text"] == text


@behaviour("payload.values")
def test_values_without_a_json_form_arrive_encoded(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    value = client.step({"what": "values"}).observation
    found = value.value if isinstance(value, BaseModel) else value["value"]
    if way.is_local:
        assert found == {"bytes": b"\xff\x00", "tuple": (1, 2), "model": Model(a=1)}
    else:
        assert found == {"bytes": "_wA=", "tuple": [1, 2], "model": {"a": 1}}


@behaviour("episodes.sequential")
def test_many_episodes_run_on_one_environment(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw, sessions=1).client()
    for episode in range(5):
        client.reset(episode_id=f"e{episode}")
        for i in range(3):
            client.step({"what": str(i)})
        assert state_fields(client.state()) == {
            "episode_id": f"e{episode}",
            "step_count": 3,
            "history": ["0", "1", "2"],
        }
    assert lab.built == 1


@behaviour("env.async")
def test_asynchronous_environments_work_alike(way: Any) -> None:
    lab = fresh(AsyncLab)
    client = way.serve(lab, Do, Saw).client()
    assert fields(client.reset(seed=1, level=2))["seen"] == {"seed": 1, "episode_id": None, "level": 2}
    assert fields(client.step({"what": "a"}))["text"] == "a"
    with pytest.raises(ExecutionError, match="did not work"):
        client.step({"what": "raise"})
    assert state_fields(client.state())["history"] == ["a"]
    client.close()
    wait_until(lambda: lab.closed == 1)


@behaviour("env.slow")
def test_a_slow_step_does_not_hold_up_other_sessions(way: Any, lab: type[Lab]) -> None:
    way.serve(lab, Do, Saw)
    slow, quick = way.client(), way.client()
    slow.reset()
    quick.reset()
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(fields(slow.step({"what": "wait"}))["text"]))
    waiting.start()
    try:
        for i in range(5):
            assert fields(quick.step({"what": str(i)}))["text"] == str(i)
        assert answers == []
    finally:
        lab.gate.set()
        waiting.join(20)
    assert answers == ["wait"]


@behaviour("env.exit")
def test_an_environment_that_tries_to_exit_does_not_end_its_server(way: Any, lab: type[Lab]) -> None:
    client = way.serve(lab, Do, Saw).client()
    client.reset()
    with pytest.raises(ExecutionError):
        client.step({"what": "exit"})
    assert fields(client.step({"what": "still"}))["text"] == "still"


def test_every_behaviour_of_the_manifest_has_its_test() -> None:
    behaviour.check()
