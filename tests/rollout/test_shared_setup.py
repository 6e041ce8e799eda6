"""Rollouts of `run_many` that share their setup: it runs once, and nothing else is different from one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import openenv
from openenv.rollout import Cancellation, Outcome, Progress, RolloutStore, Task, reverify, run_many
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import ExecResult, Sandbox, Sandboxes, SandboxSpec, backend

TOKEN = "cat /proc/sys/kernel/random/uuid > token"
"""A setup that never leaves the same twice."""


def drawn(**fields: Any) -> Task:
    setup = (TOKEN, "mkdir -p ~/tools; echo tool > ~/tools/tool; echo 1 > /tmp/one")
    return Task.model_validate({"instruction": "x", "setup": setup, "verify": ("test -s token",), **fields})


class Watched(Sandboxes):
    """A backend around the real one that passes each command of an agent's sandbox on to a function first."""

    def __init__(self, inner: Sandboxes, before: Callable[[Sandbox, str], None]) -> None:
        self.name, self._inner, self._before = "watched", inner, before

    def check(self) -> None:
        pass

    def open(self, spec: SandboxSpec | None = None) -> Sandbox:
        sandbox = self._inner.open(spec)
        real = sandbox.exec

        def watched_exec(cmd: Any, **arguments: Any) -> ExecResult:
            self._before(sandbox, str(cmd))
            return real(cmd, **arguments)

        sandbox.exec = watched_exec  # type: ignore[method-assign]
        return sandbox


class Setups:
    """Counts how often a line of a setup is run."""

    def __init__(self, line: str = TOKEN) -> None:
        self.line, self.count = line, 0
        self._lock = threading.Lock()

    def __call__(self, sandbox: Sandbox, command: str) -> None:
        if self.line in command:
            with self._lock:
                self.count += 1


def token(outcome: Outcome) -> str:
    (text,) = (text for path, text in outcome.files.items() if path.endswith("/workdir/token"))
    return text


def test_the_setup_of_eight_rollouts_runs_once(local: Sandboxes, tmp_path: Path, leftovers: Callable[[], None]) -> None:
    setups = Setups()
    look = Shell(["cat ~/tools/tool /tmp/one > seen; ls ~ /tmp >> seen; echo more >> token; touch ~/own /tmp/own"])
    with RolloutStore(tmp_path / "store") as store:
        outcomes = run_many(
            [drawn() for _ in range(8)],
            agent=look,
            sandbox=Watched(local, setups),
            verify_sandbox=local,
            store=store,
            concurrency=3,
        )
        assert [(one.status, one.reward) for one in outcomes] == [("ok", 1.0)] * 8
        assert setups.count == 1
        assert len({token(one) for one in outcomes}) == 1
        assert {token(one).count("more") for one in outcomes} == {1}
        seen = {one.files["/home/user/workdir/seen"] for one in outcomes}
        assert seen == {"tool\n1\n/home/user:\ntools\nworkdir\n\n/tmp:\none\n"}  # and nothing of another agent
        (leader,) = {one.metadata["setup_rollout_id"] for one in outcomes if "setup_rollout_id" in one.metadata}
        assert [one.rollout_id for one in outcomes if "setup_rollout_id" not in one.metadata] == [leader]
        assert {tuple(result.exit_code for result in one.setup_results) for one in outcomes} == {(0, 0)}
        follower = next(one for one in outcomes if one.rollout_id != leader)
        lines = ["test -s token && test -e ~/tools/tool", "test -e ~/own"]
        assert [one.exit_code for one in reverify(store, follower.rollout_id, lines=lines).verify_results] == [0, 1]
    leftovers()


def test_a_setup_may_run_for_each_rollout(local: Sandboxes) -> None:
    outcomes = run_many([drawn(), drawn()], agent="noop", sandbox=local, share_setup=False)
    assert len({token(one) for one in outcomes}) == 2
    assert not any("setup_rollout_id" in one.metadata for one in outcomes)


@pytest.mark.slow
def test_only_equal_setups_are_shared_whatever_else_the_tasks_have(local: Sandboxes) -> None:
    tasks = [
        drawn(task_id="a", instruction="one"),
        drawn(task_id="b", instruction="another", agent_timeout_s=30),
        drawn(task_id="c", files={"given.txt": "x"}),
        drawn(task_id="d", setup=(TOKEN,)),
    ]
    tokens = {one.task_id: token(one) for one in run_many(tasks, agent="noop", sandbox=local)}
    assert tokens["a"] == tokens["b"]
    assert len(set(tokens.values())) == 3


@pytest.mark.slow
def test_a_generator_shares_among_those_that_run_at_once(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    all_three = threading.Barrier(3, timeout=30)  # the leader's setup ends when the others wait for it

    def on_progress(event: Progress) -> None:
        if event.message.startswith("waiting"):
            threading.Thread(target=all_three.wait).start()

    def before(sandbox: Sandbox, command: str) -> None:
        if TOKEN in command:
            all_three.wait()

    def tasks() -> Iterator[Task]:
        for _ in range(3):
            yield drawn()

    outcomes = run_many(
        tasks(), agent="noop", sandbox=Watched(local, before), verify_sandbox=local, on_progress=on_progress
    )
    assert [one.status for one in outcomes] == ["ok"] * 3
    assert len({token(one) for one in outcomes}) == 1
    alone = run_many((drawn() for _ in range(2)), agent="noop", sandbox=local, concurrency=1)
    assert len({token(one) for one in alone}) == 2
    leftovers()


@pytest.mark.slow
def test_no_thread_waits_for_a_setup_while_there_are_other_tasks(local: Sandboxes) -> None:
    both = threading.Barrier(2, timeout=30)

    def before(sandbox: Sandbox, command: str) -> None:
        if TOKEN in command:
            both.wait()  # passes only when the setups of both groups run at once

    tasks = [drawn(task_id="a"), drawn(task_id="a"), drawn(task_id="b", files={"b": ""}), drawn(files={"b": ""})]
    outcomes = run_many(tasks, agent="noop", sandbox=Watched(local, before), verify_sandbox=local, concurrency=2)
    assert [one.status for one in outcomes] == ["ok"] * 4
    assert [one.task_id for one in outcomes] == ["a", "a", "b", ""]
    assert token(outcomes[0]) == token(outcomes[1]) != token(outcomes[2]) == token(outcomes[3])


def test_a_setup_that_fails_fails_all_that_share_it(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    setups = Setups("exit 3")
    broken = drawn(setup=("true", "echo it broke; exit 3", "true"))
    outcomes = run_many([broken] * 4, agent="noop", sandbox=Watched(local, setups), verify_sandbox=local)
    assert setups.count == 1
    assert {(one.status, one.phase, one.reward) for one in outcomes} == {("env_failed", "setup", None)}
    (leader,) = (one for one in outcomes if "setup_rollout_id" not in one.metadata)
    for one in outcomes:
        assert [result.exit_code for result in one.setup_results] == [0, 3]
        assert one.reason == "setup line 2 exited with code 3" + (
            "" if one is leader else f" (in rollout {leader.rollout_id})"
        )
    leftovers()


def test_where_the_sandbox_of_a_setup_dies_the_next_rollout_runs_it(
    local: Sandboxes, leftovers: Callable[[], None]
) -> None:
    setups = Setups()

    def before(sandbox: Sandbox, command: str) -> None:
        setups(sandbox, command)
        if TOKEN in command and setups.count == 1:
            sandbox.kill()

    outcomes = run_many([drawn()] * 4, agent="noop", sandbox=Watched(local, before), verify_sandbox=local)
    assert sorted(one.status for one in outcomes) == ["ok", "ok", "ok", "sandbox_failed"]
    assert setups.count == 2
    assert len({token(one) for one in outcomes if one.status == "ok"}) == 1
    leftovers()


def test_a_cancel_ends_the_setup_and_those_that_wait_for_it(local: Sandboxes, leftovers: Callable[[], None]) -> None:
    cancel = Cancellation()

    def before(sandbox: Sandbox, command: str) -> None:
        if "sleep 60" in command:
            threading.Timer(0.2, cancel.cancel).start()

    outcomes = run_many(
        [drawn(setup=("sleep 60",))] * 6,
        agent="noop",
        sandbox=Watched(local, before),
        verify_sandbox=local,
        concurrency=3,
        cancel=cancel,
    )
    assert [one.status for one in outcomes] == ["cancelled"] * 6
    leftovers()


@pytest.mark.slow
def test_a_setup_that_leaves_a_server_runs_for_each(local: Sandboxes) -> None:
    messages: list[str] = []
    outcomes = run_many(
        [drawn(setup=(TOKEN, "setsid sleep 300 > /dev/null 2>&1 &"))] * 2,
        agent=Shell(["grep -lsx sleep /proc/[0-9]*/comm > served; true"]),
        sandbox=local,
        on_progress=lambda event: messages.append(event.message),
    )
    assert [one.status for one in outcomes] == ["ok", "ok"]
    assert len({token(one) for one in outcomes}) == 2
    assert all("/comm" in one.files["/home/user/workdir/served"] for one in outcomes)
    assert any("the setup is not shared" in message and "sleep" in message for message in messages)


@pytest.mark.slow
def test_what_cannot_be_kept_runs_for_each(local: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(sandbox: Sandbox, **limits: Any) -> None:
        raise OSError(28, "No space left on device")

    def before(sandbox: Sandbox, command: str) -> None:
        monkeypatch.setattr(sandbox, "snapshot", lambda: full(sandbox))

    outcomes = run_many([drawn()] * 2, agent="noop", sandbox=Watched(local, before), verify_sandbox=local)
    assert [one.status for one in outcomes] == ["ok", "ok"]
    assert len({token(one) for one in outcomes}) == 2
    processes = backend("process", i_know_there_is_no_isolation=True)
    outcomes = run_many([drawn(setup=(TOKEN,))] * 2, agent="noop", sandbox=processes)
    assert len({token(one) for one in outcomes}) == 2


def test_a_backend_that_forgets_the_snapshot_runs_no_agent_without_its_setup(local: Sandboxes) -> None:
    class Forgetful(Watched):
        def open(self, spec: SandboxSpec | None = None) -> Sandbox:
            return super().open(SandboxSpec(timeout_s=60))

    outcomes = run_many(
        [drawn()] * 2, agent="noop", sandbox=Forgetful(local, lambda *_: None), verify_sandbox=local, concurrency=1
    )
    assert [one.status for one in outcomes] == ["ok", "sandbox_failed"]
    assert "share_setup=False" in (outcomes[1].reason or "")


@pytest.mark.slow_but_for("protected")
@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (["echo another hook > conftest.py; echo own > answer"], ("ok", 0.5, "isolated")),  # of another size
        (["cd ..; rm -rf workdir; touch workdir"], ("policy_failed", 0.5, "isolated")),  # by a control run
    ],
    ids=["protected", "control-run"],
)
def test_the_verifier_sees_the_same_as_without_sharing(
    agent: list[str], expected: tuple[str, float, str], local: Sandboxes
) -> None:
    task = drawn(setup=("echo kept > conftest.py", "echo 1 > given"), verify=("grep -qx kept conftest.py", "test -e x"))
    shared = run_many([task] * 2, agent=Shell(agent), sandbox=local, concurrency=2)
    (plain,) = run_many([task], agent=Shell(agent), sandbox=local)
    for one in shared:
        assert (one.status, one.reward, one.trust) == expected
        assert (one.phase, one.reason) == (plain.phase, plain.reason)
        assert [result.exit_code for result in one.verify_results] == [0, 1]
        assert one.metadata.get("protected") == plain.metadata.get("protected")
    assert (plain.status, plain.reward, plain.trust) == expected


ENGINE = """
from openenv.rollout import Task, run_many
from openenv.rollout.agents import Shell
def on_progress(event):
    if event.phase == "agent":
        print(event.rollout_id, flush=True)
run_many([Task(instruction="x", setup="echo 1 > one")] * 2, agent=Shell(["sleep 300"]), on_progress=on_progress)
"""


@pytest.mark.slow
def test_the_snapshots_of_a_killed_engine_go_with_the_next_one(local: Sandboxes, own_temporary_folder: Path) -> None:
    source = str(Path(openenv.__file__).parents[1])
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        began: set[str] = set()
        while len(began) < 2:
            line = engine.stdout.readline()
            assert line, "the engine ended"
            began.add(line)
        engine.kill()
    assert [path.name.partition("~")[0] for path in own_temporary_folder.glob("openenv-snapshot*")] == [
        "openenv-snapshot"
    ]
    assert [one.status for one in run_many([drawn()], agent="noop", sandbox=local)] == ["ok"]
    assert list(own_temporary_folder.iterdir()) == []
