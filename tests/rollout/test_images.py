"""Tasks with images on a real Docker engine: Harbor's folders, oracle and noop, OpenCode, a network for the setup."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harbor_folders import BASE_IMAGE, import_base, write_task
from openenv import settings
from openenv.errors import AgentUnavailable, SandboxUnavailable, TaskRefused
from openenv.rollout import Model, RolloutStore, Task, load_tasks, reverify, run_many, run_rollout
from openenv.rollout.agents.builtin import Shell
from openenv.rollout.agents.opencode import OpenCode
from openenv.sandboxes import DockerSandboxes, SandboxSpec
from openenv.testing.scripted import Script, ScriptedCall, ScriptedModel, Turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SOCKET = "10.203.7.1"


@pytest.fixture(scope="module")
def bridge() -> Iterator[str]:
    """A bridge of the host with an address, as an engine makes one."""
    name = "oe-harbor0"
    ip = shutil.which("ip")
    if ip is None:
        pytest.skip("there is no ip: apt-get install -y iproute2")
    subprocess.run([ip, "link", "add", name, "type", "bridge"], check=True)
    try:
        subprocess.run([ip, "addr", "add", f"{SOCKET}/24", "dev", name], check=True)
        subprocess.run([ip, "link", "set", name, "up"], check=True)
        yield name
    finally:
        subprocess.run([ip, "link", "del", name], check=True)


@pytest.fixture(scope="module")
def host(docker_engines: Any, busybox_archive: Callable[..., Path], bridge: str) -> Iterator[str]:
    """An engine of these tests with the base image of their tasks."""
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(docker_engines.docker_engine(bridge=bridge))
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        import_base(address, busybox_archive("tmp", "app", "tests"))
        yield address


@pytest.fixture(scope="module")
def docker(host: str) -> DockerSandboxes:
    return DockerSandboxes(engine="docker", host=host)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (task,) = load_tasks(write_task(tmp_path / "sum"))
    return task


def test_a_harbor_task_pays_the_oracle_and_not_the_noop(docker: DockerSandboxes, task: Task, tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "store") as store:
        oracle = run_rollout(task, agent="oracle", sandbox=docker, store=store)
        noop = run_rollout(task, agent="noop", sandbox=docker, store=store)
        assert (oracle.status, oracle.reward) == ("ok", 1.0), (oracle.reason, oracle.verify_results)
        assert (noop.status, noop.reward) == ("ok", 0.0), (noop.reason, noop.verify_results)
        assert oracle.files == {"/app/numbers.txt": "20\n22\n", "/app/sum.txt": "42\n"}
        again = reverify(store, oracle.rollout_id, sandbox=docker)
        assert (again.status, again.reward) == ("ok", 1.0)
    assert docker.leftovers() == []


def test_the_agent_sees_neither_tests_nor_solution_and_cannot_write_the_reward(
    docker: DockerSandboxes, task: Task
) -> None:
    lines = [
        '[ -z "$(ls -A /tests /solution 2> /dev/null | grep -v :)" ]',
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "! touch /bin/od 2> /dev/null",  # the image is read-only
        '[ "$(ls /sys/class/net)" = lo ]',
    ]
    outcome = run_rollout(task, agent=Shell(lines), sandbox=docker)
    assert (outcome.status, outcome.reward) == ("ok", 0.0), (outcome.reason, outcome.agent_log_tail)


def test_what_the_agent_deletes_from_the_image_stays_deleted(docker: DockerSandboxes, task: Task) -> None:
    outcome = run_rollout(task, agent=Shell(["echo 42 > sum.txt", "rm numbers.txt"]), sandbox=docker)
    assert (outcome.status, outcome.reward) == ("ok", 0.0), outcome.verify_results
    kept = run_rollout(task, agent=Shell(["echo 42 > sum.txt"]), sandbox=docker)
    assert (kept.status, kept.reward) == ("ok", 1.0), kept.verify_results


def test_rewards_come_from_json_too(docker: DockerSandboxes, task: Task) -> None:
    script = 'echo \'{"reward": 0.25, "speed": 3}\' > /logs/verifier/reward.json'
    graded = task.model_copy(update={"verify_files": {"/tests/test.sh": script}})
    outcome = run_rollout(graded, agent="noop", sandbox=docker)
    assert (outcome.status, outcome.reward) == ("ok", 0.25), outcome.reason
    assert outcome.metadata["rewards"] == {"reward": 0.25, "speed": 3.0}
    ambiguous = {"/tests/test.sh": 'echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json'}
    outcome = run_rollout(task.model_copy(update={"verify_files": ambiguous}), agent="noop", sandbox=docker)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


def test_an_image_that_cannot_be_built_says_why(docker: DockerSandboxes, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "broken", dockerfile=f"FROM {BASE_IMAGE}\nRUN echo the reason; exit 7\n")
    (task,) = load_tasks(folder)
    outcome = run_rollout(task, agent="noop", sandbox=docker)
    assert outcome.status == "sandbox_failed"
    assert "cannot be built" in str(outcome.reason)
    assert "the reason" in str(outcome.reason) or "exit 7" in str(outcome.reason)
    with pytest.raises(SandboxUnavailable, match="no Dockerfile"):
        docker.open(SandboxSpec(image="nothing:1", build=tmp_path))
    assert docker.leftovers() == []


def test_many_rollouts_share_the_image_and_the_setup(docker: DockerSandboxes, task: Task) -> None:
    prepared = task.model_copy(update={"setup": ("echo 1 >> numbers.txt; echo -1 >> numbers.txt; echo x > ~/seen",)})
    outcomes = run_many([prepared] * 3, agent="oracle", sandbox=docker, concurrency=3)
    assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", 1.0)] * 3, outcomes[0].reason
    assert len({outcome.metadata.get("setup_rollout_id") for outcome in outcomes}) == 2  # one leads, two follow


def test_checks_are_validated_once_per_image(docker: DockerSandboxes, task: Task, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sandbox": docker, "cache": tmp_path / "cache", "validate_checks": True}
    agent = Shell(["echo 42 > sum.txt"])
    assert task.image is not None
    assert task.build is not None
    for _ in range(2):
        outcome = run_rollout(task, agent=agent, **options)
        assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.reason
        assert len(list((tmp_path / "cache" / "checks").iterdir())) == 1
    dockerfile = Path(task.build) / "Dockerfile"
    dockerfile.write_text(f"{dockerfile.read_text()}\nRUN echo 1 > /changed\n")
    docker.rebuild(task.image, Path(task.build), timeout=60)
    run_rollout(task, agent=agent, **options)
    assert len(list((tmp_path / "cache" / "checks").iterdir())) == 2
    with pytest.raises(TaskRefused, match="The solution of task"):
        run_rollout(task.model_copy(update={"solution": ("exit 5",)}), agent=agent, **options)
    assert docker.leftovers() == []


def test_the_clock_of_static_programs_cannot_be_fixed(docker: DockerSandboxes, task: Task) -> None:
    outcome = run_rollout(task, agent=Shell(["true"]), sandbox=docker, clock="2026-01-01")
    assert outcome.status == "sandbox_failed"
    assert "needs dynamically linked programs" in str(outcome.reason)
    assert "`date` says '1" in str(outcome.reason)


def test_only_the_setup_has_a_network(docker: DockerSandboxes) -> None:
    with _serving(b"from the network\n") as port:
        fetch = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 {SOCKET} {port} | grep network > got.txt"
        task = Task(
            instruction="x",
            image=BASE_IMAGE,
            workdir="/app",
            setup=(fetch, "sleep 300 & echo $! > ~/pid"),
            verify=("grep -q network got.txt", f"! {fetch}"),
            network="setup",
        )
        agent = Shell([f"! {fetch.replace('got', 'again')}", "grep -q network got.txt", "! ps | grep -q '[s]leep 300'"])
        outcome = run_rollout(task, agent=agent, sandbox=docker)
        assert (outcome.status, outcome.reward) == ("ok", 1.0), (outcome.reason, outcome.agent_log_tail)
        nothing = run_rollout(Task(instruction="x", image=BASE_IMAGE, network="setup"), agent="noop", sandbox=docker)
        assert nothing.status == "ok", nothing.reason
        without = run_rollout(task.model_copy(update={"network": "none"}), agent="noop", sandbox=docker)
        assert without.status == "env_failed"
    assert docker.leftovers() == []


def test_opencode_solves_a_harbor_task(
    docker_engines: Any, busybox_archive: Callable[..., Path], tmp_path: Path
) -> None:
    driver = OpenCode()
    try:
        installed = driver.install(settings.cache_dir(), lambda message: None)
    except AgentUnavailable as exc:
        if shutil.which("npm") is None:
            pytest.skip(f"no npm and no opencode here: {exc}")
        raise
    (task,) = load_tasks(write_task(tmp_path / "sum"))
    programs = tuple(mount.source for mount in installed.mounts if mount.source.is_file())
    command = {"command": "awk '{t += $1} END {print t}' numbers.txt > sum.txt", "description": "sum"}
    turns = (Turn(text="I sum.", calls=(ScriptedCall(name="bash", arguments=command),)), Turn(text="Done."))
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        import_base(host, busybox_archive("tmp", "app", "bin"), programs=programs)
        server = stack.enter_context(ScriptedModel(Script(name="sum", turns=turns)))
        docker = DockerSandboxes(engine="docker", host=host)
        spacious = task.model_copy(update={"limits": replace(task.limits, memory_mb=2048, pids=512)})
        outcome = run_rollout(spacious, agent=driver, sandbox=docker, model=Model(**server.model()))
    assert (outcome.status, outcome.reward) == ("ok", 1.0), (outcome.reason, outcome.agent_log_tail)
    assert [turn.completion_token_ids for turn in outcome.turns] == [entry.token_ids for entry in server.played()]
    assert json.loads(outcome.model_dump_json())["files"]["/app/sum.txt"] == "42\n"


@contextlib.contextmanager
def _serving(content: bytes) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer((SOCKET, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
