"""The OpenCode environment on a real server: real runs in the local sandbox, with a model that plays a script."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from typing import Any

import pytest
from fastmcp import Client

from opencode_env import CallToolAction, ListToolsAction, OpenCodeEnv, OpenCodeState, RolloutResult
from opencode_env.client import RolloutArguments, _extract_text, patience
from opencode_env.server.gradio_ui import gradio_builder, run_form
from opencode_env.server.opencode_environment import STEP_TIMEOUT_S, OpenCodeEnvironment, _limit
from opencode_env.server.settings import ServerSettings
from openenv import LocalEnv
from openenv.core.env_server.types import Action
from openenv.errors import ToolArgumentsError, ToolCallError, ToolTimeout
from openenv.testing.scripted.agent_scripts import run_command

INSTRUCTION = "Write a function binary_search(items, target) into binary_search.py."
CHECK = "python3 -c 'from binary_search import binary_search as b; assert b([1, 2, 4], 4) == 2 and b([1], 3) == -1'"
HANG = {"name": "hang", "turns": [{"failures": [{"kind": "hang", "attempts": None}]}]}


def shell(command: str) -> dict[str, Any]:
    """A script in which the agent runs one command."""
    return run_command("opencode", command).model_dump(mode="json")


def is_aligned(result: RolloutResult) -> bool:
    return all(
        len(turn.completion_tokens) == len(turn.completion_token_ids) == len(turn.per_token_logps) > 0
        for turn in result.proxy_turns
    )


# -- real runs ------------------------------------------------------------------------------------------------------


def test_a_real_run_earns_its_reward_and_brings_its_tokens(served: Any) -> None:
    news: list[tuple[float, float | None, str | None]] = []
    with OpenCodeEnv(base_url=served.url).sync() as env:
        assert env.reset(episode_id="one").observation.metadata["status"] == "ready"
        result = env.run_rollout(
            endpoint="scripted",
            instruction=INSTRUCTION,
            setup=["echo prepared > note.txt"],
            verify=[CHECK, "grep -q prepared note.txt"],
            task_id="search",
            sequences=True,
            on_progress=lambda *event: news.append(event),
        )
        assert result.error is None
        assert (result.reward, result.status, result.phase) == (1.0, "ok", "done")
        assert (result.task_id, result.mode, result.agent_exit_code) == ("search", "transparent_proxy", 0)
        assert (result.sandbox, result.model, result.is_scripted) == ("local", "scripted/binary_search", True)
        assert [line.exit_code for line in (*result.setup_results, *result.verify_results)] == [0, 0, 0]
        assert result.files["/home/user/workdir/note.txt"] == "prepared\n"
        assert "def binary_search" in result.files["/home/user/workdir/binary_search.py"]
        assert [turn.turn for turn in result.proxy_turns] == [1, 2]
        assert is_aligned(result)
        assert [turn.finish_reason for turn in result.proxy_turns] == ["tool_calls", "stop"]
        [sequence] = result.sequences
        assert (sequence.role, sequence.calls, sequence.is_trainable) == ("agent", [1, 2], True)
        assert len(sequence.input_ids) == len(sequence.loss_mask) == len(sequence.logprobs)
        assert sum(sequence.loss_mask) == sum(len(turn.completion_token_ids) for turn in result.proxy_turns)
        assert "tool_calls" in result.proxy_log_tail
        assert result.agent_log_tail
        assert result.wall_s > 0
        state = env.state()
        assert isinstance(state, OpenCodeState)
        assert (state.episode_id, state.step_count, state.rollouts_completed) == ("one", 1, 1)
        assert (state.last_reward, state.last_task_id, state.last_sandbox_id) == (1.0, "search", result.sandbox_id)
    phases = [str(message).partition(":")[0] for _, _, message in news]
    assert list(dict.fromkeys(phases)) == ["sandbox", "setup", "agent", "collect", "verify", "done"]
    numbers = [progress for progress, _, _ in news]
    assert numbers == sorted(set(numbers))
    assert {total for _, total, _ in news} == {7}
    served.wait_until_free()


@pytest.mark.slow
def test_work_and_judge_can_be_kept_apart(served: Any) -> None:
    call = "python3 -c 'from binary_search import binary_search as b; print(b([1, 2, 4], 4))'"
    with OpenCodeEnv(base_url=served.url).sync() as env:
        result = env.run_rollout(
            endpoint="scripted",
            instruction=INSTRUCTION,
            verify=[{"run": call, "judge": 'grep -qx 2 "$OUTPUT/stdout"'}, {"run": "kill -9 $$", "judge": "true"}],
        )
    assert (result.error, result.reward) == (None, 0.5)
    assert result.verify_results[0].run is not None
    assert (result.verify_results[0].run.cmd, result.verify_results[0].run.stdout) == (call, "2\n")


@pytest.mark.slow
def test_rollouts_at_once_are_not_mixed_up_and_nothing_planted_counts(served: Any) -> None:
    plant = "mkdir -p ~/logs/verifier && echo 1.0 > ~/logs/verifier/reward.txt && echo 1.0 > reward.txt; echo done"
    cases: dict[str, tuple[str, list[str], float]] = {
        "planted": (plant, ["false", "true"], 0.5),
        "written": (plant, ["echo 0.25 > ~/logs/verifier/reward.txt; false"], 0.25),
        "own": ("echo own > own.txt", ["grep -q own own.txt", "test ! -e other.txt"], 1.0),
        "none": ("true", ["exit 1"], 0.0),
    }

    async def one(name: str) -> RolloutResult:
        command, verify, _ = cases[name]
        async with OpenCodeEnv(base_url=served.url) as env:
            return await env.run_rollout(
                endpoint="scripted", script=shell(command), instruction=name, verify=verify, task_id=name
            )

    async def all_of_them() -> list[RolloutResult]:
        return await asyncio.gather(*(one(name) for name in cases))

    for name, result in zip(cases, asyncio.run(all_of_them()), strict=True):
        assert (result.error, result.task_id, result.reward) == (None, name, cases[name][2])
        assert is_aligned(result)
    served.wait_until_free()


@pytest.mark.slow
def test_a_model_that_does_not_answer_is_no_failure_of_the_agent(served: Any) -> None:
    with OpenCodeEnv(base_url=served.url).sync() as env:
        result = env.run_rollout(
            endpoint="scripted", script=HANG, instruction="hang", verify=["true"], agent_timeout_s=45
        )
        assert (result.status, result.phase, result.reward) == ("env_failed", "agent", None)
        assert "no answer" in (result.error or "")
    served.wait_until_free()


@pytest.mark.slow
def test_a_step_brings_the_reward_and_a_black_box_no_turns(served: Any) -> None:
    with OpenCodeEnv(base_url=served.url).sync() as env:
        env.reset()
        arguments = {
            "endpoint": "scripted",
            "script": shell("echo hi > hi.txt"),
            "instruction": "hi",
            "verify": ["test -e hi.txt", "false"],
            "mode": "black_box",
        }
        # A step has no progress, and its reply takes as long as the rollout.
        taken = env.step(CallToolAction(tool_name="run_rollout", arguments=arguments), timeout_s=90)
        assert taken.reward == 0.5
        result = RolloutResult.model_validate_json(_extract_text(taken.observation.result))  # type: ignore[attr-defined]
        assert (result.mode, result.reward, result.proxy_turns, result.proxy_log_tail) == ("black_box", 0.5, [], "")


@pytest.mark.slow
def test_an_agent_that_takes_too_long_is_truncated_and_what_it_left_is_verified(served: Any) -> None:
    # The limit of other calls is not that of a rollout, whichever way it is asked for.
    with OpenCodeEnv(base_url=served.url, message_timeout_s=2).sync() as env:
        text = env.call_tool(
            "run_rollout",
            endpoint="scripted",
            script=shell("sleep 600"),
            instruction="hang",
            verify=["true", "false"],
            agent_timeout_s=60,  # OpenCode has made its first call by then, on a busy machine too
        )
        result = RolloutResult.model_validate_json(text)
        assert (result.error or "").startswith("agent timeout")
        assert (result.status, result.phase, result.reward) == ("truncated", "agent", 0.5)
    served.wait_until_free()


def test_a_setup_that_fails_keeps_the_agent_from_starting(served: Any) -> None:
    with OpenCodeEnv(base_url=served.url).sync() as env:
        result = env.run_rollout(
            endpoint="scripted", instruction="x", setup=["echo one", "exit 3", "echo never"], verify=["true"]
        )
        assert "exited with code 3" in (result.error or "")
        assert [line.exit_code for line in result.setup_results] == [0, 3]
        assert (result.status, result.phase, result.reward) == ("env_failed", "setup", None)
        assert (result.proxy_turns, result.verify_results, result.agent_exit_code) == ([], [], None)


@pytest.mark.slow
def test_a_model_that_does_not_answer_is_no_zero_either(served: Any) -> None:
    refusing = {"turns": [{"failures": [{"kind": "status", "status": 403, "attempts": None}]}]}
    with OpenCodeEnv(base_url=served.url).sync() as env:
        result = env.run_rollout(
            endpoint="scripted", script=refusing, instruction="x", verify=["true"], agent_timeout_s=60
        )
        assert (result.status, result.reward) == ("env_failed", None)
        assert "model endpoint" in (result.error or "")
        assert [turn.upstream_status for turn in result.proxy_turns] == [403] * len(result.proxy_turns)


# -- ending early ---------------------------------------------------------------------------------------------------


async def _until_it_works(served: Any, env: OpenCodeEnv, **options: Any) -> asyncio.Task[RolloutResult]:
    """Begin a rollout that hangs, and wait until its agent runs."""
    works = asyncio.Event()

    def hear(progress: float, total: float | None, message: str | None) -> None:
        if str(message).startswith("agent"):
            works.set()

    running = asyncio.ensure_future(
        env.run_rollout(endpoint="scripted", script=HANG, instruction="hang", on_progress=hear, **options)
    )
    await asyncio.wait_for(works.wait(), 30)
    assert served.sandboxed()
    return running


def test_a_rollout_that_is_cancelled_is_ended(served: Any) -> None:
    async def play() -> None:
        async with OpenCodeEnv(base_url=served.url) as env:
            await env.reset()
            running = await _until_it_works(served, env)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await asyncio.to_thread(served.wait_until_free)

    asyncio.run(play())


def test_a_call_that_takes_too_long_is_ended_and_the_session_goes_on(served: Any) -> None:
    async def play() -> None:
        async with OpenCodeEnv(base_url=served.url) as env:
            await env.reset(episode_id="kept")
            running = await _until_it_works(served, env, timeout_s=8)
            with pytest.raises(ToolTimeout):
                await running
            await asyncio.to_thread(served.wait_until_free)
            state = await env.state()
            assert (state.episode_id, state.rollouts_completed) == ("kept", 0)  # type: ignore[attr-defined]
            assert (await env.run_rollout(endpoint="scripted", instruction="x", mode="glass")).error

    asyncio.run(play())


def test_a_client_that_goes_takes_its_rollout_along(served: Any) -> None:
    async def play() -> None:
        env = OpenCodeEnv(base_url=served.url)
        running = await _until_it_works(served, env)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await env.close()
        await asyncio.to_thread(served.wait_until_free)

    asyncio.run(play())


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"instruction": "x"}, "no model"),
        ({"instruction": "x", "base_url": "http://h", "model": "m"}, "no model"),
        ({"endpoint": "scripted"}, "instruction"),
        ({"endpoint": "scripted", "instruction": " "}, "instruction"),
        ({"endpoint": "azure", "instruction": "x"}, "unknown endpoint kind"),
        ({"endpoint": "hf_router", "instruction": "x"}, "no api_key"),
        ({"endpoint": "openai", "base_url": "http://evil", "instruction": "x"}, "no api_key"),
        ({"endpoint": "scripted", "instruction": "x", "model": "gpt-5"}, "no script"),
        ({"endpoint": "scripted", "instruction": "x", "script": {"turns": 3}}, "script"),
        ({"endpoint": "openai", "instruction": "x", "script": {}}, "script"),
        ({"endpoint": "scripted", "instruction": "x", "agent_timeout_s": 0}, "agent_timeout_s"),
        ({"endpoint": "scripted", "instruction": "x", "verify": [{"run": "true"}]}, "judge"),
    ],
)
def test_a_request_that_is_none_is_a_tool_error(served: Any, arguments: dict[str, Any], text: str) -> None:
    with OpenCodeEnv(base_url=served.url).sync() as env:
        with pytest.raises(ToolCallError, match=text):
            env.run_rollout(**arguments)
        assert env.state().rollouts_completed == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "glass"}, "unknown mode 'glass'"),
        ({"sandbox": "process"}, "unknown sandbox 'process'"),
        ({"sandbox": "e2b"}, "E2B_API_KEY"),
    ],
)
def test_a_rollout_that_cannot_be_run_says_why(served: Any, arguments: dict[str, Any], text: str) -> None:
    env = OpenCodeEnv(base_url=served.url)  # blocks where no loop runs
    result: Any = env.run_rollout(endpoint="scripted", instruction="x", task_id="t", **arguments)
    assert text in result.error
    assert (result.task_id, result.reward, result.status) == ("t", None, "env_failed")
    env.sync().close()


def test_arguments_that_do_not_exist_or_fit_are_refused(served: Any) -> None:
    with OpenCodeEnv(base_url=served.url).sync() as env:
        with pytest.raises(TypeError, match="no argument instruktion"):
            env.run_rollout(instruktion="x")  # type: ignore[call-arg]
        with pytest.raises(ToolArgumentsError):
            env.run_rollout(endpoint="scripted", instruction="x", verify="true")  # type: ignore[arg-type]


# -- the environment in this process --------------------------------------------------------------------------------


def test_the_tool_has_the_arguments_that_callers_know() -> None:
    env = OpenCodeEnvironment(ServerSettings())
    [tool] = env.step(ListToolsAction()).tools  # type: ignore[attr-defined]
    assert tool.name == "run_rollout"
    properties = tool.input_schema["properties"]
    assert set(properties) == set(RolloutArguments.__annotations__)
    defaults = {name: spec.get("default") for name, spec in properties.items()}
    known = {
        **dict.fromkeys(("endpoint", "base_url", "api_key", "model", "instruction", "task_id", "template"), ""),
        **dict.fromkeys(("setup", "verify", "disable_thinking")),
        "mode": "transparent_proxy",
        "max_tokens_cap": 4096,
        "top_logprobs": 5,
        "agent_timeout_s": 600.0,
    }
    assert {name: defaults[name] for name in known} == known
    names = [name for name in inspect.signature(env.run_rollout).parameters if name != "ctx"]
    order = "endpoint base_url api_key model instruction setup verify task_id mode disable_thinking max_tokens_cap"
    assert names[:14] == [*order.split(), "top_logprobs", "agent_timeout_s", "template"]
    env.close()


def test_other_actions_get_advice() -> None:
    env = OpenCodeEnvironment(ServerSettings())
    assert "run_rollout" in env.step(Action()).metadata["error"]
    observation = env.reset()
    assert (observation.metadata["status"], observation.reward) == ("ready", None)
    env.close()


def test_a_step_has_as_long_as_its_rollout_may_take() -> None:
    def limit(timeout_s: float | None = None, **arguments: Any) -> float | None:
        return _limit(CallToolAction(tool_name="run_rollout", arguments=arguments), timeout_s)

    assert limit() == STEP_TIMEOUT_S == 900
    assert limit(5) == 5
    assert limit(agent_timeout_s=3000, setup=["a"], verify=["a", "b"]) == 3000 + 7 * 120 + 300
    assert limit(agent_timeout_s="x") == 900
    assert _limit(ListToolsAction(), None) is None
    assert patience({}) > 600


def test_it_runs_in_process_too() -> None:
    local: LocalEnv[Any, Any, Any] = LocalEnv(lambda: OpenCodeEnvironment(ServerSettings()), CallToolAction)
    with local.sync() as env:
        arguments = {"endpoint": "scripted", "instruction": "x", "mode": "glass"}
        taken = env.step(CallToolAction(tool_name="run_rollout", arguments=arguments))
        assert "glass" in json.loads(_extract_text(taken.observation.result))["error"]
        assert env.state().rollouts_completed == 1


def test_any_mcp_client_finds_the_tool(served: Any) -> None:
    async def ask() -> Any:
        async with Client(served.url + "/mcp") as client:
            [tool] = await client.list_tools()
            arguments = {"endpoint": "scripted", "instruction": "x", "mode": "glass"}
            return tool.name, (await client.call_tool("run_rollout", arguments)).data

    name, text = asyncio.run(ask())
    assert name == "run_rollout"
    assert "glass" in json.loads(text)["error"]


@pytest.mark.parametrize(
    "answer",
    [
        '{"a": 1}',
        {"data": '{"a": 1}'},
        {"result": '{"a": 1}'},
        {"structured_content": {"result": '{"a": 1}'}},
        {"content": [{"type": "text", "text": '{"a": 1}'}]},
        [{"text": '{"a": 1}'}],
        {"a": 1},
    ],
)
def test_the_result_is_read_in_whatever_form_it_comes(answer: Any) -> None:
    assert json.loads(_extract_text(answer)) == {"a": 1}
    with pytest.raises(TypeError, match="no text"):
        _extract_text(3)


# -- the page -------------------------------------------------------------------------------------------------------


def test_the_page_says_that_it_needs_gradio() -> None:
    try:
        importlib.import_module("gradio")
    except ImportError:
        with pytest.raises(ImportError, match="pip install"):
            gradio_builder(None)
    else:
        pytest.skip("gradio is installed")


def test_a_filled_form_runs_a_rollout_and_shows_what_comes() -> None:
    env = OpenCodeEnvironment(ServerSettings())
    form = {"endpoint": "azure", "instruction": "x", "setup": "", "verify": "true\n", "model": ""}
    [(log, result)] = list(run_form(env, form))
    assert log == ""
    assert "unknown endpoint kind" in json.loads(result)["error"]
    env.close()
