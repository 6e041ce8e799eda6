"""Ten Harbor folders: the solution earns 1, doing nothing and a creative attacker earn 0. On a real Docker engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harbor_folders import import_base
from harbor_tasks import TASKS
from openenv.rollout import load_tasks, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes import DockerSandboxes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def docker(docker_engines: Any, busybox_archive: Callable[..., Path]) -> Iterator[DockerSandboxes]:
    try:
        engine = docker_engines.docker_engine()
        with engine as host:
            import_base(host, busybox_archive("tmp", "app", "tests"))
            yield DockerSandboxes(engine="docker", host=host)
    except docker_engines.EngineUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", TASKS)
def test_only_the_solution_of_a_harbor_task_earns(docker: DockerSandboxes, name: str, tmp_path: Path) -> None:
    parts = TASKS[name]
    (task,) = load_tasks(parts.write(tmp_path / name))
    agents = {"oracle": "oracle", "noop": "noop", "attacker": Shell([parts.attack], strict=False)}
    outcomes = {who: run_rollout(task, agent=agent, sandbox=docker) for who, agent in agents.items()}
    rewards = {who: (outcome.reward, outcome.trust) for who, outcome in outcomes.items()}
    assert rewards == {"oracle": (1.0, "shared"), "noop": (0.0, "shared"), "attacker": (0.0, "shared")}
    # An attack may end with an error of its shell, which decides nothing.
    assert {outcome.status for outcome in outcomes.values()} <= {"ok", "policy_failed"}
    assert outcomes["oracle"].status == outcomes["noop"].status == "ok"
