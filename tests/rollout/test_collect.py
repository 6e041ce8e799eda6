"""Collecting episodes: records, the folder they are kept in, runs that go on, and failures that are no episodes."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from openenv.client.llm_client import LLMClient, LLMError, LLMResponse, OpenAIClient, ToolCall
from openenv.core.harness import (
    HarnessRolloutResult,
    HarnessRunLimits,
    MCPHarnessAdapter,
    ModelStep,
    ModelStepResult,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    ToolTraceEntry,
    VerifyResult,
)
from openenv.core.harness.collect import (
    METADATA_FILENAME,
    RESULTS_FILENAME,
    CollectResult,
    CollectRunner,
    EpisodeRecord,
    RolloutSerializer,
    build_dataset_readme,
    build_model_step,
    push_to_hf_hub,
)
from openenv.errors import ConnectFailed, NonFiniteReward
from openenv.protocol.tool_messages import Tool
from openenv.rollout.run.collect import CollectOptions, scripted_model_step
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn

GUESS = Tool(
    name="guess",
    description="Guess a number.",
    input_schema={"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
)


class Guessing(ResourceSession):
    """One guess, which is worth its number; `reward=None` gives no reward, `verdict` claims another one."""

    def __init__(self, task: Any, fails: list[Exception], reward: float | None, verdict: float | None) -> None:
        self._task = task
        self._fails = fails
        self._reward = reward
        self._verdict = verdict
        self.closed = 0

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Guess. Task: {self._task}"}]

    def list_tools(self) -> list[Tool]:
        return [GUESS]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if self._fails:
            raise self._fails.pop(0)
        return ToolResult(data={"hint": "over"}, done=True, metadata={"reward": self._reward})

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        assert final_state["tool_trace"][-1]["tool_name"] == "guess"
        return VerifyResult(env_reward=self._verdict, done=True, metrics={"steps": 1}, artifacts={"log": "a"})

    def close(self) -> None:
        self.closed += 1


class Sessions(ResourceSessionFactory[Guessing]):
    """Makes sessions, and remembers them with what they were made of."""

    def __init__(
        self, *rewards: float | None, fails: tuple[Exception, ...] = (), verdicts: tuple[float, ...] = ()
    ) -> None:
        self._rewards = list(rewards)
        self._fails = list(fails)
        self._verdicts = list(verdicts)
        self.made: list[tuple[Any, str | None, Guessing]] = []

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Guessing:
        reward = self._rewards.pop(0) if len(self._rewards) > 1 else self._rewards[0]
        session = Guessing(task, self._fails, reward, self._verdicts.pop(0) if self._verdicts else reward)
        self.made.append((task, episode_id, session))
        return session


def guesses(messages: list[dict[str, Any]], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
    """A teacher that guesses 1."""
    return ModelStepResult(LLMResponse("I guess.", [ToolCall("call-1", "guess", {"number": 1})]))


def run(
    folder: Path, sessions: Sessions, *, tasks: Any = None, teacher: ModelStep = guesses, **how: Any
) -> CollectResult:
    runner = CollectRunner(
        session_factory=sessions,
        harness_adapter=MCPHarnessAdapter(),
        serializer=RolloutSerializer(folder),
        tasks=tasks,
        limits=HarnessRunLimits(max_turns=3),
    )
    options = CollectOptions(
        **{field.name: how.pop(field.name) for field in fields(CollectOptions) if field.name in how}
    )
    return runner.run(**{"model_step": teacher, "num_episodes": 1, "options": options, **how})


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RESULTS_FILENAME).read_text().splitlines()]


def record(name: str = "ep-000000", **fields: Any) -> EpisodeRecord:
    values: dict[str, Any] = {"reward": 1.0, "done": True, "messages": [], "tool_trace": [], "metrics": {}}
    return EpisodeRecord(name, **{**values, "verify_metrics": {}, "artifacts": {}, **fields})


# -- records --------------------------------------------------------------------------------------------------------


def test_an_episode_is_a_line_of_json_with_the_published_fields(tmp_path: Path) -> None:
    result = run(tmp_path, Sessions(0.5), tasks=[{"seed": 3}])
    assert result == CollectResult(1, 0, 0, 0, ["ep-000000"], 0.5, 1.0, num_rewarded=1)
    (row,) = written(tmp_path)
    assert list(row) == [
        *("episode_id", "messages", "reward", "done", "tool_trace", "metrics", "verify_metrics", "artifacts"),
        *("task", "extra"),
    ]
    assert (row["episode_id"], row["reward"], row["done"], row["task"]) == ("ep-000000", 0.5, True, {"seed": 3})
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool"]
    tool_result = {"data": {"hint": "over"}, "done": True, "metadata": {"reward": 0.5}, "error": None}
    assert row["tool_trace"] == [{"tool_name": "guess", "arguments": {"number": 1}, "result": tool_result}]
    assert (row["verify_metrics"], row["artifacts"], row["extra"]) == ({"steps": 1}, {"log": "a"}, {})
    assert row["metrics"] == {"turns": 1, "tool_calls": 1}


def test_a_reward_must_be_the_environments_and_a_number() -> None:
    def rollout(reward: float | None) -> HarnessRolloutResult:
        entry = ToolTraceEntry("guess", {}, ToolResult(metadata={"reward": reward}))
        return HarnessRolloutResult(tool_trace=[entry])

    assert EpisodeRecord.from_rollout("a", rollout(1.0), VerifyResult(env_reward=1.0)).reward == 1.0
    with pytest.raises(ValueError, match=r"verify\.env_reward must forward the environment reward"):
        EpisodeRecord.from_rollout("a", rollout(1.0), VerifyResult(env_reward=0.5))
    with pytest.raises(ValueError, match="did not produce an environment reward"):
        EpisodeRecord.from_rollout("a", rollout(None), VerifyResult())
    with pytest.raises(NonFiniteReward, match="is inf; return a finite number"):
        EpisodeRecord.from_rollout("a", rollout(float("inf")), VerifyResult(env_reward=float("inf")))


def test_values_that_json_does_not_have_are_still_written(tmp_path: Path) -> None:
    folder = RolloutSerializer(tmp_path / "new" / "folder")
    folder.write_episode(record(extra={"nan": float("nan"), "path": Path("a"), "half": "\ud800"}))
    (row,) = written(tmp_path / "new" / "folder")
    assert row["extra"] == {"nan": None, "path": "a", "half": "\ud800"}


# -- the folder -----------------------------------------------------------------------------------------------------


def test_half_a_line_of_a_killed_process_is_no_episode_and_spoils_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RolloutSerializer(tmp_path)
    folder.write_episode(record("a"))
    whole = folder.results_path.read_bytes()
    folder.results_path.write_bytes(whole + whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        assert folder.collected_episode_ids() == {"a"}
    assert "results.jsonl:2 is incomplete" in caplog.text
    folder.write_episode(record("b"))
    assert [row["episode_id"] for row in written(tmp_path)] == ["a", "b"]


def test_a_long_last_line_without_an_end_is_kept(tmp_path: Path) -> None:
    folder = RolloutSerializer(tmp_path)
    line = json.dumps(record("a", extra={"text": "x" * 300_000}).to_dict())
    folder.results_path.write_text(line)
    folder.write_episode(record("b"))
    assert folder.collected_episode_ids() == {"a", "b"}
    assert len(written(tmp_path)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops}\n", "invalid JSON"),
        (b"\xff\n", "invalid UTF-8"),
        (b"[]\n", "expected an object"),
        (b"{}\n", "expected a string episode_id"),
        (b"[1]", "expected an object"),
    ],
)
def test_a_line_that_is_no_episode_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    folder = RolloutSerializer(tmp_path)
    folder.write_episode(record("a"))
    with folder.results_path.open("ab") as file:
        file.write(b"\n" + line)
    with pytest.raises(ValueError, match=rf"results.jsonl:3: {reason}"):
        folder.collected_episode_ids()


def test_metadata_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = RolloutSerializer(tmp_path)
    folder.write_metadata({"env": "a", "path": tmp_path})
    folder.write_metadata({"env": "b"})
    assert folder.read_metadata() == {"env": "b"}
    assert [path.name for path in tmp_path.iterdir()] == [METADATA_FILENAME]
    folder.metadata_path.write_text("{")
    assert folder.read_metadata() == {}


# -- runs -----------------------------------------------------------------------------------------------------------


def test_a_second_run_plays_only_what_is_missing_with_the_same_tasks(tmp_path: Path) -> None:
    first = run(tmp_path, Sessions(1.0), num_episodes=2, tasks=["t0", "t1"], episode_id_prefix="x")
    assert (first.num_collected, first.episode_ids) == (2, ["x-000000", "x-000001"])
    sessions = Sessions(-1.0, 3.0)
    second = run(tmp_path, sessions, num_episodes=4, tasks=["t0", "t1", "t2"], episode_id_prefix="x")
    assert (second.num_collected, second.num_skipped, second.avg_reward, second.success_rate) == (2, 2, 1.0, 0.5)
    assert [(task, name) for task, name, _ in sessions.made] == [("t2", "x-000002"), (None, "x-000003")]
    assert [row["task"] for row in written(tmp_path)] == ["t0", "t1", "t2", None]
    assert all(session.closed == 1 for _, _, session in sessions.made)


def test_without_resumption_the_old_results_are_kept_aside(tmp_path: Path) -> None:
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(tmp_path, Sessions(1.0), resume=False).num_collected == 1
    assert "moved existing results file" in str(caught[0].message)
    assert caught[0].category is RuntimeWarning
    aside = sorted(path.name for path in tmp_path.glob("results.*.bak.jsonl"))
    assert len(aside) == 2
    assert len(written(tmp_path)) == 1


def test_episodes_that_are_not_wanted_are_dropped_and_counted(tmp_path: Path) -> None:
    result = run(tmp_path, Sessions(-1.0, 1.0), num_episodes=2, should_keep=lambda one: (one.reward or 0) > 0)
    assert (result.num_collected, result.num_dropped, result.avg_reward) == (1, 1, 1.0)


def test_a_failure_of_the_server_is_no_episode_and_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sessions = Sessions(0.0, fails=(ConnectFailed("the [server] is gone"),))
    result = run(tmp_path, sessions, num_episodes=2)
    assert (result.num_collected, result.num_failed, result.num_left) == (1, 1, 0)
    assert result.failures == {"ep-000000": "ConnectFailed: the [server] is gone"}
    assert [row["episode_id"] for row in written(tmp_path)] == ["ep-000001"]
    assert "failed ep-000000: ConnectFailed: the [server] is gone" in capfd.readouterr().err
    assert [session.closed for _, _, session in sessions.made] == [1, 1]
    assert run(tmp_path, Sessions(0.0), num_episodes=2).num_collected == 1


def test_a_failed_episode_is_played_again_and_a_wrong_verdict_is_not(tmp_path: Path) -> None:
    sessions = Sessions(1.0, fails=(ConnectFailed("gone"), OSError("gone")))
    assert run(tmp_path / "a", sessions, retries=2).num_collected == 1
    assert len(sessions.made) == 3
    sessions = Sessions(1.0, verdicts=(0.5,))
    result = run(tmp_path / "b", sessions, retries=2)
    assert (result.num_failed, len(sessions.made)) == (1, 1)
    assert "must forward the environment reward" in result.failures["ep-000000"]


def test_a_run_stops_when_too_many_episodes_fail_in_a_row(tmp_path: Path) -> None:
    sessions = Sessions(1.0, fails=tuple(OSError("gone") for _ in range(9)))
    result = run(tmp_path, sessions, num_episodes=9, give_up_after=3)
    assert (result.num_failed, result.num_left, len(sessions.made)) == (3, 6, 3)


def test_an_environment_without_rewards_is_kept_only_on_request(tmp_path: Path) -> None:
    assert run(tmp_path, Sessions(None)).num_failed == 1
    result = run(tmp_path, Sessions(None), requires_reward=False)
    assert (result.num_collected, result.num_rewarded, result.avg_reward) == (1, 0, 0.0)
    assert written(tmp_path)[0]["reward"] is None


def test_several_episodes_are_played_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def teacher(messages: list[dict[str, Any]], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        together.wait(20)
        return guesses(messages, tools, sampling)

    result = run(tmp_path, Sessions(1.0), teacher=teacher, num_episodes=6, concurrency=3)
    assert result.num_collected == 6
    assert {row["episode_id"] for row in written(tmp_path)} == set(result.episode_ids)


def test_an_interrupted_run_ends_the_episodes_under_way(tmp_path: Path) -> None:
    second_has_begun, first_has_ended = threading.Event(), threading.Event()

    def teacher(messages: list[dict[str, Any]], tools: list[Tool], sampling: dict[str, Any]) -> ModelStepResult:
        if "quick" in messages[0]["content"]:
            assert second_has_begun.wait(20)
            return guesses(messages, tools, sampling)
        second_has_begun.set()
        assert first_has_ended.wait(20)
        return ModelStepResult(LLMResponse("", [ToolCall("1", "unknown", {})]))

    def interrupt(one: EpisodeRecord) -> bool:
        first_has_ended.set()
        raise KeyboardInterrupt

    sessions = Sessions(1.0)
    with pytest.raises(KeyboardInterrupt):
        run(
            tmp_path, sessions, tasks=["quick", "slow", "x"], teacher=teacher, num_episodes=3, concurrency=2,
            should_keep=interrupt,
        )  # fmt: skip
    assert all(session.closed == 1 for _, _, session in sessions.made)
    assert "openenv-collect" not in " ".join(thread.name for thread in threading.enumerate())


def test_a_session_that_cannot_be_closed_loses_no_episode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(Sessions):
        def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Guessing:
            session = super().create(task, seed, episode_id)

            def close() -> None:
                raise OSError("stuck")

            session.close = close  # type: ignore[method-assign]
            return session

    assert run(tmp_path, Sticky(1.0)).num_collected == 1
    assert "could not be closed" in caplog.text


@pytest.mark.parametrize("wrong", [{"num_episodes": -1}, {"retries": -1}, {"concurrency": 0}])
def test_numbers_out_of_range_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        run(tmp_path, Sessions(1.0), **wrong)


# -- teachers -------------------------------------------------------------------------------------------------------


def test_a_client_of_a_model_is_a_teacher() -> None:
    script = Script(turns=[Turn(text="Now.", calls=[ScriptedCall(name="guess", arguments={"number": 4})])])
    with ScriptedModel(script) as model:
        client = OpenAIClient("http://127.0.0.1", model.port, "m")
        step = build_model_step(client, system_prompt="Guess well.")
        messages = [{"role": "user", "content": "guess"}]
        answer = step(messages, [GUESS], {"temperature": 0.5, "top_p": 0.9})
        assert messages == [{"role": "user", "content": "guess"}]
        again = build_model_step(client)(messages, [GUESS], {})
    assert (answer.response.content, answer.response.tool_calls[0].args) == ("Now.", {"number": 4})
    assert again.response.content == "Now."


class Recording(LLMClient):
    """Remembers its requests; always on one and the same event loop."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1", 1)
        self.requests: list[tuple[Any, Any, Any]] = []
        self.loops: set[Any] = set()

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        raise NotImplementedError

    async def complete_with_tools(self, messages: Any, tools: Any, **kwargs: Any) -> LLMResponse:
        self.requests.append((messages, tools, kwargs))
        self.loops.add(asyncio.get_running_loop())
        if kwargs.get("temperature") == 2.0:
            json.loads("{")
        return LLMResponse("ok")


def test_sampling_that_clients_do_not_know_is_dropped_with_a_warning() -> None:
    client = Recording()
    messages = [{"role": "system", "content": "own"}]
    with pytest.warns(RuntimeWarning, match="Dropping unsupported sampling keys: seed, top_k"):
        build_model_step(client, system_prompt="other")(messages, [GUESS], {"top_k": 1, "seed": 2, "max_tokens": 3})
    build_model_step(client)(messages, [GUESS], {})
    ((sent, tools, options), _) = client.requests
    assert (sent, options) == (messages, {"max_tokens": 3})
    assert tools == [{"name": "guess", "description": "Guess a number.", "inputSchema": GUESS.input_schema}]
    assert len(client.loops) == 1, "SDK clients keep their connections in one loop"


def test_arguments_that_are_no_json_are_the_models_failure() -> None:
    with pytest.raises(LLMError, match="arguments that are not JSON"):
        build_model_step(Recording())([], [], {"temperature": 2.0})


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ('{"legal_actions": [4, 5]}', 4),
        ("Legal actions: [7]", 7),
        ('{"legal_actions": []}', 0),
        ("nothing", 0),
    ],
)
def test_the_scripted_teacher_takes_the_first_legal_action(content: str, number: int) -> None:
    answer = scripted_model_step([{"role": "user", "content": content}], [GUESS], {})
    assert answer.response.tool_calls[0].args == {"number": number}


def test_the_scripted_teacher_calls_the_tools_in_turn() -> None:
    say = Tool(
        name="say",
        description="",
        input_schema={
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 3}, "mood": {"enum": ["good", "bad"]}},
            "required": ["text", "mood"],
        },
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    names = []
    for _ in range(3):
        answer = scripted_model_step(messages, [say, GUESS], {}).response
        names.append(answer.tool_calls[0].name)
        messages.append({"role": "assistant", "content": answer.content})
    assert names == ["say", "guess", "say"]
    assert answer.tool_calls[0].args == {"text": "aaa", "mood": "good"}
    assert scripted_model_step(messages, [], {}).response.tool_calls == []


# -- the Hub --------------------------------------------------------------------------------------------------------


def test_the_card_names_the_data_and_how_it_was_made(tmp_path: Path) -> None:
    run(tmp_path, Sessions(1.0), num_episodes=2)
    RolloutSerializer(tmp_path).write_metadata({"env": "maze|2", "model": None, "system_prompt": "a\nb `c`"})
    card = build_dataset_readme(tmp_path)
    front_matter = yaml.safe_load(card.split("---\n")[1])
    files = [{"split": "train", "path": "results.jsonl"}]
    assert front_matter["configs"] == [{"config_name": "default", "data_files": files}]
    assert "**Episodes:** 2\n" in card
    assert "| `env` | `maze\\|2` |\n| `model` | `null` |\n| `system_prompt` | `a b 'c'` |" in card
    assert "`messages`" in card
    assert "**Episodes:** 1\n" in build_dataset_readme_of(tmp_path / "one")


def build_dataset_readme_of(folder: Path) -> str:
    RolloutSerializer(folder).write_episode(record())
    return build_dataset_readme(folder)


def test_a_folder_without_episodes_is_not_uploaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="collect episodes first"):
        push_to_hf_hub(tmp_path, "me/data")
