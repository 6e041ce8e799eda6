"""One rollout: the order of things, what reaches whom, and what each failure is called."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asking_agent import AskingAgent
from openenv.errors import AgentUnavailable, RolloutError, SandboxError, SandboxGone, StoreError
from openenv.rollout import (
    Budget,
    Cancellation,
    CaptureServer,
    Model,
    Outcome,
    Progress,
    RolloutStore,
    Task,
    agent,
    run_rollout,
    run_rollout_async,
)
from openenv.rollout.agents import Shell
from openenv.rollout.run.engine import Engine, EngineOptions
from openenv.sandboxes.base import ExecResult, Limits, Sandbox, Sandboxes, SandboxSpec
from openenv.testing import Script, ScriptedCall, ScriptedModel, StatusFailure, Turn
from openenv.train.episodes import PlayOptions

SUM = Task(
    instruction="Write 42 into answer.txt.",
    files={"given.txt": "given\n"},
    setup=("echo set up > setup.txt", "cp given.txt copy.txt"),
    verify=("grep -qx 42 answer.txt", "cmp given.txt copy.txt"),
    solution=("echo 42 > answer.txt",),
    task_id="sum",
)
CALL = (
    'python3 -c "import json, os, urllib.request as u; '
    "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps({'model': 'any', "
    "'messages': [{'role': 'user', 'content': 'hello'}]}).encode(), {'Content-Type': 'application/json', "
    "'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}), timeout=30).read()\""
)
"""A model call, as an agent makes it."""


@pytest.fixture
def run(local: Sandboxes, leftovers: Callable[[], None]) -> Callable[..., Outcome]:
    """Run a rollout on the local backend and see that nothing is left of it."""

    def run_it(task: Task, **arguments: Any) -> Outcome:
        outcome = run_rollout(task, **{"sandbox": local, "agent": "oracle", **arguments})
        leftovers()
        return outcome

    return run_it


def task(**fields: Any) -> Task:
    return Task.model_validate({"instruction": "x", **fields})


# what a rollout is


def test_the_oracle_earns_the_full_reward_and_noop_what_is_free(run: Callable[..., Outcome]) -> None:
    solved = run(SUM)
    assert (solved.status, solved.reward, solved.phase, solved.reason) == ("ok", 1.0, "done", None)
    assert solved.task_id == "sum"
    assert solved.agent_exit_code == 0
    assert solved.files["/home/user/workdir/answer.txt"] == "42\n"
    idle = run(SUM, agent="noop")
    assert (idle.status, idle.reward) == ("ok", 0.5)
    assert [result.exit_code == 0 for result in idle.verify_results] == [False, True]


def test_phases_are_reported_in_order(run: Callable[..., Outcome]) -> None:
    events: list[Progress] = []
    outcome = run(SUM, on_progress=events.append)
    phases = [event.phase for event in events]
    assert sorted(set(phases), key=phases.index) == ["sandbox", "setup", "agent", "collect", "verify", "done"]
    assert {event.rollout_id for event in events} == {outcome.rollout_id}
    assert [event.elapsed_s for event in events] == sorted(event.elapsed_s for event in events)
    assert set(outcome.phase_s) == {"sandbox", "setup", "agent", "collect", "verify"}


def test_an_unknown_argument_of_a_run_is_refused() -> None:
    misspelled: dict[str, Any] = {"cancle": Cancellation()}
    with Engine(EngineOptions(agent="noop")) as engine, pytest.raises(TypeError, match="cancle"):
        engine.run(Task(instruction="x", verify=("true",)), **misspelled)


def test_a_callback_that_fails_ends_no_rollout(run: Callable[..., Outcome]) -> None:
    def fail(event: Progress) -> None:
        raise ValueError("not mine")

    assert run(SUM, on_progress=fail).reward == 1.0


def test_the_setup_is_over_before_the_agent_starts(run: Callable[..., Outcome]) -> None:
    slow = task(setup=("sleep 0.3; touch ready", "test -e ready"), verify=("test -e seen",))
    assert run(slow, agent=Shell(["test -e ready && touch seen"])).reward == 1.0


def test_the_agent_does_not_see_the_verifiers_files(run: Callable[..., Outcome]) -> None:
    hidden = task(verify=("sh hidden/check.sh",), verify_files={"hidden/check.sh": "test -e found"})
    assert run(hidden, agent=Shell(["if [ -e hidden ]; then touch found; fi"])).reward == 0.0


def test_what_the_setup_left_in_the_home_reaches_the_verifier_and_what_the_agent_left_there_does_not(
    run: Callable[..., Outcome],
) -> None:
    spread = task(
        setup=("mkdir -p ~/tools; echo ok > ~/tools/mark",),
        verify=("grep -q ok ~/tools/mark", "test ! -e ~/planted"),
    )
    cheating = Shell(["touch ~/planted; echo broken > ~/tools/mark"])
    assert run(spread, agent=cheating).reward == 1.0


def test_a_file_that_the_agent_removed_is_gone_for_the_verifier(run: Callable[..., Outcome]) -> None:
    gone = task(files={"old.txt": "x"}, verify=("test ! -e old.txt",))
    assert run(gone, agent=Shell(["rm old.txt"])).reward == 1.0
    assert run(gone, agent="noop").reward == 0.0


def test_a_task_without_checks_has_no_reward(run: Callable[..., Outcome]) -> None:
    outcome = run(task(solution=("true",)))
    assert (outcome.status, outcome.reward) == ("ok", None)


@pytest.mark.parametrize(
    ("written", "reward"),
    [("0.25", 0.25), ("0", 0.0), (" 75e-2\\n", 0.75)],
)
def test_a_reward_file_of_the_verifier_wins_over_its_exit_codes(
    run: Callable[..., Outcome], written: str, reward: float
) -> None:
    graded = task(verify=(f"printf -- '{written}' > ~/logs/verifier/reward.txt",), solution=("true",))
    assert run(graded).reward == reward


def test_a_reward_file_counts_only_for_a_task_that_names_it(run: Callable[..., Outcome]) -> None:
    code = Shell(["echo 'echo 1.0 > ~/logs/verifier/reward.txt; exit 1' > run.sh"])
    ignored = run(task(verify=("sh run.sh",)), agent=code)
    assert (ignored.reward, ignored.metadata["ignored_reward_file"]) == (0.0, True)
    assert run(task(verify=("sh run.sh",), reward_file=True), agent=code).reward == 1.0
    assert run(task(verify=("sh run.sh # reward.txt",), reward_file=False), agent=code).reward == 0.0
    assembled = "printf 'echo 0.3 > ~/logs/verifier/rew%s.txt' ard > ~/grade.sh"
    assert run(task(setup=(assembled,), verify=("sh ~/grade.sh",)), agent="noop").reward == 0.3


def test_verify_lines_have_a_clean_environment(run: Callable[..., Outcome]) -> None:
    outcome = run(task(verify=("env; pwd",), solution=("true",)))
    lines = outcome.verify_results[0].stdout.splitlines()
    assert "HOME=/home/user" in lines
    assert "PYTHONUSERBASE=/opt/openenv" in lines  # nothing that the setup or the agent installed for its user
    assert lines[-1] == "/home/user/workdir"
    path = next(line for line in lines if line.startswith("PATH="))
    assert "user" not in path


def test_long_output_is_cut_and_the_log_ends_with_its_end(run: Callable[..., Outcome]) -> None:
    loud = task(setup=("head -c 3000000 /dev/zero | tr '\\0' x",), verify=("true",))
    outcome = run(loud, agent=Shell(["yes | head -c 5000000; echo THE END"]))
    assert len(outcome.setup_results[0].stdout) < 300_000
    assert outcome.agent_log_tail.endswith("THE END\n")
    assert len(outcome.agent_log_tail) <= 2000


# what goes wrong


def test_a_setup_that_fails_stops_at_that_line(run: Callable[..., Outcome]) -> None:
    outcome = run(task(setup=("true", "echo why >&2; exit 3", "true"), verify=("true",)), agent="noop")
    assert (outcome.status, outcome.phase, outcome.reward) == ("env_failed", "setup", None)
    assert [result.exit_code for result in outcome.setup_results] == [0, 3]
    assert outcome.setup_results[1].stderr == "why\n"
    assert outcome.agent_exit_code is None
    assert outcome.verify_results == []


def test_a_setup_that_hangs_is_ended(run: Callable[..., Outcome]) -> None:
    outcome = run(task(setup=("sleep 60",), setup_timeout_s=0.3), agent="noop")
    assert (outcome.status, outcome.phase) == ("env_failed", "setup")
    assert outcome.setup_results[0].exit_code == 124


def test_an_agent_that_hangs_is_killed_and_what_it_left_is_verified(run: Callable[..., Outcome]) -> None:
    hanging = task(agent_timeout_s=3, verify=("test -e done.txt", "test -e never"))
    outcome = run(hanging, agent=Shell(["touch done.txt; (sleep 61 &) ; sleep 60"]))
    assert (outcome.status, outcome.phase, outcome.reward) == ("truncated", "agent", 0.5)
    assert "timeout" in (outcome.reason or "")
    assert outcome.wall_s < 30


def test_a_truncated_work_tree_is_not_verified_without_verify_truncated(run: Callable[..., Outcome]) -> None:
    hanging = task(agent_timeout_s=3, verify=("test -e done.txt",))
    outcome = run(hanging, agent=Shell(["touch done.txt; sleep 60"]), verify_truncated=False)
    assert (outcome.status, outcome.reward) == ("truncated", None)
    assert outcome.verify_results == []


def test_an_agent_that_fails_is_the_policys_failure_and_what_it_left_is_verified(run: Callable[..., Outcome]) -> None:
    outcome = run(SUM, agent=Shell(["echo 42 > answer.txt", "exit 7"]))
    assert (outcome.status, outcome.phase, outcome.reward) == ("policy_failed", "agent", 1.0)
    assert outcome.agent_exit_code == 7


def test_an_agent_that_runs_out_of_memory_is_the_policys_failure(run: Callable[..., Outcome]) -> None:
    small = task(verify=("test -e never",), limits=Limits(memory_mb=64, disk_mb=64))
    hog = Shell(["exec python3 -c \"x = b'x' * (512 << 20); print(len(x))\""])
    outcome = run(small, agent=hog)
    assert (outcome.status, outcome.agent_exit_code, outcome.reward) == ("policy_failed", 137, 0.0)
    assert "memory" in (outcome.reason or "")


@pytest.mark.slow_but_for("kill -9 $$-signal 9")
@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("kill -9 $$", "signal 9"),
        ("kill -SEGV $$", "signal 11"),
        ("sleep 60", "did not end"),
        ("exec python3 -c \"x = b'x' * (512 << 20)\"", "signal 9"),
    ],
)
def test_a_check_that_crashes_earns_nothing_and_the_next_one_counts(
    run: Callable[..., Outcome], line: str, why: str
) -> None:
    crashing = task(
        verify=("true", line, "true"),
        verify_timeout_s=1 if line == "sleep 60" else 60,
        limits=Limits(memory_mb=64, disk_mb=64),
        solution=("true",),
    )
    outcome = run(crashing)
    assert (outcome.status, outcome.phase, outcome.reward) == ("ok", "done", pytest.approx(2 / 3))
    assert why in (outcome.verify_results[1].note or "")
    assert len(outcome.verify_results) == 3


def test_a_check_that_fails_is_no_crash(run: Callable[..., Outcome]) -> None:
    outcome = run(task(verify=("false", "exit 127", "exit 1", "true"), solution=("true",)))
    assert (outcome.status, outcome.reward) == ("ok", 0.25)


def test_a_task_without_a_solution_is_not_the_policys_failure(run: Callable[..., Outcome]) -> None:
    outcome = run(task(verify=("true",)))
    assert (outcome.status, outcome.reward) == ("env_failed", None)
    assert "no solution" in (outcome.reason or "")


class Failing(Sandboxes):
    """A backend around the real one that fails at a chosen call."""

    def __init__(self, inner: Sandboxes, *, opens: int = 99, dies_after: int | None = None) -> None:
        self.name, self._inner, self._opens, self._dies_after = "failing", inner, opens, dies_after

    def check(self) -> None:
        pass

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        if self._opens == 0:
            raise SandboxError("no more sandboxes")
        self._opens -= 1
        sandbox = self._inner.open(spec)
        if self._dies_after is not None:
            _dying(sandbox, self._dies_after)
        return sandbox


def _dying(sandbox: Sandbox, after: int) -> None:
    real, real_count, count = sandbox.exec, sandbox.count_entries, iter(range(10_000))

    def dying_exec(*args: Any, **kwargs: Any) -> ExecResult:
        if next(count) >= after:
            sandbox.kill()
        return real(*args, **kwargs)

    def dying_count(*args: Any, **kwargs: Any) -> int:
        if next(count) >= after:
            sandbox.kill()
        return real_count(*args, **kwargs)

    sandbox.exec = dying_exec  # type: ignore[method-assign]
    sandbox.count_entries = dying_count  # type: ignore[method-assign]


def test_a_sandbox_that_does_not_start_is_sandbox_failed(run: Callable[..., Outcome], local: Sandboxes) -> None:
    outcome = run(SUM, sandbox=Failing(local, opens=0), verify_sandbox=local)
    assert (outcome.status, outcome.phase, outcome.reward) == ("sandbox_failed", "sandbox", None)
    outcome = run(SUM, sandbox=local, verify_sandbox=Failing(local, opens=0))
    assert (outcome.status, outcome.phase, outcome.reward) == ("sandbox_failed", "verify", None)


def test_a_sandbox_that_dies_is_sandbox_failed_before_the_agent_and_its_failure_afterwards(
    run: Callable[..., Outcome], local: Sandboxes
) -> None:
    for after, expected in [(0, "sandbox_failed"), (1, "sandbox_failed"), (2, "policy_failed"), (3, "policy_failed")]:
        outcome = run(SUM, sandbox=Failing(local, dies_after=after), verify_sandbox=local)
        assert (outcome.status, outcome.reward) == (expected, 0.5 if expected == "policy_failed" else None)
    outcome = run(SUM, sandbox=Failing(local, dies_after=2, opens=1), verify_sandbox=local)  # nor does a control start
    assert (outcome.status, outcome.phase, outcome.reward) == ("sandbox_failed", "agent", None)
    outcome = run(SUM, sandbox=local, verify_sandbox=Failing(local, dies_after=0))
    assert (outcome.status, outcome.reward) == ("grader_failed", None)


# cancelling


def cancel_in(phase: str, cancel: Cancellation) -> Callable[[Progress], None]:
    def on_progress(event: Progress) -> None:
        if event.phase == phase:
            threading.Thread(target=cancel.cancel, args=("enough",)).start()

    return on_progress


@pytest.mark.parametrize("phase", ["sandbox", "setup", "agent", "verify"])
def test_a_rollout_can_be_cancelled_at_any_time(run: Callable[..., Outcome], phase: str) -> None:
    slow = task(
        setup=("sleep 30",) if phase == "setup" else (),
        verify=("sleep 30",) if phase == "verify" else ("true",),
    )
    lazy = Shell(["sleep 30"] if phase in ("sandbox", "agent") else ["true"])
    cancel = Cancellation()
    began = time.monotonic()
    outcome = run(slow, agent=lazy, cancel=cancel, on_progress=cancel_in(phase, cancel))
    assert (outcome.status, outcome.reward, outcome.reason) == ("cancelled", None, "enough")
    assert time.monotonic() - began < 25


@pytest.mark.anyio
async def test_a_coroutine_that_is_cancelled_ends_its_rollout(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_progress(event: Progress) -> None:
        if event.phase == "agent":
            loop.call_soon_threadsafe(started.set)

    running = asyncio.ensure_future(
        run_rollout_async(SUM, agent=Shell(["sleep 60"]), sandbox=local, on_progress=on_progress)
    )
    await asyncio.wait_for(started.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    leftovers()


@pytest.mark.anyio
async def test_a_rollout_runs_off_the_loop(local: Sandboxes) -> None:
    outcome = await run_rollout_async(SUM, agent="oracle", sandbox=local)
    assert outcome.reward == 1.0


# models


@pytest.fixture
def model() -> Any:
    turns = [Turn(text="Hello."), Turn(text="again", calls=(ScriptedCall(name="x", arguments={}),))]
    with ScriptedModel(Script(name="script", turns=tuple(turns))) as server:
        yield Model(**server.model())


def test_model_calls_are_captured_and_the_real_key_stays_outside(
    run: Callable[..., Outcome], model: Model, tmp_path: Path
) -> None:
    secret = Model(base_url=model.base_url, name=model.name, api_key="the-real-key")
    look = "env; cat /proc/*/environ ~/.config/* 2>/dev/null | tr '\\0' '\\n'"
    events: list[Progress] = []
    outcome = run(SUM, agent=Shell([CALL, CALL, look], dialect="openai_chat"), model=secret, on_progress=events.append)
    assert outcome.status == "ok"
    assert [turn.turn for turn in outcome.turns] == [1, 2]
    for turn in outcome.turns:
        assert len(turn.completion_tokens) == len(turn.completion_token_ids) == len(turn.per_token_logps) > 0
    assert "the-real-key" not in outcome.model_dump_json()
    assert [event.turn for event in events if event.turn is not None] == [1, 2]


def test_a_refused_request_removes_no_reward(run: Callable[..., Outcome]) -> None:
    refusal = StatusFailure(status=400, message="the conversation is too long", attempts=None)
    turns = [Turn(text="first"), Turn(text="second", failures=(refusal,))]
    with ScriptedModel(Script(name="script", turns=turns)) as server:
        lost, won = (
            run(task(verify=[f"grep -q {word} answers.txt"]), agent=AskingAgent(), model=Model(**server.model()))
            for word in ("second", "first")
        )
    assert [(one.status, one.reward) for one in (lost, won)] == [("policy_failed", 0.0), ("policy_failed", 1.0)]


def test_the_budget_ends_a_rollout(run: Callable[..., Outcome], model: Model) -> None:
    chatty = Shell([CALL] * 3, dialect="openai_chat")
    outcome = run(SUM, agent=chatty, model=model, budget=Budget(max_calls=2))
    assert (outcome.status, outcome.phase, outcome.reward) == ("truncated", "agent", 0.5)
    assert "calls" in (outcome.reason or "")
    assert len(outcome.turns) == 2
    outcome = run(SUM, agent=Shell([CALL, CALL], dialect="openai_chat"), model=model, budget=Budget(max_calls=2))
    assert outcome.status == "ok"


def test_a_dead_endpoint_is_not_the_policys_failure(run: Callable[..., Outcome]) -> None:
    dead = Model(base_url="http://127.0.0.1:9/v1", name="no-model")
    outcome = run(SUM, agent=Shell([CALL], dialect="openai_chat"), model=dead)
    assert (outcome.status, outcome.phase, outcome.reward) == ("env_failed", "agent", None)
    assert "endpoint" in (outcome.reason or "")
    patient = Shell([f"while :; do {CALL} 2> /dev/null; done"], dialect="openai_chat")
    outcome = run(SUM, agent=patient, model=dead)
    assert (outcome.status, outcome.reward) == ("env_failed", None)
    assert outcome.wall_s < 60


def test_an_agent_that_never_calls_its_model_is_not_the_policys_failure(
    run: Callable[..., Outcome], model: Model
) -> None:
    outcome = run(SUM, agent=Shell(["exit 127"], dialect="openai_chat"), model=model)
    assert (outcome.status, outcome.reward) == ("env_failed", None)
    assert "no model call" in (outcome.reason or "")


def test_calls_are_kept_with_a_stored_rollout(run: Callable[..., Outcome], model: Model, tmp_path: Path) -> None:
    from openenv.rollout.store.exports import export_rollouts, recording

    with RolloutStore(tmp_path / "store") as store:
        asking = Shell([CALL], dialect="openai_chat")
        outcome = run(SUM, agent=asking, model=model, store=store, metadata={"group": "g7"})
        record = store.get(outcome.rollout_id)
        assert record.outcome == outcome
        kept = recording(store, record)
        assert kept is not None
        assert len(kept.calls) == 1
        assert export_rollouts(store, tmp_path / "out.jsonl") == 1
        assert '"sequences"' in (tmp_path / "out.jsonl").read_text()
        with pytest.raises(StoreError, match="cannot be written"):
            export_rollouts(store, tmp_path / "no such folder" / "out.jsonl")
        try:
            import pyarrow.parquet
        except ImportError:
            with pytest.raises(RolloutError, match="pip install pyarrow"):
                export_rollouts(store, tmp_path / "out.parquet")
            return
        assert export_rollouts(store, tmp_path / "out.parquet") == 1
        row = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]
        assert row["rollout_id"] == outcome.rollout_id
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert f'"reward": 0.5, "trust": "{outcome.trust}"' in row["metadata"]
        known = {"task_id": outcome.task_id, "status": "ok", "reward": 0.5, "trust": outcome.trust, "group": "g7"}
        known |= {"agent": "shell", "model": model.name, "verdict": "first"}
        assert {name: row[name] for name in known} == known


# wrong arguments


def test_what_cannot_be_run_is_refused_before_anything_starts(local: Sandboxes) -> None:
    with pytest.raises(AgentUnavailable, match=r"unknown agent 'no-such-agent'.*choose from"):
        run_rollout(SUM, agent="no-such-agent", sandbox=local)
    with pytest.raises(AgentUnavailable, match="options"):
        run_rollout(SUM, agent="noop@1.0", sandbox=local)
    with pytest.raises(ValueError, match="needs a model"):
        run_rollout(SUM, agent="opencode", sandbox=local)
    with pytest.raises(ValueError, match="unknown sandbox backend"):
        run_rollout(SUM, agent="noop", sandbox="nowhere")
    assert agent("noop").name == "noop"
    assert issubclass(SandboxGone, SandboxError)
    assert issubclass(AgentUnavailable, RolloutError)


def test_an_id_that_cannot_be_a_folder_is_refused(local: Sandboxes) -> None:
    with pytest.raises(ValueError, match="cannot be the id"):
        run_rollout(SUM, agent="noop", sandbox=local, rollout_id="../up")


def test_a_rollout_whose_calls_cannot_be_recorded_does_not_begin(
    run: Callable[..., Outcome], model: Model, tmp_path: Path
) -> None:
    with CaptureServer(tmp_path / "calls") as capture:
        capture.open("taken", model).close()
        asking = Shell([CALL], dialect="openai_chat")
        with RolloutStore(tmp_path / "store") as store:
            outcome = run_rollout(SUM, agent=asking, model=model, capture=capture, rollout_id="taken", store=store)
            assert (outcome.status, outcome.reward) == ("env_failed", None)
            assert store.get("taken").outcome == outcome
            shared = run_rollout(SUM, agent=asking, model=model, capture=capture, store=store, sandbox="local")
            assert shared.status == "ok"
            assert (store.captures / shared.rollout_id).is_dir()


def test_the_home_can_be_elsewhere(run: Callable[..., Outcome]) -> None:
    moved = task(setup=("echo x > ~/tool",), verify=("grep -q x ~/tool", '[ "$PWD" = /srv/me/workdir ]'))
    outcome = run(moved, agent=Shell(["pwd"]), home="/srv/me")
    assert outcome.reward == 1.0
    assert outcome.agent_log_tail == "/srv/me/workdir\n"


def test_a_folder_instead_of_a_store_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"with RolloutStore\('.*'\) as store"):
        run_rollout(Task(instruction="Nothing."), agent="noop", store=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="with RolloutStore"):
        PlayOptions(store=tmp_path)  # type: ignore[arg-type]
