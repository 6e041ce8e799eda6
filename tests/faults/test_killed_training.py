"""Kill -9 of the server, the engine and the trainer while a run goes on: no sample has a wrong reward, and the run goes
on, or says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asking_agent import AskingAgent
from openenv.client.env_client import GenericEnvClient
from openenv.errors import RolloutError, SandboxUnavailable
from openenv.rollout import Model, RolloutStore, Task
from openenv.rollout.store.exports import export_rollouts
from openenv.sandboxes import LocalSandboxes
from openenv.testing import Script, ScriptedModel, serve
from openenv.train import SampleGroup, play, rollouts, stream
from slow_steps import take
from sum_app import app
from waiting import wait_until

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TALKER = '{"name": "talker", "turns": [{"text": "Go on."}], "ending": "done"}'


class Process:
    """A server process on a port of its own, which can be killed and started again."""

    def __init__(self, command: Callable[[int], list[str]], ready: Callable[[int], bool]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command, self._ready = command, ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        self._process = subprocess.Popen(self._command(self.port), cwd=SUPPORT, stdout=subprocess.DEVNULL)
        wait_until(lambda: self._ready(self.port), 60, "it did not start")
        return self

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None


def answers(path: str) -> Callable[[int], bool]:
    def ready(port: int) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code < 500
        return False

    return ready


@pytest.fixture
def server() -> Iterator[Process]:
    """The environment's server."""
    serving = [sys.executable, "-m", "openenv.cli", "serve", "sum_app:app", "--no-web", "--port"]
    process = Process(lambda port: [*serving, str(port)], answers("/health"))
    try:
        yield process.start()
    finally:
        process.kill()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Process]:
    """The model's endpoint."""
    (tmp_path / "talker.json").write_text(TALKER)
    scripted = [sys.executable, "-m", "openenv.testing.scripted", str(tmp_path / "talker.json"), "--port"]
    process = Process(lambda port: [*scripted, str(port)], answers("/v1/models"))
    try:
        yield process.start()
    finally:
        process.kill()


def url_of(process: Process) -> str:
    return f"http://127.0.0.1:{process.port}"


def model_at(process: Process) -> Model:
    return Model(base_url=f"{url_of(process)}/v1", name="scripted/talker")


def check(groups: list[SampleGroup]) -> int:
    """Check every reward; return how many samples have one."""
    for group in groups:
        for sample in [*group.samples, *group.failed]:
            assert sample.reward in (None, 111.0 * group.start["seed"]), sample.outcome
            assert sample.reward is not None or (sample.outcome.status == "env_failed" and sample.outcome.reason)
    return sum(reward is not None for group in groups for reward in group.rewards)


async def groups_while(
    url: str, model: Model, happens: Callable[[], None], count: int = 40, **options: Any
) -> list[SampleGroup]:
    """Play, and do something in a thread after a few groups."""
    groups = []
    async with play(url, model, range(1, count + 1), samples=2, concurrency=4, **options) as played:
        async for group in played:
            groups.append(group)
            if len(groups) == 5:
                doing = asyncio.create_task(asyncio.to_thread(happens))
        await doing
    return groups


@pytest.mark.slow
@pytest.mark.parametrize("what", ["server", "engine"])
def test_a_run_goes_on_when_what_was_killed_comes_back(
    server: Process, engine: Process, tmp_path: Path, what: str
) -> None:
    victim = server if what == "server" else engine

    def kill_and_restart() -> None:
        victim.kill()
        take(3)  # longer than the proxy and the client try again by themselves
        victim.start()

    with RolloutStore(tmp_path / "store") as store:
        options = {"store": store, "retries": 5}
        work = groups_while(url_of(server), model_at(engine), kill_and_restart, **options)
        groups = asyncio.run(asyncio.wait_for(work, 200))
        rows = store.find()
    assert len(groups) == 40
    assert check(groups) == 80, "all were played again"
    assert sum(len(group.failed) for group in groups) > 0, "something was under way when it was killed"
    assert {row.status for row in rows} == {"ok", "env_failed"}
    assert all((row.reward is None) == (row.status == "env_failed") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["server", "engine"])
def test_a_run_says_that_what_was_killed_stays_away(server: Process, engine: Process, what: str) -> None:
    victim = server if what == "server" else engine
    groups: list[SampleGroup] = []

    async def run() -> None:
        options: dict[str, Any] = {"samples": 2, "concurrency": 4, "retries": 1}
        options["client_options"] = {"connect_timeout_s": 2.0, "reconnect_timeout_s": 2.0}
        async with play(url_of(server), model_at(engine), range(1, 100_000), **options) as played:
            async for group in played:
                groups.append(group)
                if len(groups) == 5:
                    victim.kill()

    reason = "the model endpoint" if what == "engine" else "ConnectFailed|SessionLost"
    with pytest.raises(RolloutError, match=rf"samples in a row failed 2 times each; the last one: .*({reason})"):
        asyncio.run(asyncio.wait_for(run(), 200))
    assert check(groups) >= 10


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_wrong_sample_and_its_store_goes_on(
    server: Process, engine: Process, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    command = [sys.executable, "sum_app.py", url_of(server), f"{url_of(engine)}/v1", str(folder)]
    trainer = subprocess.Popen(command, cwd=SUPPORT, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        for _ in range(5):
            assert trainer.stdout.readline().startswith("seed-")
    finally:
        trainer.kill()
        trainer.communicate(timeout=20)
    with RolloutStore(folder) as store:
        lost = store.interrupted()
        kept = list(store.records())
        assert lost, "episodes were under way"
        assert len(kept) >= 10
        assert all(record.outcome.reward == 111.0 * record.outcome.metadata["start"]["seed"] for record in kept)
        assert not {record.rollout_id for record in kept} & set(lost)
        assert export_rollouts(store, tmp_path / "all.jsonl") == len(kept)
        work = groups_while(url_of(server), model_at(engine), lambda: None, count=6, store=store)
        assert check(asyncio.run(asyncio.wait_for(work, 100))) == 12
        assert len(list(store.records())) == len(kept) + 12
        groups = {record.group for record in store.records() if record.outcome.task_id == "seed-1"}
        assert len(groups) == 2, "the groups of the two runs are not mixed"


@pytest.mark.slow
def test_a_killed_engine_costs_agents_in_sandboxes_no_reward(engine: Process) -> None:
    try:
        LocalSandboxes().check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    tasks = [Task(task_id=f"t{n}", instruction=f"Do {n}.", verify=("grep -q done answers.txt",)) for n in range(10)]
    killed: list[asyncio.Task[None]] = []

    def kill_and_restart() -> None:
        engine.kill()
        take(3)
        engine.start()

    async def run() -> list[SampleGroup]:
        groups = []
        options: dict[str, Any] = {"agent": AskingAgent(), "model": model_at(engine), "retries": 5}
        async with rollouts(tasks, samples=2, concurrency=2, **options) as played:
            async for group in played:
                groups.append(group)
                if len(groups) == 2:
                    killed.append(asyncio.create_task(asyncio.to_thread(kill_and_restart)))
            await asyncio.gather(*killed)
        return groups

    groups = asyncio.run(asyncio.wait_for(run(), 250))
    assert [group.rewards for group in groups] == [[1.0, 1.0]] * 10
    failed = [sample.outcome for group in groups for sample in group.failed]
    assert failed, "something was under way when it was killed"
    assert {(outcome.status, outcome.reward) for outcome in failed} == {("env_failed", None)}


def test_a_server_that_stays_full_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_NO_ROOM_S", 1.0)

    async def run() -> None:
        script = Script(name="talker", turns=(), ending="go")
        with serve(app) as served, ScriptedModel(script) as scripted:
            others = [GenericEnvClient(served.url) for _ in range(16)]
            try:
                await asyncio.gather(*(other.reset() for other in others))
                model = Model(**scripted.model())
                async with play(served.url, model, range(100), samples=1, concurrency=2) as played:
                    assert [group async for group in played] == []
            finally:
                await asyncio.gather(*(other.close() for other in others))

    with pytest.raises(RolloutError, match="The server has had no room for 1 s"):
        asyncio.run(asyncio.wait_for(run(), 60))
