"""How a judge asks a model, and which answers it takes for a score."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from openenv.env.rubrics import CachedClient, LLMJudge, Rubric, ScoreParseError, WeightedSum
from openenv.env.rubrics.llm_judge import parse_score


class Scripted:
    """Answers every prompt with the same text, or fails with the same error."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.prompts: list[str] = []

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        self.prompts.append(prompt)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Flat(Rubric):
    def forward(self, action: Any, observation: Any) -> float:
        return 0.5


def judge(answer: str | Exception, **options: Any) -> float:
    return asyncio.run(LLMJudge("{action} {observation}", Scripted(answer), **options).acall("a", "o"))


READABLE = {
    "0.8": 0.8,
    " 1 ": 1.0,
    ".5": 0.5,
    "0.9.": 0.9,
    "1e-3": 0.001,
    "-1": -1.0,
    "\N{MINUS SIGN}1": -1.0,
    "Score: -0.5": -0.5,
    "8/10": 0.8,
    "8 / 10": 0.8,
    "8 out of 10": 0.8,
    "80%": 0.8,
    "80 percent": 0.8,
    "The score is 0.9": 0.9,
    "On a scale of 0 to 1, this answer deserves 0.9.": 0.9,
    "Between 0.0 and 1.0: 0.3": 0.3,
    "Rated 8/10 on a 1-10 scale": 0.8,
    "0.7, that is 70%": 0.7,
    "gpt-4 gives 0.7": 0.7,
    "Score: 0.8": 0.8,
    "score=0.25": 0.25,
    "**Score:** 0.8": 0.8,
    "**Final score: 8/10**": 0.8,
    "Score (0-1): 0.4": 0.4,
    "3 mistakes in lines 10-20.\nScore: 0.75\n1. Be brief": 0.75,
    "Style score: 0.2\nClarity score: 0.4\nOverall score: 0.3": 0.3,
    '{"score": 0.8}': 0.8,
    '{"score": "8/10"}': 0.8,
    '```json\n{"why": "5 {bad} lines", "score": 0.8}\n```': 0.8,
    '{"parts": [{"score": 1}, {"score": 0}], "score": 0.5}': 0.5,
    "I counted 3 of 7.\n<score>0.8</score>": 0.8,
    "<SCORE> 80% </SCORE>": 0.8,
    "Write <score>number</score>. <score>0.8</score>": 0.8,
    "<think>perhaps 0.2, no 0.4. Score: 0.4</think>0.9": 0.9,
}

UNREADABLE = [
    "",
    "good",
    "0.3 or 0.8",
    "A score of 1 means perfect. I give 0.7",
    "3-4",
    "Score: 0-1",
    "On a scale of 1 to 10 I give 8",
    "On a scale of 1 to 10:\nScore: 8",
    "On a 1-10 scale: <score>8</score>",
    'On a scale of 1 to 5: {"score": 4}',
    "Score (1-10): 8",
    "Score (out of 10): 8",
    "Style score: 0.2\nClarity score: 0.4",
    "<score>0.1</score><score>0.9</score>",
    "<score>high</score> 0.9",
    '{"score": null} 0.9',
    '{"score": true}',
    '{"score": NaN}',
    '{"score": 1e999}',
    '{"score": 1' + 400 * "0" + "}",
    "5/0",
    "1/2/2024",
    "v1.2.3",
    "1,000",
    "1e999%",
]


@pytest.mark.parametrize(("answer", "expected"), READABLE.items())
def test_a_clear_score_is_read(answer: str, expected: float) -> None:
    assert parse_score(answer) == pytest.approx(expected)


@pytest.mark.parametrize("answer", UNREADABLE)
def test_an_absent_or_unclear_score_is_an_error_and_not_a_zero(answer: str) -> None:
    with pytest.raises(ScoreParseError) as caught:
        judge(answer)
    assert caught.value.response == answer


@pytest.mark.parametrize("answer", UNREADABLE)
@pytest.mark.parametrize("default", [0.0, 0.25, 2.0])
def test_a_chosen_default_stands_in_for_an_unclear_score(answer: str, default: float) -> None:
    assert judge(answer, default_score=default) == default


def test_a_failing_client_is_an_error_even_with_a_default() -> None:
    with pytest.raises(ConnectionError):
        judge(ConnectionError("down"), default_score=0.0)


class Endpoint:
    """A model that fails for prompts with a text, as filters and context limits do; `failures` are accidents."""

    def __init__(self, fails_with: str, *, failures: int = 0, is_down: bool = False) -> None:
        self.fails_with, self.failures, self.is_down = fails_with, failures, is_down

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        if self.failures > 0 or self.is_down or self.fails_with in prompt:
            self.failures -= 1
            raise ConnectionError("HTTP 400")
        return "Score: 0.75"


def test_an_action_that_makes_a_working_endpoint_fail_scores_as_missing() -> None:
    def score(action: str, endpoint: Endpoint, **options: Any) -> float:
        return asyncio.run(LLMJudge("rate {action}", endpoint, **options).acall(action, "o"))

    assert score("poison", Endpoint("poison")) == 0.0
    assert score("poison", Endpoint("poison"), default_score=-1.0) == -1.0
    assert score("good", Endpoint("poison")) == 0.75
    assert score("good", Endpoint("poison", failures=1)) == 0.75
    with pytest.raises(ConnectionError):
        score("poison", Endpoint("poison", is_down=True))
    with pytest.raises(ConnectionError):
        score("good", Endpoint("poison", is_down=True), default_score=0.5)


def test_a_failing_judge_fails_the_whole_tree() -> None:
    tree = WeightedSum([LLMJudge("rate", Scripted("no idea")), Flat()], [0.5, 0.5])

    with pytest.raises(ScoreParseError):
        asyncio.run(tree.acall("a", "o"))


@pytest.mark.parametrize(("answer", "clamped", "raw"), [("-1", 0.0, -1.0), ("7", 1.0, 7.0), ("0.5", 0.5, 0.5)])
def test_normalizing_clamps_the_score(answer: str, clamped: float, raw: float) -> None:
    assert judge(answer) == clamped
    assert judge(answer, normalize=False) == raw


def test_the_first_match_of_a_pattern_is_the_score() -> None:
    assert judge("S=7 S=8", score_pattern=r"S=(\d+)", normalize=False) == 7.0
    assert judge("5 or 6", score_pattern=r"\d+", normalize=False) == 5.0
    assert judge("S=7", score_pattern=r"S=(\d+)") == 1.0


@pytest.mark.parametrize(
    ("answer", "pattern"), [("none", r"\d+"), ("S=x", r"S=(\w+)"), ("S=", r"S=(\d+)?"), ("S=nan", r"S=(\w+)")]
)
def test_a_pattern_without_a_number_is_an_error_unless_a_default_was_chosen(answer: str, pattern: str) -> None:
    with pytest.raises(ScoreParseError):
        judge(answer, score_pattern=pattern)
    assert judge(answer, score_pattern=pattern, default_score=0.5) == 0.5


def test_the_prompt_is_filled_in() -> None:
    client = Scripted("1")
    asyncio.run(LLMJudge("did {action} lead to {observation}?", client).acall("a", "o"))

    assert client.prompts == ["did a lead to o?"]


def test_calling_a_judge_gives_a_coroutine() -> None:
    rubric = LLMJudge("rate", Scripted("0.5"))
    outcome = rubric("a", "o")

    assert not isinstance(outcome, float)
    assert asyncio.run(outcome) == rubric.last_score == 0.5


def test_prompt_and_parsing_can_be_overridden() -> None:
    class Yes(LLMJudge):
        def _render_prompt(self, action: Any, observation: Any) -> str:
            return f"{action} ok?"

        def _parse_score(self, response: str) -> float:
            return float(response == "yes")

    client = Scripted("yes")

    assert asyncio.run(Yes("", client).acall("a", "o")) == 1.0
    assert client.prompts == ["a ok?"]


def test_the_state_shows_zero_as_default_score_though_none_was_chosen() -> None:
    rubric = LLMJudge("rate", Scripted("1"))

    assert rubric.state_dict() == {
        "prompt_template": "rate",
        "score_pattern": None,
        "default_score": 0.0,
        "normalize": True,
    }
    assert not rubric.uses_default


def test_a_state_can_be_carried_over() -> None:
    source = LLMJudge("rate", Scripted("1"), score_pattern=r"\d", default_score=0.5, normalize=False)
    target = LLMJudge("", Scripted("nothing"))
    target.load_state_dict(source.state_dict())

    assert target.state_dict() == source.state_dict()
    assert asyncio.run(target.acall("a", "o")) == 0.5


def test_loading_the_default_zero_does_not_silence_errors() -> None:
    target = LLMJudge("rate", Scripted("nothing"))
    target.load_state_dict(LLMJudge("rate", Scripted("1")).state_dict())

    with pytest.raises(ScoreParseError):
        asyncio.run(target.acall("a", "o"))


def test_a_state_may_be_loaded_in_part() -> None:
    rubric = LLMJudge("rate", Scripted("1"), score_pattern=r"\d")
    rubric.load_state_dict({"normalize": False})

    assert rubric.state_dict()["score_pattern"] == r"\d"
    assert rubric.normalize is False


def test_a_parse_error_is_a_value_error_that_quotes_the_answer_and_travels() -> None:
    error = ScoreParseError("it holds no score", 500 * "x")

    assert isinstance(error, ValueError)
    assert "it holds no score" in str(error)
    assert len(str(error)) < 400
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.timeout(60)  # a pattern that tries everything would take hours
@pytest.mark.parametrize("part", ["(", "score (", "<score>", "1 ", "1/", "-", '{"a":', "score:", "0 to "])
def test_reading_long_odd_answers_stays_fast(part: str) -> None:
    try:
        parse_score(part * 2000)
    except ScoreParseError:
        return
    assert part == "1 "


class Voter:
    """Gives one answer after another."""

    model = "voter"

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []

    async def complete(self, prompt: str, **kwargs: Any) -> str:
        self.prompts.append(prompt)
        return self.answers.pop(0)


def test_the_score_is_the_median_of_the_votes() -> None:
    client = Voter("0.1", "Score: 0.9", "8/10")
    assert asyncio.run(LLMJudge("{action}", client, votes=3).acall("a", "o")) == 0.8
    assert client.prompts == ["a"] * 3


def test_a_vote_without_a_score_is_an_error_not_a_missing_vote() -> None:
    with pytest.raises(ScoreParseError):
        asyncio.run(LLMJudge("{action}", Voter("1", "well", "1"), votes=3).acall("a", "o"))


def test_there_is_at_least_one_vote() -> None:
    with pytest.raises(ValueError, match="votes must be at least 1, not 0"):
        LLMJudge("{action}", Voter(), votes=0)


def test_answered_prompts_are_not_asked_again(tmp_path: Path) -> None:
    client = Voter("0.2", "0.4", "0.6", "0.9", "0.9", "0.9")
    for action, score in (("a", 0.4), ("b", 0.9), ("a", 0.4)):
        # Another object each time, as in another process; each vote has an answer of its own.
        judge = LLMJudge("{action}", CachedClient(client, tmp_path / "judge" / "answers.sqlite"), votes=3)
        assert asyncio.run(judge.acall(action, "o")) == score
    assert client.prompts == ["a"] * 3 + ["b"] * 3
    other = Voter("0.5")
    other.model = "another model"
    judge = LLMJudge("{action}", CachedClient(other, tmp_path / "judge" / "answers.sqlite"))
    assert asyncio.run(judge.acall("a", "o")) == 0.5


def test_an_answer_without_a_score_is_not_kept(tmp_path: Path) -> None:
    judge = LLMJudge("{action}", CachedClient(Voter("hm", "0.7"), tmp_path / "answers.sqlite"))
    with pytest.raises(ScoreParseError):
        asyncio.run(judge.acall("a", "o"))
    assert asyncio.run(judge.acall("a", "o")) == 0.7


def test_a_judge_with_a_cache_can_be_copied(tmp_path: Path) -> None:
    judge = LLMJudge("{action}", CachedClient(Voter("0.7"), tmp_path / "answers.sqlite"))
    assert asyncio.run(judge.acall("a", "o")) == 0.7
    again = pickle.loads(pickle.dumps(judge))
    assert asyncio.run(again.acall("a", "o")) == 0.7
