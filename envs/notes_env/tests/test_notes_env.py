"""The Notes environment: tasks, tools and rewards in this process, and episodes on a server started from its folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastmcp import Client

from notes_env import NotesEnv, NotesState
from notes_env.server.app import app
from notes_env.server.catalogue import CATALOGUE, TASK_NOTE, Task, draw_task, make_task
from notes_env.server.notes_environment import MAX_STEPS, NotesEnvironment
from openenv import LocalEnv
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction, ListToolsObservation
from openenv.core.env_server.types import Action
from openenv.errors import ExecutionError
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]

TOOLS = ["list_notes", "read_note", "write_note", "delete_note", "submit"]
TASKS = list(CATALOGUE)


@pytest.fixture
def env() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process."""
    with LocalEnv(NotesEnvironment, CallToolAction).sync() as local:
        yield local


def use(env: Any, tool: str, **arguments: Any) -> Any:
    """Call a tool as a step."""
    return env.step(CallToolAction(tool_name=tool, arguments=arguments))


def solve(env: Any, task: Task) -> None:
    """Do all that a task wants, but for handing it in."""
    for title, text in task.wanted.items():
        if text is None:
            use(env, "delete_note", title=title)
        else:
            use(env, "write_note", title=title, text=text)


# -- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_id", TASKS)
def test_a_seed_makes_the_same_task_again_and_another_seed_another(task_id: str) -> None:
    assert make_task(task_id, 7) == make_task(task_id, 7)
    assert len({tuple(sorted(make_task(task_id, seed).notes.items())) for seed in range(20)}) > 10


@pytest.mark.parametrize("task_id", TASKS)
def test_every_task_wants_something_that_is_not_there_yet(task_id: str) -> None:
    for seed in range(50):
        task = make_task(task_id, seed)
        assert task.wanted
        assert TASK_NOTE not in task.wanted
        assert all(task.notes.get(title) != text for title, text in task.wanted.items())
        assert all(text is not None or title in task.notes for title, text in task.wanted.items())


def test_the_sum_is_that_of_the_inbox_only() -> None:
    for seed in range(20):
        task = make_task("sum_prices", seed)
        inbox = [text for title, text in task.notes.items() if title.startswith("inbox")]
        assert len(inbox) == 3
        prices = [int(word) for text in inbox for word in text.split() if word.isdigit()]
        assert task.wanted == {"total": str(sum(prices))}


def test_every_task_is_drawn_some_time() -> None:
    assert {draw_task(seed).id for seed in range(50)} == set(TASKS)


# -- episodes -------------------------------------------------------------------------------------------------------


def test_a_reset_describes_the_task(env: SyncLocalEnv[Any, Any, Any]) -> None:
    observation = env.reset(task_id="sum_prices", seed=3).observation
    task = make_task("sum_prices", 3)
    assert (observation.task_id, observation.instruction) == ("sum_prices", task.instruction)
    assert observation.titles == list(task.notes)
    assert use(env, "read_note", title=TASK_NOTE).observation.result.data == task.instruction


def test_without_a_task_or_a_seed_one_is_drawn_and_shown_in_the_state(env: SyncLocalEnv[Any, Any, Any]) -> None:
    begun = env.reset().observation
    state = env.state()
    assert state.task_id == begun.task_id
    assert env.reset(seed=state.seed).observation == begun


def test_a_task_that_does_not_exist_leaves_the_episode_as_it_was(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(task_id="clear_done", seed=1)
    before = env.state().model_copy()
    with pytest.raises(ExecutionError, match="sum_prices"):
        env.reset(task_id="world_peace")
    assert env.state() == before


def test_the_tools_are_listed_at_any_time_and_for_nothing() -> None:
    env = NotesEnvironment()
    for _ in range(2):  # before an episode and in it
        listed = env.step(ListToolsAction())
        assert isinstance(listed, ListToolsObservation)
        assert [tool.name for tool in listed.tools] == TOOLS
        env.reset(task_id="clear_done")
    assert env.state.step_count == 0
    env.close()


def test_notes_are_read_written_and_deleted(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(task_id="clear_done", seed=1)
    assert use(env, "write_note", title="new", text="one").observation.result.data == "written"
    assert use(env, "write_note", title="new", text="two").observation.result.data == "replaced"
    assert use(env, "read_note", title="new").observation.result.data == "two"
    assert "new" in use(env, "list_notes").observation.result.data
    assert env.state().notes["new"] == "two"
    assert use(env, "delete_note", title="new").observation.result.data == "deleted"
    assert "new" not in env.state().notes
    assert env.state().step_count == 5


@pytest.mark.parametrize(
    ("tool", "arguments", "kind"),
    [
        ("read_note", {"title": "nowhere"}, "execution_error"),
        ("delete_note", {"title": "nowhere"}, "execution_error"),
        ("write_note", {"title": "", "text": ""}, "execution_error"),
        ("write_note", {"title": "x"}, "invalid_args"),
        ("reset", {}, "tool_not_found"),
    ],
)
def test_a_call_that_fails_is_a_step_without_reward(
    env: SyncLocalEnv[Any, Any, Any], tool: str, arguments: dict[str, Any], kind: str
) -> None:
    env.reset(task_id="clear_done", seed=1)
    before = env.state().notes
    result = use(env, tool, **arguments)
    assert result.observation.error.error_type == kind
    assert (result.reward, result.done) == (0.0, False)
    assert (env.state().notes, env.state().step_count) == (before, 1)


# -- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_id", TASKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_task_that_is_done_with_care_earns_everything(
    env: SyncLocalEnv[Any, Any, Any], task_id: str, seed: int
) -> None:
    env.reset(task_id=task_id, seed=seed)
    solve(env, make_task(task_id, seed))
    assert env.state().progress == 1.0
    assert env.state().total_reward == 0.0
    result = use(env, "submit")
    assert (result.reward, result.done) == (pytest.approx(1.0), True)
    assert (result.observation.terminated, result.observation.truncated) == (True, False)
    state = env.state()
    assert state.is_submitted
    assert state.total_reward == pytest.approx(1.0)
    assert state.scores["progress"] == state.scores["care"] == state.scores["submitted"] == 1.0


def test_half_of_the_work_earns_half_of_its_part(env: SyncLocalEnv[Any, Any, Any]) -> None:
    task = make_task("clear_done", 1)
    env.reset(task_id=task.id, seed=task.seed)
    use(env, "delete_note", title=next(iter(task.wanted)))
    assert use(env, "submit").reward == pytest.approx(0.7 * 0.5 + 0.3)


def test_carelessness_costs(env: SyncLocalEnv[Any, Any, Any]) -> None:
    task = make_task("sum_prices", 1)
    env.reset(task_id=task.id, seed=task.seed)
    solve(env, task)
    use(env, "delete_note", title="old offer")
    assert use(env, "submit").reward == pytest.approx(0.7)


@pytest.mark.parametrize("task_id", TASKS)
def test_handing_in_nothing_earns_nothing(env: SyncLocalEnv[Any, Any, Any], task_id: str) -> None:
    env.reset(task_id=task_id, seed=1)
    result = use(env, "submit")
    assert (result.reward, result.done) == (0.0, True)


def test_blanks_around_the_answer_are_forgiven(env: SyncLocalEnv[Any, Any, Any]) -> None:
    task = make_task("sum_prices", 1)
    env.reset(task_id=task.id, seed=task.seed)
    use(env, "write_note", title="total", text=f" {task.wanted['total']}\n")
    assert use(env, "submit").reward == pytest.approx(1.0)


def test_an_episode_that_is_never_handed_in_is_truncated(env: SyncLocalEnv[Any, Any, Any]) -> None:
    env.reset(task_id="clear_done", seed=1)
    results = [use(env, "list_notes") for _ in range(MAX_STEPS)]
    assert [result.done for result in results] == [False] * (MAX_STEPS - 1) + [True]
    last = results[-1].observation
    assert (last.terminated, last.truncated, last.reward) == (False, True, 0.0)


@pytest.mark.parametrize("played", [False, True])
def test_a_call_outside_an_episode_is_an_error(env: SyncLocalEnv[Any, Any, Any], played: bool) -> None:
    if played:
        env.reset(task_id="clear_done", seed=1)
        use(env, "submit")
    with pytest.raises(ExecutionError, match="call reset first"):
        use(env, "list_notes")
    env.reset(task_id="clear_done", seed=1)
    assert TASK_NOTE in use(env, "list_notes").observation.result.data


def test_the_reward_is_in_the_observation_and_never_in_a_tools_result(env: SyncLocalEnv[Any, Any, Any]) -> None:
    task = make_task("sum_prices", 1)
    env.reset(task_id=task.id, seed=task.seed)
    solve(env, task)
    result = use(env, "submit")
    assert result.reward == pytest.approx(1.0)
    outcome = result.observation.result
    assert outcome.data == "handed in"
    sent = json.dumps([outcome.content, outcome.structured_content, outcome.meta])
    assert not any(word in sent for word in ("reward", "score", "1.0", "done"))


def test_other_actions_are_refused() -> None:
    env = NotesEnvironment()
    with pytest.raises(ValueError, match="tools"):
        env.step(Action())
    env.close()


def test_the_same_seed_and_draws_make_the_same_episode() -> None:
    one, other = NotesEnvironment(draw_seed=lambda: 5), NotesEnvironment(draw_seed=lambda: 5)
    assert one.reset() == other.reset()
    one.close()
    other.close()


# -- served ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_orchestrator_plays_on_a_server_started_from_the_folder(serve_folder: Callable[[str], str]) -> None:
    task = make_task("file_draft", 2)
    with NotesEnv(base_url=serve_folder("notes_env")).sync() as env, env.new_session() as other:
        begun = env.reset(task_id=task.id, seed=task.seed, episode_id="served")
        other.reset(task_id="clear_done", seed=1)
        assert begun.observation.instruction == task.instruction  # type: ignore[attr-defined]
        assert [tool.name for tool in env.list_tools()] == TOOLS
        assert env.call_tool("list_notes") == list(task.notes)
        solve(env, task)
        result = use(env, "submit")
        assert (result.reward, result.done) == (pytest.approx(1.0), True)
        assert result.observation.result["data"] == "handed in"
        state = env.state()
        assert isinstance(state, NotesState)
        assert (state.episode_id, state.task_id, state.progress) == ("served", task.id, 1.0)
        assert state.step_count == len(task.wanted) + 1
        assert other.state().notes == dict(make_task("clear_done", 1).notes)  # type: ignore[attr-defined]
        with pytest.raises(ExecutionError, match="call reset first"):
            use(env, "list_notes")
        assert not env.reset(task_id=task.id).done


def test_an_agent_finds_its_task_and_no_reward_over_mcp(serve_env: Callable[..., Served]) -> None:
    url = serve_env(app).url

    async def play() -> list[Any]:
        async with Client(url + "/mcp") as client:
            titles = (await client.call_tool("list_notes", {})).data
            instruction = (await client.call_tool("read_note", {"title": TASK_NOTE})).data
            written = await client.call_tool("write_note", {"title": "mine", "text": "x"})
            handed_in = await client.call_tool("submit", {})
            return [titles, instruction, written.data, handed_in]

    titles, instruction, written, handed_in = asyncio.run(play())
    assert TASK_NOTE in titles
    assert "notes" in instruction
    assert (written, handed_in.data) == ("written", "handed in")
    assert not any(word in str(handed_in).lower() for word in ("reward", "score", "done=", "'done'"))
