"""Harnesses: the tool loop and its limits, sessions of served environments, the bridge, and what trainers get."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from environments import Spot, Track, Walk
from openenv import GenericEnvClient, create_app
from openenv.core.harness import (
    CLIHarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStep,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    SessionMCPBridge,
    StepEnvSessionAdapter,
    ToolResult,
    VerifyResult,
    build_harness_rollout_func,
)
from openenv.errors import NonFiniteReward
from openenv.protocol.tool_messages import Tool
from openenv.rollout.run.agent_sessions import merge_turns
from servers import Serve


@dataclass
class Call:
    """A tool call as LLM clients shape it."""

    id: str
    name: str
    args: dict[str, Any]


@dataclass
class Response:
    """A response as LLM clients shape it."""

    content: str
    tool_calls: list[Call] = field(default_factory=list)


def says(
    text: str,
    *calls: tuple[str, dict[str, Any]],
    ids: tuple[int, ...] = (7,),
    prompt: tuple[int, ...] = (1, 2),
) -> ModelStepResult:
    """What the model answers: a text and the tools that it calls."""
    made = [Call(f"call-{number}", name, args) for number, (name, args) in enumerate(calls)]
    return ModelStepResult(Response(text, made), list(prompt), list(ids), [-0.5] * len(ids))


def model(*answers: ModelStepResult, seen: list[tuple[int, list[str], dict[str, Any]]] | None = None) -> ModelStep:
    """A model that gives these answers in turn."""
    left = iter(answers)

    def step(messages: list[dict[str, Any]], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        if seen is not None:
            seen.append((len(messages), [tool.name for tool in tools], sampling))
        return next(left)

    return step


class Counting(ResourceSession):
    """Counts up; the third call ends the rollout, and each is worth the count."""

    def __init__(self, verdict: VerifyResult | None = None, *, pays: bool = True) -> None:
        self.count = 0
        self.closed = 0
        self.final_state: Any = None
        self._verdict = verdict
        self._pays = pays

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "count"}]

    def list_tools(self) -> list[Tool]:
        return [Tool(name="up", description="Count up.", input_schema={"type": "object"})]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if name == "explode":
            raise RuntimeError("boom")
        if name != "up":
            raise KeyError(f"Unknown tool: {name}")
        self.count += 1
        metadata = {"reward": float(self.count)} if self._pays else {}
        return ToolResult(data={"count": self.count}, done=self.count == 3, metadata=metadata)

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        self.final_state = final_state
        return self._verdict or VerifyResult(env_reward=float(self.count), done=True, metrics={"count": self.count})

    def close(self) -> None:
        self.closed += 1


# -- the loop -------------------------------------------------------------------------------------------------------


def test_the_loop_ends_when_the_model_calls_no_tool() -> None:
    seen: list[tuple[int, list[str], dict[str, Any]]] = []
    limits = HarnessRunLimits(sampling={"temperature": 0.5})
    second = says("enough", prompt=(1, 2, 7, 8, 3))
    step = model(says("first", ("up", {"by": 1}), ids=(7, 8)), second, seen=seen)
    result = MCPHarnessAdapter().run_white_box(step, Counting(), limits)
    assert seen == [(1, ["up"], {"temperature": 0.5}), (3, ["up"], {"temperature": 0.5})]
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]
    [called] = result.messages[1]["tool_calls"]
    assert called["function"] == {"name": "up", "arguments": '{"by": 1}'}
    assert result.messages[2] == {"role": "tool", "tool_call_id": "call-0", "name": "up", "content": '{"count": 1}'}
    assert (result.done, result.metrics) == (True, {"turns": 2, "tool_calls": 1})
    assert (result.prompt_ids, result.completion_ids) == ([1, 2], [7, 8, 3, 7])
    assert (result.logprobs, result.env_mask) == ([-0.5, -0.5, 0.0, -0.5], [1, 1, 0, 1])
    assert [event.type for event in result.events] == ["model_response", "tool_call", "model_response"]
    assert result.events[0].payload["tool_calls"] == [{"id": "call-0", "name": "up", "arguments": {"by": 1}}]


def test_a_tool_that_ends_the_rollout_ends_it_in_the_middle_of_a_turn() -> None:
    session = Counting()
    result = MCPHarnessAdapter().run_white_box(model(says("", *[("up", {})] * 5)), session)
    assert (session.count, len(result.tool_trace), result.done) == (3, 3, True)


@pytest.mark.parametrize(
    ("limits", "count", "done", "metrics"),
    [
        (HarnessRunLimits(max_turns=2), 2, False, {"turns": 2, "tool_calls": 2}),
        (HarnessRunLimits(max_total_tool_calls=1), 1, False, {"turns": 2, "tool_calls": 1, "truncated": True}),
    ],
)
def test_limits_end_the_rollout_unfinished(
    limits: HarnessRunLimits, count: int, done: bool, metrics: dict[str, Any]
) -> None:
    session = Counting()
    step = model(*[says("", ("up", {}), prompt=(), ids=())] * 9)
    result = MCPHarnessAdapter().run_white_box(step, session, limits)
    assert (session.count, result.done, result.metrics) == (count, done, metrics)


def test_calls_beyond_the_limit_of_a_turn_are_left_out() -> None:
    limits = HarnessRunLimits(max_tool_calls_per_turn=1)
    result = MCPHarnessAdapter().run_white_box(model(says("", ("up", {}), ("up", {})), says("end")), Counting(), limits)
    assert (len(result.tool_trace), result.done) == (1, True)


def test_a_tool_call_to_an_unknown_tool_gets_an_error_result() -> None:
    result = MCPHarnessAdapter().run_white_box(model(says("", ("fly", {})), says("sorry")), Counting())
    assert json.loads(result.messages[2]["content"]) == {"error": "Unknown tool: fly"}
    assert result.tool_trace[0].result.error == "Unknown tool: fly"


def test_a_tool_that_breaks_is_no_observation() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        MCPHarnessAdapter().run_white_box(model(says("", ("explode", {}))), Counting())


def test_each_adapter_refuses_what_it_is_not_for() -> None:
    with pytest.raises(NotImplementedError, match="CLIHarnessAdapter"):
        MCPHarnessAdapter().run_black_box(Counting())
    with pytest.raises(NotImplementedError, match="MCPHarnessAdapter"):
        CLIHarnessAdapter(lambda *_: HarnessRolloutResult()).run_white_box(model(), Counting())


def test_a_black_box_gets_a_bridge_to_the_tools() -> None:
    def run(bridge: SessionMCPBridge, session: ResourceSession, limits: HarnessRunLimits) -> HarnessRolloutResult:
        reply = bridge.handle_request({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "up"}})
        return HarnessRolloutResult(done=True, metrics={"reply": reply, "turns": limits.max_turns})

    result = CLIHarnessAdapter(run).run_black_box(Counting())
    assert result.metrics["reply"]["result"] == {
        "data": {"count": 1},
        "done": False,
        "metadata": {"reward": 1.0},
        "error": None,
    }
    assert result.metrics["turns"] == 10


# -- tokens of several turns ----------------------------------------------------------------------------------------


def test_a_turn_that_does_not_continue_the_tokens_before_it_begins_another_row() -> None:
    """A template that removes thoughts: the model never saw the first answer as it was sampled."""
    turns = [
        says("", ids=(7, 8)),
        says("", prompt=(1, 2, 8, 3), ids=(9,)),
        says("", prompt=(1, 2, 8, 3, 9, 4), ids=(5,)),
    ]
    row = merge_turns(turns)
    assert (row.prompt_ids, row.completion_ids, row.env_mask, row.turns) == ([1, 2, 8, 3], [9, 4, 5], [1, 0, 1], 2)
    step = model(says("", ("up", {}), ids=(7, 8, 9)), says("", prompt=(1, 5)))
    result = MCPHarnessAdapter().run_white_box(step, Counting())
    assert (result.prompt_ids, result.completion_ids, result.metrics["turns_left_out"]) == ([1, 2], [7, 8, 9], 1)


def test_every_sampled_token_has_its_log_probability_or_none_has() -> None:
    bare = ModelStepResult(Response(""), [1], [2, 3])
    assert merge_turns([bare]).logprobs == []
    assert merge_turns([bare]).env_mask == [1, 1]
    with pytest.raises(ValueError, match="2 sampled tokens and 0 log-probabilities"):
        merge_turns([says(""), bare])
    assert merge_turns([]).completion_ids == []


# -- the bridge -----------------------------------------------------------------------------------------------------


def ask(method: str, **params: Any) -> dict[str, Any]:
    """Ask a fresh session's bridge."""
    return SessionMCPBridge(Counting()).handle_request(
        {"jsonrpc": "2.0", "id": 5, "method": method, "params": dict(params)}
    )


def test_the_bridge_lists_tools_in_the_shape_of_mcp() -> None:
    assert ask("tools/list") == {
        "jsonrpc": "2.0",
        "id": 5,
        "result": {"tools": [{"name": "up", "description": "Count up.", "inputSchema": {"type": "object"}}]},
    }


@pytest.mark.parametrize(
    ("method", "params", "code", "text"),
    [
        ("initialize", {}, -32601, "Method not found"),
        ("tools/call", {}, -32602, "name"),
        ("tools/call", {"name": "reset"}, -32602, "Reserved"),
        ("tools/call", {"name": "up", "arguments": 3}, -32602, "object"),
        ("tools/call", {"name": "explode"}, -32603, "boom"),
        ("tools/call", {"name": "fly"}, -32601, "Unknown tool: fly"),
    ],
)
def test_the_bridge_answers_failures_with_json_rpc_errors(
    method: str, params: dict[str, Any], code: int, text: str
) -> None:
    error = ask(method, **params)["error"]
    assert (error["code"], error["data"]) == (code, None)
    assert text in error["message"]


@pytest.mark.parametrize("request_", [{}, {"id": 1, "method": "tools/list"}, {"jsonrpc": "2.0", "id": 1}])
def test_the_bridge_refuses_what_is_no_request(request_: dict[str, Any]) -> None:
    reply = SessionMCPBridge(Counting()).handle_request(request_)
    assert (reply["id"], reply["error"]["code"]) == (request_.get("id"), -32600)


# -- sessions of served environments --------------------------------------------------------------------------------


WALK = Tool(name="walk", description="Walk.", input_schema={"type": "object"})


def session_of(client: Any, **options: Any) -> StepEnvSessionAdapter:
    """A session of the track."""
    return StepEnvSessionAdapter(
        client,
        task="walk",
        tool_specs=options.pop("tool_specs", [WALK]),
        action_builder=lambda name, arguments: arguments,
        initial_messages_builder=lambda result, task: [
            {"role": "user", "content": f"{task} from {result.observation['at']}"}
        ],
        **options,
    )


@pytest.fixture
def track(serve: Serve) -> Callable[[], Any]:
    """Blocking clients of a served track."""
    url = serve(create_app(Track, Walk, Spot)).url
    return lambda: GenericEnvClient(base_url=url).sync()


def test_a_session_of_a_served_environment_is_played_by_the_loop(track: Callable[[], Any]) -> None:
    session = session_of(track(), seed=1, episode_id="walked")
    assert session.initial_messages() == [{"role": "user", "content": "walk from 1"}]
    step = model(says("", ("walk", {"by": 1})), says("", ("walk", {"by": 1}), ("walk", {"by": 1})))
    result = MCPHarnessAdapter().run_white_box(step, session)
    assert (result.done, len(result.tool_trace)) == (True, 2)
    shown = json.loads(result.messages[2]["content"])
    assert (shown["observation"]["at"], shown["reward"], shown["done"]) == (2, 2.0, False)
    verdict = session.verify(result.messages)
    assert (verdict.env_reward, verdict.done, verdict.artifacts["transcript_length"]) == (3.0, True, 5)
    assert verdict.artifacts["final_state"]["episode_id"] == "walked"
    session.close()


def test_builders_decide_what_agent_and_trainer_see(track: Callable[[], Any]) -> None:
    session = session_of(
        track(),
        tool_result_builder=lambda name, arguments, result, state: ToolResult(data=f"{name} {state['step_count']}"),
        verify_builder=lambda transcript, final, last, state: VerifyResult(
            env_reward=last.reward, metrics={"end": final}
        ),
    )
    assert session.call_tool("walk", {"by": 2}).data == "walk 1"
    assert session.verify([], final_state="end") == VerifyResult(env_reward=2.0, metrics={"end": "end"})
    session.close()


def test_before_a_step_there_is_no_reward(track: Callable[[], Any]) -> None:
    session = session_of(track())
    assert session.verify([]).env_reward is None
    with pytest.raises(KeyError, match="Unknown tool: fly"):
        session.call_tool("fly", {})
    session.close()


def test_reserved_tools_are_refused() -> None:
    with pytest.raises(ValueError, match="reserved"):
        session_of(object(), tool_specs=[Tool(name="reset", description="", input_schema={})])


def test_an_asynchronous_client_is_refused_with_what_to_do() -> None:
    class Asynchronous:
        async def reset(self, **_: Any) -> None: ...

    with pytest.raises(TypeError, match=r"client\.sync\(\)"):
        session_of(Asynchronous())


def test_a_session_that_cannot_begin_closes_its_client() -> None:
    closed: list[bool] = []

    class Broken:
        def reset(self, **_: Any) -> None:
            raise RuntimeError("no reset")

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(RuntimeError, match="no reset"):
        session_of(Broken())
    assert closed == [True]


# -- for trainers ---------------------------------------------------------------------------------------------------


class Factory(ResourceSessionFactory[Counting]):
    """Makes counting sessions and remembers them."""

    def __init__(self, **options: Any) -> None:
        self.made: list[tuple[Any, Counting]] = []
        self._options = options

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Counting:
        session = Counting(**self._options)
        self.made.append((task, session))
        return session


def rollouts(factory: Factory, *answers: ModelStepResult, **options: Any) -> dict[str, list[Any]]:
    """Roll out two prompts."""
    function = build_harness_rollout_func(
        session_factory=factory,
        harness_adapter=MCPHarnessAdapter(),
        model_step_builder=lambda trainer, session: model(*answers),
        **options,
    )
    return function(["one", "two"], object())


def test_trainers_get_tokens_rewards_and_metrics_for_each_prompt() -> None:
    factory = Factory()
    answers = says("", ("up", {})), says("end", prompt=(1, 2, 7, 5, 6), ids=(8, 9))
    columns = rollouts(factory, *answers, reward_key="score")
    assert columns == {
        "prompt_ids": [[1, 2]] * 2,
        "completion_ids": [[7, 5, 6, 8, 9]] * 2,
        "logprobs": [[-0.5, 0.0, 0.0, -0.5, -0.5]] * 2,
        "env_mask": [[1, 0, 0, 1, 1]] * 2,
        "score": [1.0, 1.0],
        "verify_metrics": [{"count": 1}] * 2,
    }
    assert [(task, session.closed) for task, session in factory.made] == [("one", 1), ("two", 1)]
    final = factory.made[0][1].final_state
    assert (final["done"], final["tool_trace"][0]["result"]["metadata"]) == (True, {"reward": 1.0})


@pytest.mark.parametrize(
    ("verdict", "pays", "message"),
    [
        (VerifyResult(5.0), True, "verify.env_reward must forward the environment reward"),
        (VerifyResult(None), False, "did not produce an environment reward"),
    ],
)
def test_a_reward_that_is_not_the_environments_is_refused(verdict: VerifyResult, pays: bool, message: str) -> None:
    factory = Factory(verdict=verdict, pays=pays)
    with pytest.raises(ValueError, match=message):
        rollouts(factory, says("", ("up", {})), says("end"))
    assert factory.made[0][1].closed == 1


@pytest.mark.parametrize(
    ("verdict", "pays", "reward"),
    [(VerifyResult(1.0 + 1e-9), True, 1.0), (VerifyResult(None), True, 1.0), (VerifyResult(0.25), False, 0.25)],
)
def test_the_reward_is_that_of_the_last_call_or_of_the_verdict(
    verdict: VerifyResult, pays: bool, reward: float
) -> None:
    columns = rollouts(Factory(verdict=verdict, pays=pays), says("", ("up", {})), says("end"))
    assert columns["env_reward"] == [reward] * 2


def test_a_missing_reward_is_zero_if_another_rollout_of_the_function_had_one() -> None:
    class Half(Factory):
        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Counting:
            session = super().create(task, seed, episode_id)
            session._verdict = VerifyResult(0.5 if task == "two" else None)
            return session

    assert rollouts(Half(pays=False), says("end"))["env_reward"] == [0.0, 0.5]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_verdict_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(NonFiniteReward):
        rollouts(Factory(verdict=VerifyResult(reward), pays=False), says("end"))


def test_a_rollout_without_a_reward_may_be_left_out() -> None:
    factory = Factory(verdict=VerifyResult(None), pays=False)
    assert rollouts(factory, says("end"), requires_reward=False)["env_reward"] == [None, None]


def test_rollouts_run_at_once_and_keep_the_order_of_the_prompts() -> None:
    both = threading.Barrier(2, timeout=10)

    class Meeting(Factory):
        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Counting:
            both.wait()
            return super().create(task, seed, episode_id)

    factory = Meeting()
    by_task = {"one": 1, "two": 2}

    def step_of(trainer: Any, session: ResourceSession) -> ModelStep:
        task = next(task for task, made in factory.made if made is session)
        return model(*[says("", ("up", {}))] * by_task[task], says("end"))

    function = build_harness_rollout_func(
        session_factory=factory, harness_adapter=MCPHarnessAdapter(), model_step_builder=step_of, concurrency=2
    )
    assert function(["two", "one"], None)["env_reward"] == [2.0, 1.0]
    with pytest.raises(ValueError, match="at least 1"):
        build_harness_rollout_func(
            session_factory=factory, harness_adapter=MCPHarnessAdapter(), model_step_builder=step_of, concurrency=0
        )


def test_a_rollout_that_fails_closes_the_sessions_of_the_others() -> None:
    factory = Factory()
    with pytest.raises(RuntimeError, match="boom"):
        rollouts(factory, says("", ("explode", {})), concurrency=2)
    assert all(session.closed == 1 for _, session in factory.made)
