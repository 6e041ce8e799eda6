"""What adapters for trainers share: the rules of an episode, and tools that are called in writing."""

from __future__ import annotations

import contextlib
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from openenv.adapters import importing
from openenv.client.rewards import RewardHistory
from openenv.errors import (
    NonFiniteReward,
    NoRewards,
    PackageUnavailable,
    RequestValidationError,
    SessionLost,
    ToolArgumentsError,
    ToolTransportError,
)
from openenv.rollout.agents.dialogue import AnswerRefused, TextDialogue, WrittenToolDialogue, conversation_of
from openenv.rollout.agents.served_episode import EpisodeFailed, EpisodeRules
from openenv.types import StepResult

TOOLS = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]


def result(reward: float | None = None, *, done: bool = False, **observation: object) -> StepResult[object]:
    return StepResult({"text": "seen", **observation}, reward, done)


def test_rewards_add_up_or_the_last_one_counts() -> None:
    for rule, reward in (("sum", 0.75), ("last", 0.5)):
        rules = EpisodeRules(TextDialogue(), rule)  # type: ignore[arg-type]
        rules.begin(result())
        assert [rules.take(result(0.25)), rules.take(result()), rules.take(result(0.5, done=True))] == ["seen"] * 3
        assert (rules.reward, rules.is_over) == (reward, True)


def test_what_the_model_did_wrong_is_for_it_to_read_and_the_rest_is_no_reward() -> None:
    rules = EpisodeRules(TextDialogue())
    rules.begin(result())
    assert rules.refuse(RequestValidationError("no such move")).startswith("Error: ")
    assert rules.refuse(ToolArgumentsError("add", "wrong arguments")).startswith("Error: ")
    assert rules.reward == 0.0
    for error in (ToolTransportError("add", "unreachable"), SessionLost("gone"), OSError("broken")):
        with pytest.raises(EpisodeFailed):
            rules.refuse(error)
        assert (rules.reward, rules.is_over) == (None, True)
        rules.begin(result())
        assert rules.reward == 0.0
    with pytest.raises(EpisodeFailed, match="no way"):
        rules.take(result(1.0, tool_name="add", error={"error_type": "transport_error", "message": "no way"}))
    assert rules.reward is None


@pytest.mark.parametrize(
    "broken",
    [
        result(float("nan")),
        result(float("inf")),
        result(float("-inf")),
        result("much"),  # type: ignore[arg-type]
        StepResult({"text": "seen"}, None, False, {"nonfinite_reward": "nan"}),
    ],
    ids=lambda one: str(one.reward),
)
@pytest.mark.parametrize("rule", ["sum", "last"])
def test_a_reward_that_is_not_finite_fails_the_episode(rule: str, broken: StepResult[object]) -> None:
    rules = EpisodeRules(TextDialogue(), rule)  # type: ignore[arg-type]
    rules.begin(result())
    rules.take(result(1.0))
    with pytest.raises(EpisodeFailed, match="NonFiniteReward") as caught:
        rules.take(broken)
    assert isinstance(caught.value.__cause__, NonFiniteReward)
    assert rules.reward is None
    with pytest.raises(EpisodeFailed, match="NonFiniteReward"):
        rules.begin(broken)


def test_finite_rewards_that_add_up_to_infinity_fail_the_episode() -> None:
    rules = EpisodeRules(TextDialogue())
    rules.begin(result())
    rules.take(result(1.5e308))
    with pytest.raises(EpisodeFailed, match="inf"):
        rules.take(result(1.5e308))


def test_a_missing_reward_is_zero_if_any_episode_of_the_run_had_one_and_otherwise_the_run_stops() -> None:
    history = RewardHistory(limit=3)

    def play(*rewards: float | None) -> float | None:
        rules = EpisodeRules(TextDialogue(), history=history)
        rules.begin(result())
        for reward in rewards:
            rules.take(result(reward))
        assert rules.final_reward() == rules.final_reward()  # an episode ends once
        return rules.final_reward()

    assert [play(None), play()] == [0.0, 0.0]
    with pytest.raises(NoRewards, match="No reward in 3 episodes"):
        play(None)
    assert play(None, 0.0) == 0.0  # a reward of 0 is one
    assert [play(None) for _ in range(9)] == [0.0] * 9


def test_tools_can_be_called_in_writing() -> None:
    dialogue = WrittenToolDialogue(TOOLS, "Be brief.")
    system, first = dialogue.opening({"text": "Two numbers."})
    assert system["content"] == "Be brief."
    assert first["content"].startswith("Call a tool")
    assert first["content"].endswith("\n\nTwo numbers.")
    assert '"add"' in first["content"]
    assert dialogue.opening({})[-1]["content"].startswith("Call a tool")
    called = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}
    for text in (
        '{"tool_name": "add", "arguments": {"a": 1}}',
        'So: {"name": "add", "arguments": {"a": 1}}',
    ):
        assert dialogue.actions({"content": text}) == [called]
    for text in ("Hello.", '{"arguments": {}}', '{"tool_name": "add", "arguments": [1]}'):
        with pytest.raises(AnswerRefused, match="JSON object"):
            dialogue.actions({"content": text})
    assert dialogue.shown({"tool_name": "add", "result": {"data": 3}}) == "3"
    assert dialogue.shown({"tool_name": "add", "error": {"message": "no"}}) == "Error: no"


SYSTEM = {"role": "system", "content": "Play."}
RULES = {"role": "system", "content": "Obey."}
ASK = {"role": "user", "content": "Ready?"}


@pytest.mark.parametrize(
    ("prompt", "opening", "expected"),
    [
        ([], [SYSTEM, ASK], [SYSTEM, ASK]),
        ([ASK], [SYSTEM, ASK], [SYSTEM, ASK, ASK]),
        ([RULES, ASK], [SYSTEM, ASK], [RULES, ASK, ASK]),  # the row's, not two
        ([ASK, RULES], [ASK], [RULES, ASK, ASK]),
        ([ASK], [ASK], [ASK, ASK]),
    ],
)
def test_the_system_message_comes_first_and_once(prompt: Any, opening: Any, expected: Any) -> None:
    assert conversation_of(prompt, opening) == expected


def test_a_prompt_with_two_system_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="2 system messages"):
        conversation_of([SYSTEM, RULES], [])


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("train.trainers.sb3", "stable_baselines3"),
        ("train.trainers.skyrl", "skyrl_gym"),
        ("train.trainers.verl", "verl"),
        ("train.trainers.verifiers", "verifiers"),
        ("adapters.verifiers", "verifiers"),
        ("adapters.pettingzoo", "pettingzoo"),
    ],
)
def test_an_adapter_names_the_package_that_it_needs(module: str, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(PackageUnavailable, match=rf"openenv\.{module} needs .*>=.*pip install '"):
        importlib.import_module(f"openenv.{module}")


@pytest.mark.parametrize(
    ("installed", "is_refused"), [("0.9.0", True), ("0.9.1.dev4", True), ("0.9.1", False), ("0.10.0rc1", False)]
)
def test_an_old_package_is_refused_with_the_command_that_updates_it(
    installed: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / f"elder_trainer-{installed}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: elder-trainer\nVersion: {installed}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.ExitStack() as stack:
        if is_refused:
            text = rf"adapter needs elder-trainer>=0\.9\.1: pip install .*\({installed} is installed\)"
            stack.enter_context(pytest.raises(PackageUnavailable, match=text))
        with importing("elder-trainer>=0.9.1", needed_by="adapter"):
            assert not is_refused
