"""Rollouts as logs of Inspect AI and back, with inspect-ai as it is on PyPI; `make test-inspect` sets that up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="it has an environment of its own: make test-inspect")

from inspect_ai import Task
from inspect_ai import eval as run_eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import read_eval_log
from inspect_ai.scorer import exact, includes
from typer.testing import CliRunner

from guess_environment import Guess, Hint, Word
from inspect_models import mock
from openenv import create_app
from openenv.adapters.inspect import import_inspect_log, write_inspect_logs
from openenv.adapters.inspect.tasks import served_env
from openenv.cli.__main__ import app
from openenv.errors import StoreError
from openenv.rollout import RolloutStore
from openenv.rollout.capture.records import read
from openenv.rollout.capture.transcript import transcript
from openenv.rollout.store.rollout_index import RolloutFilter
from openenv.testing import serve
from stored_rollouts import PIXEL, SQUARE, add_square, rollout_outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[RolloutStore]:
    with RolloutStore(tmp_path / "other") as opened:
        yield opened


def test_a_rollout_is_a_sample_with_its_calls_and_its_reward(store: RolloutStore, tmp_path: Path) -> None:
    add_square(store, "r1", folder=tmp_path)
    add_square(store, "r2", folder=tmp_path, reward=1.0)
    assert write_inspect_logs(store, tmp_path / "log.eval") == 2
    log = read_eval_log(str(tmp_path / "log.eval"), resolve_attachments=True)
    assert (log.status, log.eval.model, log.eval.solver_args) == ("success", "tiny", {"agent": "opencode"})
    assert log.results.scores[0].metrics["mean"].value == pytest.approx((2 / 3 + 1) / 2)
    first, second = log.samples
    assert [(sample.id, sample.epoch, sample.uuid) for sample in log.samples] == [
        ("square", 1, "r1"),
        ("square", 2, "r2"),
    ]
    assert first.input == SQUARE.instruction
    assert first.scores["env_reward"].value == pytest.approx(2 / 3)
    assert second.scores["env_reward"].value == 1.0
    assert "passed: test -e square.py" in first.scores["env_reward"].explanation
    assert first.metadata["status"] == "ok"
    assert first.total_time == 12.5
    events = [event for event in first.events if event.event == "model"]
    assert len(events) == 5
    assert [tool.name for tool in events[1].tools] == ["write"]
    # The conversation of the agent to its end, without the answer that it threw away and the one for a title.
    assert [message.role for message in first.messages] == [
        *("system", "user", "assistant", "tool", "user", "assistant", "user", "assistant")
    ]
    written, result, picture = first.messages[2:5]
    assert written.content[0].reasoning == "The user wants a square."
    assert written.tool_calls[0].function == result.function == "write"
    assert written.tool_calls[0].arguments["path"] == "square.py"
    assert picture.content[1].image == PIXEL
    assert first.messages[-1].text == first.output.completion == "That is all."
    assert first.model_usage["tiny"].output_tokens > 0


def test_infrastructure_failures_are_errors_and_no_scores(store: RolloutStore, tmp_path: Path) -> None:
    store.add(rollout_outcome("bad", status="sandbox_failed", reason="no disk", reward=None, trust=None), SQUARE)
    store.add(rollout_outcome("lost", status="truncated", reward=None, trust=None), SQUARE)
    store.add(rollout_outcome("good", reward=0.5), SQUARE)
    write_inspect_logs(store, tmp_path / "log.json")
    log = read_eval_log(str(tmp_path / "log.json"))
    samples = {sample.uuid: sample for sample in log.samples}
    assert samples["bad"].error.message == "sandbox_failed: no disk"
    assert samples["bad"].scores is None
    assert samples["lost"].scores["env_reward"].value != samples["lost"].scores["env_reward"].value  # not a number
    [score] = log.results.scores
    assert (score.metrics["mean"].value, score.scored_samples, score.unscored_samples) == (0.5, 1, 2)
    assert (log.results.total_samples, log.results.completed_samples) == (3, 2)


def test_our_logs_come_back_as_they_were(store: RolloutStore, other: RolloutStore, tmp_path: Path) -> None:
    add_square(store, "r1", folder=tmp_path)
    store.add(rollout_outcome("bad", status="env_failed", reason="no network", reward=None), SQUARE)
    write_inspect_logs(store, tmp_path / "log.eval")
    assert import_inspect_log(tmp_path / "log.eval", other).added == 2
    again = import_inspect_log(tmp_path / "log.eval", other)
    assert (again.added, again.known) == (0, 2)
    for rollout_id in ("r1", "bad"):
        before, after = store.get(rollout_id), other.get(rollout_id)
        assert after.task == before.task
        assert after.outcome.model_dump(exclude={"turns"}) == before.outcome.model_dump(exclude={"turns"})
    texts = [
        [[part.text for part in turn.reply.parts] for turn in transcript(read(each.captures / "r1")).turns]
        for each in (store, other)
    ]
    assert texts[0] == texts[1]
    assert len(other.get("r1").outcome.turns) == 5
    assert all(turn.not_trainable for turn in other.get("r1").outcome.turns)


def test_a_log_has_one_agent_and_model_and_a_folder_has_many(store: RolloutStore, tmp_path: Path) -> None:
    store.add(rollout_outcome("one"), SQUARE)
    store.add(rollout_outcome("two", model="huge/model"), SQUARE)
    with pytest.raises(StoreError, match="one agent and one model, and there are 2"):
        write_inspect_logs(store, tmp_path / "log.eval")
    assert write_inspect_logs(store, tmp_path / "one.eval", RolloutFilter(model="tiny")) == 1
    assert write_inspect_logs(store, tmp_path / "logs") == 2
    logs = [read_eval_log(str(path)) for path in sorted((tmp_path / "logs").iterdir())]
    assert {log.eval.model for log in logs} == {"tiny", "huge/model"}
    with pytest.raises(StoreError, match="no such rollouts"):
        write_inspect_logs(store, tmp_path / "none.eval", RolloutFilter(model="none"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        write_inspect_logs(store, tmp_path / "file" / "log.eval", RolloutFilter(model="tiny"))


def evaluate(tmp_path: Path, answers: list[Any], *scorers: Any, **options: Any) -> Path:
    samples = [Sample(id=1, input="Two and two?", target="four"), Sample(id=2, input="And three?", target="seven")]
    task = Task(name="sums", dataset=MemoryDataset(samples), scorer=list(scorers) or includes())
    options = {"max_samples": 1, "display": "none", **options}
    [log] = run_eval(task, model=mock(answers), log_dir=str(tmp_path / "logs"), **options)
    return Path(log.location.removeprefix("file://"))


def test_logs_of_other_tasks_become_rollouts(store: RolloutStore, tmp_path: Path) -> None:
    log = evaluate(tmp_path, ["four", RuntimeError("out of credit")], fail_on_error=False)
    assert import_inspect_log(log, store).added == 2
    one, two = sorted(store.records(), key=lambda record: record.task.task_id)
    assert (one.outcome.status, one.outcome.reward, one.outcome.model) == ("ok", 1.0, "mockllm/model")
    assert (one.task.instruction, one.group) == ("Two and two?", "sums")
    assert (two.outcome.status, two.outcome.reward) == ("env_failed", None)
    assert "out of credit" in (two.outcome.reason or "")
    [turn] = transcript(read(store.captures / one.rollout_id)).turns
    assert [part.text for part in turn.messages[0].parts] == ["Two and two?"]
    assert [part.text for part in turn.reply.parts] == ["four"]


def test_a_limit_is_a_truncated_rollout(store: RolloutStore, tmp_path: Path) -> None:
    log = evaluate(tmp_path, ["four"], token_limit=3)
    import_inspect_log(log, store)
    assert {record.outcome.status for record in store.records()} == {"truncated"}


def test_the_scorer_that_is_the_reward_can_be_chosen(store: RolloutStore, tmp_path: Path) -> None:
    log = evaluate(tmp_path, ["four of them"], includes(), exact())
    with pytest.raises(StoreError, match="no score 'match'; it has includes, exact"):
        import_inspect_log(log, store, scorer="match")
    import_inspect_log(log, store, scorer="exact")
    assert {record.outcome.reward for record in store.records()} == {0.0}


def test_what_is_no_log_is_refused(store: RolloutStore, tmp_path: Path) -> None:
    (tmp_path / "no.eval").write_text("nothing")
    for path in (tmp_path / "no.eval", tmp_path / "missing.eval"):
        with pytest.raises(StoreError, match="cannot be read as a log of Inspect"):
            import_inspect_log(path, store)
    with pytest.raises(StoreError, match="has no samples"):
        import_inspect_log(evaluate(tmp_path, ["four"], log_samples=False), store)


def test_played_episodes_are_rollouts_of_play(store: RolloutStore, tmp_path: Path) -> None:
    with serve(create_app(Guess, Word, Hint)) as served:
        [log] = run_eval(
            served_env(served.url), model=mock(["no", "yes"]), log_dir=str(tmp_path / "logs"), display="none"
        )
    import_inspect_log(log.location, store)
    [record] = store.records()
    assert (record.outcome.agent, record.outcome.status, record.outcome.reward) == ("play", "ok", 0.75)
    assert record.outcome.metadata["start"] == {"seed": 0}
    assert len(record.outcome.turns) == 2


def test_the_command_line_exports_and_imports(store: RolloutStore, tmp_path: Path) -> None:
    add_square(store, "r1", folder=tmp_path)
    target, root = str(tmp_path / "log.eval"), str(tmp_path / "again")
    runner = CliRunner()
    done = runner.invoke(app, ["rollouts", "export", target, "--store", str(store.root)])
    assert (done.exit_code, done.output) == (0, f"1 rollout in {target}\n")
    done = runner.invoke(
        app, ["rollouts", "export", str(tmp_path / "logs"), "--to", "inspect", "--store", str(store.root)]
    )
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "logs").glob("*.eval"))) == 1
    done = runner.invoke(app, ["rollouts", "import", target, "--store", root])
    assert (done.exit_code, done.output) == (0, f"{target}: 1 rollout added\n")
    done = runner.invoke(app, ["rollouts", "import", target, "--store", root])
    assert "0 rollouts added, 1 known already" in done.output
    with RolloutStore(root) as opened:
        assert opened.get("r1").outcome.reward == pytest.approx(2 / 3)
