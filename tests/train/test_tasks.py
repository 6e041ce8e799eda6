"""Streams of rollouts: groups of tasks with exact tokens, shared setups, and failures that never become rewards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from asking_agent import AskingAgent
from openenv.errors import RolloutError, SandboxError
from openenv.rollout import Model, RolloutStore, Task
from openenv.rollout.agents import Shell
from openenv.rollout.tasks.task import BranchPoint
from openenv.sandboxes import LocalSandboxes
from openenv.sandboxes.base import Sandbox, Sandboxes, SandboxSpec
from openenv.testing import Script, ScriptedModel, StatusFailure, Turn
from openenv.train import Curriculum, RolloutStream, SampleGroup, rollouts
from waiting import holds_for_async, wait_until_async

T = TypeVar("T")
SETUP = "cat /proc/sys/kernel/random/uuid > token"
"""A setup that never leaves the same twice."""


def task(name: str, **fields: Any) -> Task:
    verify = fields.pop("verify", ("grep -q done answers.txt",))
    return Task(task_id=name, instruction=f"Do {name}.", verify=verify, **fields)


def talker(*turns: Turn, ending: str = "All done.") -> ScriptedModel:
    return ScriptedModel(Script(name="worker", turns=turns or (Turn(text="Looking."),), ending=ending))


class FailingFirst(LocalSandboxes):
    """Fails for the first sandboxes of agents."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self._lock = threading.Lock()

    def open(self, spec: SandboxSpec | None = None, **arguments: Any) -> Any:
        with self._lock:
            fails = self.failures > 0 and spec is not None and "rollout_id" in spec.metadata
            self.failures -= fails
        if fails:
            raise SandboxError("no sandbox today")
        return super().open(spec, **arguments)


def finish(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


@asynccontextmanager
async def opened(tasks: Any, **options: Any) -> AsyncIterator[RolloutStream]:
    arguments: dict[str, Any] = {"samples": 2, "concurrency": 2, "agent": AskingAgent(), **options}
    async with rollouts(tasks, **arguments) as stream:
        yield stream


def groups_of(tasks: Any, **options: Any) -> list[SampleGroup]:
    async def collect() -> list[SampleGroup]:
        async with opened(tasks, **options) as stream:
            return [group async for group in stream]

    return finish(collect())


def test_batches_of_one_seed_are_equal_at_any_concurrency(local: Sandboxes) -> None:
    tasks = [task("one"), task("two"), task("one")]
    options = {"seed": 3, "in_order": True, "samples": 2}
    with talker(Turn(text="First ${seed}"), Turn(text="done ${seed}")) as server:
        model = Model(**server.model())
        runs = [groups_of(tasks, model=model, concurrency=count, **options) for count in (1, 6)]
    names, rewards, tokens = (
        [[value(group) for group in groups] for groups in runs]
        for value in (
            lambda group: group.name,
            lambda group: group.rewards,
            lambda group: [
                (each.input_ids, each.logprobs, each.loss_mask)
                for sample in group.samples
                for each in sample.outcome.sequences
            ],
        )
    )
    assert names[0] == names[1] == ["one", "two", "one.2"]
    assert rewards[0] == rewards[1]
    assert tokens[0] == tokens[1]
    assert len({str(each) for group in tokens[0] for each in group}) == 6


def test_groups_have_rewards_and_the_tokens_that_were_sampled(local: Sandboxes, tmp_path: Path) -> None:
    tasks = [task("one", setup=(SETUP,)), task("two", verify=("false",)).model_dump()]
    with talker() as server, RolloutStore(tmp_path) as store:
        groups = {group.name: group for group in groups_of(tasks, model=Model(**server.model()), store=store)}
        played = {tuple(one.prompt_ids): (one.token_ids, one.logprobs) for one in server.played()}
        rows = store.find()
        stored = store.get(groups["one"].samples[0].outcome.rollout_id).outcome
    assert {name: group.rewards for name, group in groups.items()} == {"one": [1.0, 1.0], "two": [0.0, 0.0]}
    one = groups["one"]
    assert one.task == tasks[0]
    tokens = {text for sample in one.samples for path, text in sample.outcome.files.items() if path.endswith("/token")}
    assert len(tokens) == 1, "the setup of a group runs once"
    for sample in one.samples:
        (sequence,) = sample.trainable
        assert sequence == sample.outcome.sequences[0] == sample.sequences[0]
        assert sequence.n_turns == 2
        ids, values = played[tuple(sequence.input_ids[: -sequence.turn_lengths[-1]])]
        assert sequence.input_ids[-len(ids) :] == ids
        assert sequence.logprobs[-len(ids) :] == pytest.approx(values)
        assert sequence.sampled_with("temperature") == 1.0, "the trainer's, not the agent's 0.1"
    assert len(one.collate()) == 2
    assert stored.sequences == one.samples[0].sequences
    labels = {(row.group, row.task_id) for row in rows}
    assert len(rows) == 4
    assert len(labels) == 2


def test_what_fails_beside_the_policy_is_run_again_and_counted(local: Sandboxes) -> None:
    async def run() -> tuple[SampleGroup, int]:
        with talker() as server:
            options = {"model": Model(**server.model()), "sandbox": FailingFirst(3), "concurrency": 1, "retries": 1}
            async with opened([task("one")], **options) as stream:
                (group,) = [group async for group in stream]
                return group, stream.counts.failed

    group, failed = finish(run())
    assert group.rewards == [None, 1.0]
    assert group.advantages() == [None, 0.0]
    assert [sample.outcome.status for sample in group.failed] == ["sandbox_failed"] * 2
    assert failed == 3


@pytest.mark.slow
class FailingVerifier(LocalSandboxes):
    """Fails for the first sandbox of a verifier."""

    failures = 2  # a verifier tries twice

    def open(self, spec: SandboxSpec | None = None, **arguments: Any) -> Any:
        if self.failures and spec is not None:  # without, it is the check of the backend
            self.failures -= 1
            raise SandboxError("no sandbox for the checks")
        return super().open(spec, **arguments)


def test_a_retry_gets_the_answers_of_the_attempt_that_failed(local: Sandboxes, tmp_path: Path) -> None:
    with talker(Turn(text="Looking."), Turn(text="Still.")) as model, RolloutStore(tmp_path) as store:
        options: dict[str, Any] = {"agent": AskingAgent(), "model": Model(**model.model()), "store": store}
        options |= {"sandbox": local, "verify_sandbox": FailingVerifier(), "validate_checks": False}
        [group] = groups_of([task("a")], samples=1, **options)
        assert len(model.played()) == 3, "the answers are not sampled again"
    assert group.rewards == [1.0]
    [failed], [sample] = group.failed, group.samples
    assert failed.outcome.status == "sandbox_failed"
    assert sample.outcome.start == BranchPoint(failed.outcome.rollout_id, is_branch=False)
    assert sample.outcome.metadata["replayed"] == 3
    assert [turn.completion_token_ids for turn in sample.outcome.turns] == [
        turn.completion_token_ids for turn in failed.outcome.turns
    ]


def test_a_setup_that_failed_is_run_again_by_a_retry(local: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()

    class Flaky(LocalSandboxes):
        def open(self, spec: SandboxSpec | None = None, **arguments: Any) -> Any:
            sandbox: Sandbox = super().open(spec, **arguments)
            if (tmp_path / "mark").exists() and spec is not None and "rollout_id" in spec.metadata:
                sandbox.write_text(f"{sandbox.workdir}/broken", "")
                (tmp_path / "mark").unlink()
            return sandbox

    with talker() as server:
        broken_once = task("one", setup=("! test -e broken",))
        (group,) = groups_of([broken_once], model=Model(**server.model()), sandbox=Flaky(), concurrency=1)
    assert group.rewards == [1.0, 1.0]
    assert [sample.outcome.status for sample in group.failed] == ["env_failed"]


def test_a_dead_endpoint_ends_the_run(local: Sandboxes) -> None:
    failing = Turn(text="no", failures=(StatusFailure(status=500, attempts=None),))
    with talker(failing) as server, pytest.raises(RolloutError, match="the model endpoint failed"):
        groups_of([task("one")], model=Model(**server.model()), retries=0, samples=1)


@pytest.mark.slow
def test_rollouts_wait_for_the_trainer(local: Sandboxes) -> None:
    begun: list[int] = []

    def endless() -> Iterator[Task]:
        while True:
            begun.append(len(begun))
            yield task(f"t{len(begun)}", verify=("true",))

    async def run() -> None:
        async with opened(endless(), agent=Shell(["true"]), samples=1) as stream:
            await stream.take(1)
            # One was taken, and four are started or wait: twice as many as run at once.
            await wait_until_async(lambda: len(begun) == 5)
            await holds_for_async(1.0, lambda: len(begun) == 5, lambda: f"{len(begun)} tasks were started")
            assert len(await stream.take(3)) == 3

    finish(run())


@pytest.mark.slow
def test_a_curriculum_learns_the_rewards_of_its_tasks(local: Sandboxes) -> None:
    tasks = [task("solved", verify=("true",)), task("hopeless", verify=("false",))]
    curriculum = Curriculum(tasks, seed=1)

    async def run() -> None:
        async with opened(curriculum, agent=Shell(["true"]), samples=1, concurrency=1) as stream:
            while None in (curriculum.mean(0), curriculum.mean(1)):
                await stream.take(1)

    finish(run())
    assert (curriculum.mean(0), curriculum.mean(1)) == (1.0, 0.0)


def test_an_update_of_weights_waits_for_calls_and_calls_for_it(local: Sandboxes) -> None:
    async def run(update: Callable[[RolloutStream, ScriptedModel], Awaitable[None]]) -> list[str | None]:
        with talker() as server:
            server.set_header("x-policy-version", "1")
            async with opened([task("one")], model=Model(**server.model()), samples=1) as stream:
                await update(stream, server)
                groups = [group async for group in stream]
                return [one for group in groups for one in group.samples[0].sequences[0].policy_versions]

    async def before_the_first_call(stream: RolloutStream, server: ScriptedModel) -> None:
        async with stream.paused():
            await holds_for_async(0.5, lambda: server.played() == [])
            server.set_header("x-policy-version", "2")
            stream.policy_version = 2

    assert finish(run(before_the_first_call)) == ["2", "2"]


def test_what_is_no_task_is_refused(local: Sandboxes) -> None:
    with pytest.raises(RolloutError, match="Item 0 of the tasks is not a task"):
        groups_of([{"verify": "true"}], agent=Shell(["true"]))
    with pytest.raises(ValueError, match="oversample"):
        groups_of([], agent=Shell(["true"]), oversample=-1)
    with pytest.raises(ValueError, match="needs a model"):
        groups_of([], agent=AskingAgent())
