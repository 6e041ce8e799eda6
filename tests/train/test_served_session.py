"""Sessions of served environments for a harness: tools, typed actions, unions, and who is to blame for a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, RootModel

from environments import Idle, Shelf, Tools, Track, Walk
from environments import Spot as TrackSpot
from openenv import create_app
from openenv.client.llm_client import LLMResponse, ToolCall
from openenv.errors import ExecutionError, RolloutError, ToolTransportError
from openenv.protocol.tool_messages import CallToolAction, CallToolObservation, ToolError, ToolErrorType
from openenv.rollout.run.agent_sessions import HarnessRunLimits, MCPHarnessAdapter, ModelStepResult
from openenv.testing import serve
from openenv.train.served_session import EnvFamily, ServedSessionFactory, env_family
from openenv.types import Action, Observation


def served_session(app: Any) -> Iterator[ServedSessionFactory]:
    with serve(app) as served:
        yield ServedSessionFactory(served.url)


# -- typed actions --------------------------------------------------------------------------------------------------


@pytest.fixture
def track() -> Iterator[ServedSessionFactory]:
    yield from served_session(create_app(Track, Walk, TrackSpot, max_concurrent_envs=4))


def test_an_action_is_a_tool_with_its_fields(track: ServedSessionFactory) -> None:
    (tool,) = track.tools
    assert (tool.name, tool.description) == ("act", "Go so far.")
    assert list(tool.input_schema["properties"]) == ["by"]
    session = track.create({"seed": 1}, episode_id="e")
    try:
        assert session.initial_messages() == [{"role": "user", "content": f'{Track.__doc__}\n\n{{"at": 1}}'}]
        result = session.call_tool("act", {"by": 2})
        assert (result.data, result.done, result.metadata["reward"]) == ({"at": 3}, True, 3.0)
        assert result.metadata["state"] == {"episode_id": "e", "step_count": 1}
        verdict = session.verify([{"role": "user"}], {"tool_trace": []})
        assert (verdict.env_reward, verdict.done, verdict.metrics) == (3.0, True, {"steps": 1, "reward_sum": 3.0})
        assert verdict.artifacts == {"final_state": {"episode_id": "e", "step_count": 1}, "transcript_length": 1}
    finally:
        session.close()


def test_the_model_reads_why_an_action_was_refused_and_goes_on(track: ServedSessionFactory) -> None:
    session = track.create(None)
    try:
        refused = session.call_tool("act", {"by": "far"})
        assert (refused.data, refused.done) == (None, False)
        assert "by" in str(refused.error)
        with pytest.raises(KeyError, match="Unknown tool: fly"):
            session.call_tool("fly", {})
        assert session.call_tool("act", {}).data == {"at": 1}
    finally:
        session.close()


def test_a_task_has_arguments_of_reset(track: ServedSessionFactory) -> None:
    with pytest.raises(TypeError, match="arguments of reset"):
        track.create("find the way")


class Go(Action):
    """Go somewhere."""

    kind: Literal["go"] = "go"
    to: str


class Wait(Action):
    kind: Literal["reset"] = "reset"


class Plan(RootModel[Annotated[Go | Wait, Field(discriminator="kind")]]):
    """Something to do."""


class Planner(Idle):
    def step(self, action: Plan, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if getattr(action.root, "to", "") == "hell":
            raise RuntimeError("there is no way back")
        return Observation(reward=1.0, metadata={"did": action.root.kind})

    @property
    def state(self) -> Any:
        raise RuntimeError("there is none")


def test_a_union_is_a_tool_for_each_member() -> None:
    for factory in served_session(create_app(Planner, Plan, Observation)):
        names = {tool.name: list(tool.input_schema["properties"]) for tool in factory.tools}
        assert names == {"go": ["to"], "act_reset": []}
        session = factory.create(None)
        assert "The episode has begun" in session.initial_messages()[0]["content"]
        assert session.call_tool("go", {"to": "town"}).metadata == {"reward": 1.0, "state": None}
        assert session.call_tool("act_reset", {}).error is None
        with pytest.raises(ExecutionError, match="no way back"):
            session.call_tool("go", {"to": "hell"})
        session.close()


class Word(RootModel[str]):
    """A bare word."""


def test_actions_that_are_no_objects_are_refused() -> None:
    with pytest.raises(RolloutError, match="not JSON objects"):
        for _ in served_session(create_app(Planner, Word, Observation)):
            pass


# -- tools ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action_class", [CallToolAction, Action])
def test_an_environment_with_tools_is_played_by_them(action_class: Any) -> None:
    for factory in served_session(create_app(Shelf, action_class, CallToolObservation)):
        assert [tool.name for tool in factory.tools] == ["put", "drop"]
        assert factory.tools[0].input_schema["required"] == ["item"]
        session = factory.create(None)
        assert session.initial_messages()[0]["content"].startswith("Keeps what is put on it; one tool fails.")
        assert session.call_tool("put", {"item": "a"}).data == 1
        assert "too high" in str(session.call_tool("drop", {}).error)
        assert session.call_tool("put", {}).error
        assert session.verify([]).env_reward is None
        session.close()


class Unreachable(Tools):
    TOOLS = ("call",)

    def call(self) -> str:
        return ""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if isinstance(action, CallToolAction):
            error = ToolError(error_type=ToolErrorType.TRANSPORT_ERROR, message="no line")
            return CallToolObservation(tool_name="call", result=None, error=error)
        return super().step(action, timeout_s, **kwargs)


def test_a_tool_that_the_environment_cannot_reach_fails_the_episode() -> None:
    for factory in served_session(create_app(Unreachable, CallToolAction, CallToolObservation)):
        session = factory.create(None)
        with pytest.raises(ToolTransportError, match="no line"):
            session.call_tool("call", {})
        session.close()


def test_without_a_server_there_is_no_factory() -> None:
    with pytest.raises(RolloutError, match="Is the server running"):
        ServedSessionFactory("http://127.0.0.1:9")


# -- the two environments with a spec of their own -------------------------------------------------------------------


class SpielAction(Action):
    """As OpenSpiel's environment has it."""

    action_id: int
    game_name: str = "catch"
    game_params: dict[str, Any] = Field(default_factory=dict)


class SpielObservation(Observation):
    info_state: list[float] = Field(default_factory=list)
    legal_actions: list[int] = Field(default_factory=list)
    game_phase: str = "playing"
    current_player_id: int = 0


class TicTacToe(Idle):
    """The agent is X and wins with three moves; O moves to the last free cell."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.cells = [0] * 9
        return self._seen()

    def step(self, action: SpielAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        assert action.game_name == "tic_tac_toe"
        self.cells[action.action_id] = 1
        if self.cells.count(1) < 3:
            self.cells[max(n for n in range(9) if not self.cells[n])] = 2
        return self._seen()

    def _seen(self) -> SpielObservation:
        planes = [float(cell == plane) for plane in range(3) for cell in self.cells]
        is_over = self.cells.count(1) == 3
        legal = [] if is_over else [n for n in range(9) if not self.cells[n]]
        return SpielObservation(info_state=planes, legal_actions=legal, done=is_over, reward=float(is_over))


def test_a_game_of_openspiel_is_played_by_moves() -> None:
    with serve(create_app(TicTacToe, SpielAction, SpielObservation)) as served:
        factory = ServedSessionFactory(served.url, env_family("openspiel:tic_tac_toe"))
        (tool,) = factory.tools
        assert (tool.name, list(tool.input_schema["properties"])) == ("play_move", ["action_id", "game_params"])
        session = factory.create(None)
        (first,) = session.initial_messages()
        assert first["content"].startswith("You play tic_tac_toe. Call play_move")
        assert '"legal_actions": [0, 1, 2' in first["content"]
        seen = session.call_tool("play_move", {"action_id": 0}).data
        assert seen["board"] == "X 1 2\n3 4 5\n6 7 O"
        session.close()


class AnswerAction(Action):
    answer: str


class Question(Observation):
    question: str = ""
    score: float | None = None


class Sums(Idle):
    """As the environment of Reasoning Gym: a reset names the dataset, the one answer is scored."""

    seeds: ClassVar[list[int | None]] = []

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        dataset_name: str | None = None,
        dataset_config: dict[str, Any] | None = None,
        size: int = 5,
    ) -> Any:
        assert (dataset_name, dataset_config, size) == ("chain_sum", {"min_terms": 2}, 1)
        self.seeds.append(seed)
        return Question(question="1 + 1 = ?")

    def step(self, action: AnswerAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        score = float(action.answer == "2")
        return Question(score=score, reward=score, done=True)


def test_a_dataset_of_reasoning_gym_asks_another_question_each_time() -> None:
    family = env_family("reasoning_gym:chain_sum", {"min_terms": 2})
    assert family.tasks is not None
    tasks = family.tasks()
    with serve(create_app(Sums, AnswerAction, Question)) as served:
        factory = ServedSessionFactory(served.url, family)
        assert [tool.name for tool in factory.tools] == ["answer"]
        for _ in range(2):
            session = factory.create(next(tasks))
            assert session.initial_messages() == [{"role": "user", "content": f"{Sums.__doc__}\n\n1 + 1 = ?"}]
            limits = HarnessRunLimits(max_turns=3)
            result = MCPHarnessAdapter().run_white_box(
                lambda *_: ModelStepResult(LLMResponse("", [ToolCall("1", "answer", {"answer": "2"})])), session, limits
            )
            assert (result.done, session.verify(result.messages).env_reward) == (True, 1.0)
            session.close()
    first, second = Sums.seeds
    assert first != second


def test_a_spec_without_its_variant_or_with_an_unknown_one_is_refused() -> None:
    for spec in ("openspiel", "openspiel:", "reasoning_gym"):
        with pytest.raises(ValueError, match="names no variant"):
            env_family(spec)
    with pytest.raises(ValueError, match="only openspiel:GAME and reasoning_gym:DATASET have variants"):
        env_family("maze:big")
    for spec in ("maze", "http://localhost:8000"):
        assert env_family(spec, {"size": 3}) == EnvFamily(
            reset_arguments={"size": 3}, add_to_observation=env_family(spec).add_to_observation
        )
