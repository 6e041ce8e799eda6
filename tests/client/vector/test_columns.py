"""Steps in columns over the wire: the results and failures of single steps, each run once, in one array per field."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from local_environments import END, FAIL, FINE, INFORM, NAN, FaultyEnvironment, NestedEnvironment
from openenv.client.network import ConnectionOptions, parse_ws_url, socket_url
from openenv.client.vector.connection import VectorConnection
from openenv.client.vector.vector_env import VectorEnv
from openenv.errors import (
    ExecutionError,
    NonFiniteReward,
    OpenEnvError,
    RequestTimeout,
    RequestValidationError,
    SessionLost,
    SlotsFailed,
)
from openenv.protocol.codec import SUBPROTOCOLS
from openenv.server.access import AccessPolicy
from openenv.server.app import create_app
from openenv.server.ws_v2 import V2Connection


def app_of(cls: Any, **options: Any) -> Any:
    return create_app(cls, cls.action_cls, cls.observation_cls, max_concurrent_envs=64, **options)


@pytest.fixture
def faulty(serve: Callable[..., Any]) -> Any:
    return serve(app_of(FaultyEnvironment))


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the messages that servers read; the way itself is the real one."""
    read: list[str] = []
    run, handle = V2Connection._parse, V2Connection._handle_batch

    def parse(self: Any, payload: bytes, binary: bool, message: Any, **options: Any) -> None:
        run(self, payload, binary, message, **options)
        read.extend(["columns"] * (message.source is not None))

    def batch(self: Any, batch: Any, message: Any) -> None:
        handle(self, batch, message)
        read.append("batch")

    monkeypatch.setattr(V2Connection, "_parse", parse)
    monkeypatch.setattr(V2Connection, "_handle_batch", batch)
    return read


def acts(*actions: int) -> dict[str, Any]:
    return {"action": np.array(actions)}


def steps_of(result: Any) -> list[float]:
    return [float(row[0]) for row in result.columns.observations[0]]


def plain(value: Any) -> Any:
    """Return a value in lists, numbers and text, for comparisons."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def shown(result: Any) -> list[Any]:
    """Return everything that a caller sees of a result."""
    rows = []
    for one in result.by_slot:
        seen = None if one.result is None else plain(one.result.observation)
        final = None if one.final is None else (plain(one.final.observation), one.final.reward, one.final.metadata)
        metadata = None if one.result is None else one.result.metadata or {}
        flags = one.terminated, one.truncated, one.started, one.restarted
        rows.append((one.slot, seen, str(one.reward), metadata, final, flags, type(one.error), str(one.error)))
    return rows


# -- results ----------------------------------------------------------------------------------------------------------


def test_a_step_is_one_message_each_way_with_one_array_per_field(faulty: Any, kinds: list[str]) -> None:
    with VectorEnv(faulty.url, 32, connections=1) as env:
        env.reset(seed=1)
        assert env.column_layout is not None
        del kinds[:]
        before = env.traffic
        result = env.step(acts(*[FINE] * 32))
        assert kinds == ["columns"]
        names_sent = env.traffic[0] - before[0]
        result = env.step(acts(*[FINE] * 31, INFORM))
        assert steps_of(result) == [2.0] * 32
        assert result.rewards.tolist() == [1.0] * 32
        assert result.infos[31] == {"steps": 2}
        assert env.traffic[0] - before[0] - names_sent < names_sent / 2  # the sessions are named once


def test_clients_that_chose_json_get_no_columns(faulty: Any, kinds: list[str]) -> None:
    with VectorEnv(faulty.url, 4, codec="json") as env:
        env.reset()
        assert env.column_layout is None
        assert env.step([{"action": FINE}] * 4).rewards.tolist() == [1.0] * 4
        assert "columns" not in kinds


ACTIONS = [
    [FINE, FINE, FINE, FINE, FINE, FINE],
    [FINE, END, INFORM, FINE, END, FINE],
    [FINE, FAIL, FINE, NAN, FINE, INFORM],
    [FINE, 99, INFORM, FINE, -1, FINE],
    [END, END, END, FAIL, NAN, 7],
    [FINE, FINE, INFORM, FINE, FINE, FINE],
]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("on_failure", ["mask", "restart"])
def test_results_and_failures_are_those_of_single_steps(faulty: Any, autoreset: Any, on_failure: Any) -> None:
    compare_with_single_steps(faulty.url, autoreset=autoreset, on_failure=on_failure)


@pytest.mark.parametrize(
    ("autoreset", "on_failure"),
    [
        ("next_step", "mask"),
        *(
            pytest.param(autoreset, on_failure, marks=pytest.mark.slow)
            for autoreset in ("next_step", "same_step", "disabled")
            for on_failure in ("mask", "restart")
        ),
    ],
)
def test_results_and_failures_in_shared_memory_are_those_of_single_steps(autoreset: Any, on_failure: Any) -> None:
    compare_with_single_steps(FaultyEnvironment, autoreset=autoreset, on_failure=on_failure, workers=2)


def compare_with_single_steps(target: Any, **options: Any) -> None:
    histories = []
    for in_columns in (True, False):
        with VectorEnv(target, 6, **options) as env:
            history = [shown(env.reset(seed=7))]
            for actions in ACTIONS:
                by_slot = {slot: {"action": action} for slot, action in enumerate(actions)}
                history.append(shown(env.step(acts(*actions) if in_columns else by_slot)))
        histories.append(history)
    for columns, single in zip(*histories, strict=True):
        assert columns == single


@pytest.mark.parametrize("n", [1, 5])
def test_failures_are_typed(faulty: Any, n: int) -> None:
    with VectorEnv(faulty.url, n) as env:
        for action, error in ((FAIL, ExecutionError), (NAN, NonFiniteReward), (99, RequestValidationError)):
            env.reset()
            with pytest.raises(SlotsFailed) as caught:
                env.step(acts(*[FINE] * (n - 1), action))
            assert isinstance(caught.value.errors[n - 1], error)
            assert [one.error is None for one in caught.value.result.by_slot] == [True] * (n - 1) + [False]


def test_values_of_several_parts_keep_their_form(serve: Callable[..., Any]) -> None:
    server = serve(app_of(NestedEnvironment))
    goes, hows = np.array([-1, 0, 1]), np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    with VectorEnv(server.url, 3, codec="msgpack") as env:
        env.reset()
        result = env.step({"action": {"go": goes, "how": hows}})
        assert result.columns is not None
        for row, one in enumerate(result.observations):
            first, second = one["observation"]["pair"]
            assert first == goes[row]
            assert second.tolist() == hows[row].tolist()
        assert result.rewards.tolist() == [-1.0, 0.0, 1.0]


def test_episodes_begin_in_the_message_of_a_step(faulty: Any, kinds: list[str]) -> None:
    with VectorEnv(faulty.url, 4, connections=1) as env:
        env.reset(options={"word": 1})
        env.step(acts(FINE, END, FINE, END))
        del kinds[:]
        began = env.step(acts(FINE, FINE, FINE, 99))  # the actions of beginnings are ignored
        assert kinds == ["columns"]
        assert steps_of(began) == [2.0, 0.0, 2.0, 0.0]
        assert began.infos[1] == {"options": {"word": 1}}
        assert [one.started for one in began.by_slot] == [False, True, False, True]
        assert began.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
        assert {session.step_count for session in faulty.manager.sessions()} == {1, 2}


def test_a_beginning_whose_reply_was_lost_is_answered_and_not_run_again(
    faulty: Any, proxied: Callable[[int], Any]
) -> None:
    proxy = proxied(faulty.port)
    with VectorEnv(proxy.url, 3, connections=1) as env:
        env.reset(options={"word": 1})
        env.step(acts(END, FINE, END))
        before = [session.env for session in faulty.manager.sessions()]
        resets = []
        for one in before:
            run = one.reset_values
            one.reset_values = lambda kwargs, run=run: resets.append(kwargs) or run(kwargs)
        proxy.swallowing = True
        env.step_async(acts(FINE, FINE, FINE))
        faulty.wait_for(lambda: all(session.ledger._step is None for session in faulty.manager.sessions()))
        proxy.swallowing = False
        result = env.step_wait()
        assert steps_of(result) == [0.0, 2.0, 0.0]
        assert result.infos[0] == {"options": {"word": 1}}
        assert result.rewards.tolist() == [0.0, 1.0, 0.0]
        assert resets == [{"options": {"word": 1}}] * 2
        assert steps_of(env.step(acts(FINE, FINE, FINE))) == [1.0, 3.0, 1.0]


def test_messages_keep_to_the_servers_limit(serve: Callable[..., Any], kinds: list[str]) -> None:
    server = serve(app_of(FaultyEnvironment, max_batch=3))
    with VectorEnv(server.url, 8, connections=1) as env:
        env.reset()
        del kinds[:]
        assert steps_of(env.step(acts(*[FINE] * 8))) == [1.0] * 8
        assert kinds == ["columns"] * 3


def test_environments_in_other_processes_answer_as_before(serve: Callable[..., Any], kinds: list[str]) -> None:
    server = serve(app_of(FaultyEnvironment, runner="process", env_processes=1))
    with VectorEnv(server.url, 2) as env:
        env.reset()
        assert env.step(acts(FINE, FINE)).rewards.tolist() == [1.0, 1.0]
        assert "columns" not in kinds


def test_results_belong_to_the_caller(faulty: Any) -> None:
    with VectorEnv(faulty.url, 4, connections=1) as env:
        env.reset()
        first = env.step(acts(FINE, FINE, FINE, FINE))
        first.columns.observations[0][:] = -1
        second = env.step(acts(FINE, FINE, FINE, FINE))
        assert steps_of(second) == [2.0] * 4
        assert steps_of(first) == [-1.0] * 4


# -- each step runs once ----------------------------------------------------------------------------------------------


def test_a_step_whose_reply_was_lost_is_answered_and_not_run_again(faulty: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(faulty.port)
    with VectorEnv(proxy.url, 6, connections=2) as env:
        env.reset()
        env.step(acts(*[FINE] * 6))
        for turn in range(2, 5):
            proxy.swallowing = True
            env.step_async(acts(FINE, INFORM, FINE, END, FINE, FINE))
            faulty.wait_for(lambda: all(session.ledger._step is None for session in faulty.manager.sessions()))
            proxy.swallowing = False
            result = env.step_wait()
            assert steps_of(result) == [float(turn)] * 6
            assert result.infos[1] == {"steps": turn}
            assert result.terminated.tolist() == [False, False, False, True, False, False]
            env.reset(slots=[3])
            for _ in range(turn):  # by itself, so that all slots have the same number of steps again
                env.step({3: {"action": FINE}})


def test_failures_survive_a_lost_connection(faulty: Any, proxied: Callable[[int], Any]) -> None:
    proxy = proxied(faulty.port)
    with VectorEnv(proxy.url, 3, connections=1, on_failure="mask") as env:
        env.reset()
        proxy.swallowing = True
        env.step_async(acts(FINE, FAIL, NAN))
        faulty.wait_for(lambda: all(session.ledger.last_id == 2 for session in faulty.manager.sessions()))
        faulty.wait_for(lambda: all(session.is_idle for session in faulty.manager.sessions()))
        proxy.swallowing = False
        result = env.step_wait()
        assert [type(result.errors.get(slot)) for slot in range(3)] == [type(None), ExecutionError, NonFiniteReward]


def test_lines_that_are_cut_all_the_time_lose_nothing(faulty: Any, proxied: Callable[[int], Any]) -> None:
    proxy, stop = proxied(faulty.port), threading.Event()

    def harass() -> None:
        pause_s = 0.05
        while not stop.wait(pause_s):
            proxy.cut()
            pause_s *= 1.05  # or a busy machine would never get anywhere

    thread = threading.Thread(target=harass)
    with VectorEnv(proxy.url, 8, connections=2) as env:
        env.reset()
        thread.start()
        try:
            for turn in range(1, 41):
                assert steps_of(env.step(acts(*[FINE] * 8))) == [float(turn)] * 8
        finally:
            stop.set()
            thread.join()
        assert {session.step_count for session in faulty.manager.sessions()} == {40}


def test_a_session_that_ends_is_lost_in_its_slot_only(faulty: Any) -> None:
    with VectorEnv(faulty.url, 4, connections=1, on_failure="mask") as env:
        env.reset()
        env.step(acts(*[FINE] * 4))
        name = env.sessions[2]
        victim = next(session for session in faulty.manager.sessions() if session.id == name)
        victim.close("ended by the test")
        result = env.step(acts(*[FINE] * 4))
        assert isinstance(result.errors[2], SessionLost)
        assert result.rewards[[0, 1, 3]].tolist() == [1.0] * 3
        assert np.isnan(result.rewards[2])
        env.reset(slots=[2])
        assert steps_of(env.step(acts(*[FINE] * 4))) == [3.0, 3.0, 1.0, 3.0]


def test_a_late_answer_is_waited_for_again(faulty: Any) -> None:
    with VectorEnv(faulty.url, 3, connections=1) as env:
        env.reset()
        gate = threading.Event()
        faulty.manager.sessions()[1].lane.submit(_Hold(gate))
        env.step_async(acts(FINE, FINE, FINE))
        with pytest.raises(RequestTimeout):
            env.step_wait(timeout_s=0.2)
        gate.set()
        assert steps_of(env.step_wait()) == [1.0] * 3


class _Hold:
    """Keeps a thread busy."""

    kind = "step"
    count = 1

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def run(self) -> None:
        self.gate.wait(20)


# -- hostile messages -------------------------------------------------------------------------------------------------


class Raw:
    """A connection that sends any message."""

    def __init__(self, url: str, sessions: int, **options: Any) -> None:
        given = ConnectionOptions(subprotocols=SUBPROTOCOLS, **options)
        self.connection = VectorConnection(parse_ws_url(socket_url(url)), given)
        self.connection.open(10)
        self.names = []
        for number in range(sessions):
            opened = self.ask({"type": "open", "id": 100 + number})
            self.columns = opened.get("columns")
            self.names.append(opened["session"])
            self.ask({"type": "reset", "id": 1, "session": opened["session"]})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.connection.send([message])
        while not (answers := self.connection.take()):
            self.connection.receive()
        (answer,) = answers
        return answer

    def step(self, ids: Any, actions: Any, sessions: Any = None, **more: Any) -> dict[str, Any]:
        message = {"type": "columns", "id": 7, "ids": ids, "actions": actions, **more}
        return self.ask(message if sessions is None else {**message, "sessions": sessions})


INVALID: dict[str, tuple[Any, Any]] = {
    "no ids": (None, [np.zeros(2, np.int64)]),
    "ids of text": (["a", "b"], [np.zeros(2, np.int64)]),
    "ids of floats": (np.array([2.5, 3.5]), [np.zeros(2, np.int64)]),
    "ids in a table": (np.zeros((2, 2), np.int64), [np.zeros(2, np.int64)]),
    "one id": ([2], [np.zeros(2, np.int64)]),
    "no actions": ([2, 2], None),
    "no array": ([2, 2], [[0, 0]]),
    "too few rows": ([2, 2], [np.zeros(1, np.int64)]),
    "too many columns": ([2, 2], [np.zeros(2, np.int64)] * 2),
    "another type": ([2, 2], [np.array([0.5, 0.5])]),
    "another shape": ([2, 2], [np.zeros((2, 1), np.int64)]),
}


@pytest.mark.parametrize("case", INVALID)
def test_messages_that_do_not_fit_are_refused_and_change_nothing(faulty: Any, case: str) -> None:
    raw = Raw(faulty.url, 2)
    answer = raw.step(*INVALID[case], raw.names)
    assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
    fine = raw.step([2, 2], [np.zeros(2, np.int64)], raw.names)
    assert fine["rewards"].tolist() == [1.0, 1.0]
    assert "replies" not in fine


@pytest.mark.parametrize("more", [{"resets": [2]}, {"resets": [-1]}, {"resets": ["0"]}, {"resets": 1}, {"reset": []}])
def test_resets_that_do_not_fit_are_refused_and_change_nothing(faulty: Any, more: dict[str, Any]) -> None:
    raw = Raw(faulty.url, 2)
    answer = raw.step([2, 2], [np.zeros(2, np.int64)], raw.names, **more)
    assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
    assert {session.ledger.last_id for session in faulty.manager.sessions()} == {1}


def test_a_repeated_reset_of_a_row_is_answered_from_the_ledger(faulty: Any) -> None:
    raw = Raw(faulty.url, 1)
    decode, actions = raw.connection.decoded, [np.zeros(1, np.int64)]
    began = raw.step([2], actions, raw.names, resets=[0], reset={"options": {"word": 1}})
    assert (began["observations"][0].tolist(), began["metadata"]) == ([[0.0] * 3], [[0, {"options": {"word": 1}}]])
    raw.step([3], actions)
    again = raw.step([2], actions, resets=[0], reset={"options": {"word": 1}})
    ((_, reply),) = again["replies"]
    data = decode(reply)["data"]
    assert (data["reward"], data["observation"]["observation"].tolist()) == (None, [0.0] * 3)
    other = raw.step([2], actions)  # a step under the id of a reset
    ((_, reply),) = other["replies"]
    assert decode(reply)["data"]["code"] == "VALIDATION_ERROR"
    assert raw.step([4], actions)["observations"][0].tolist() == [[2.0] * 3]


def test_rows_that_cannot_run_together_are_answered_one_by_one(faulty: Any) -> None:
    raw = Raw(faulty.url, 2)
    decode = raw.connection.decoded
    actions = [np.array([FINE, 99, FINE, FINE, FINE])]
    first, second = raw.names
    answer = raw.step([2, 2, 3, 2, 2], actions, [first, second, first, "nobody", first])
    single = {row: decode(reply) for row, reply in answer["replies"]}
    assert answer["rewards"][0] == 1.0
    assert single[1]["data"]["code"] == "VALIDATION_ERROR"
    assert single[2]["data"]["observation"]["observation"].tolist() == [2.0] * 3  # its second step, after the first
    assert single[3]["data"]["code"] == "SESSION_NOT_FOUND"
    assert single[4]["data"]["observation"]["observation"].tolist() == [1.0] * 3  # its first step again
    other = raw.step([2, 2], [np.array([INFORM, FINE])], [first, second])
    repeated = {row: decode(reply) for row, reply in other["replies"]}
    assert repeated[0]["data"]["code"] == "VALIDATION_ERROR"  # the id of another request


def test_agents_may_not_step_in_columns(serve: Callable[..., Any]) -> None:
    server = serve(app_of(FaultyEnvironment, access=AccessPolicy(orchestrator="o" * 20, agent="a" * 20)))
    raw = Raw(server.url, 0, headers={"Authorization": "Bearer " + "a" * 20})
    opened = raw.ask({"type": "open", "id": 1})
    assert "columns" not in opened
    answer = raw.step([1], [np.zeros(1, np.int64)], [opened["session"]])
    assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
    assert [session.step_count for session in server.manager.sessions()] == [0]


def test_an_empty_message_is_answered(faulty: Any) -> None:
    raw = Raw(faulty.url, 1)
    answer = raw.step([], [np.zeros(0, np.int64)], [])
    assert answer["type"] == "columns"
    assert answer["rewards"].tolist() == []


def test_a_server_that_sends_results_of_another_shape_is_not_believed() -> None:
    from openenv.client.vector.column_steps import ColumnSteps
    from openenv.env.columnar import layout_of

    layout = layout_of(FaultyEnvironment)
    assert layout is not None
    good = {
        "observations": [np.zeros((2, 3), np.float32)], "rewards": np.zeros(2),
        "terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool),
    }  # fmt: skip
    worse = [("rewards", np.zeros(3)), ("rewards", [0, 0]), ("truncated", np.zeros(2)), ("observations", [])]
    for name, value in [*worse, ("observations", [np.zeros((2, 4), np.float32)])]:
        steps = ColumnSteps(layout, [1, 1])
        steps.begin([np.zeros(2, np.int64)], np.ones(2, bool))
        with pytest.raises(OpenEnvError, match=r"do not fit|not complete"):
            steps.put(np.arange(2), {**good, name: value})
        assert steps.left == 2
