"""Types of the lazy exports: a type checker sees real classes behind every name, and no name that is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openenv
import openenv.adapters.inspect
import openenv.adapters.turns
import openenv.core
import openenv.core.containers.runtime
import openenv.core.env_server
import openenv.core.harness
import openenv.providers
import openenv.rollout
import openenv.sandboxes

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    openenv,
    openenv.core,
    openenv.core.containers.runtime,
    openenv.core.env_server,
    openenv.core.harness,
    openenv.adapters.inspect,
    openenv.adapters.turns,
    openenv.providers,
    openenv.rollout,
    openenv.sandboxes,
)

USER_CODE = """
from typing import Any
from openenv import Action, EnvClient, Environment, Observation, State, StepResult, __version__
from openenv.core import GenericEnvClient, ServerMode
from openenv.core.env_server import State as ServerState, create_app
from openenv.rollout import Task, reverify, run_rollout
from openenv.sandboxes import LocalSandboxes, self_check

class Say(Action):
    text: str

class Echo(Observation):
    text: str = ""

class Parrot(Environment[Say, Echo, State]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Echo:
        return Echo()

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Echo:
        return Echo(text=action.text)

    @property
    def state(self) -> State:
        return State()

class Client(EnvClient[Say, Echo, State]):
    def _step_payload(self, action: Say) -> dict[str, Any]:
        return {"text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Echo]:
        return StepResult(Echo(**payload["observation"]))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)

reveal_type(Client("http://host").sync().step(Say(text="hi")).observation.text)  # says: str"
reveal_type(GenericEnvClient("http://host").sync().state())  # says: str, Any]"
reveal_type(ServerState().step_count)  # says: int"
reveal_type(ServerMode.SIMULATION)  # says: ServerMode.SIMULATION
reveal_type(Parrot().state)  # says: openenv.types.State
reveal_type(__version__)  # says: str"
reveal_type(run_rollout(Task(instruction="x"), agent="noop").reward)  # says: float | None"
reveal_type(reverify)  # says: Outcome"
reveal_type(LocalSandboxes().open().exec("true").exit_code)  # says: int"
self_check(5)  # says: incompatible type "int"
run_rollout(Task(instruction="x"), sandboxx="local")  # says: Unexpected keyword argument "sandboxx"
create_app(Parrot, Say, Echo, max_sessions_typo=1)  # says: Unexpected keyword argument
Client(url="http://host")  # says: Unexpected keyword argument "url"
from openenv import Enviroment  # says: has no attribute "Enviroment"
from openenv.core import EnvCleint  # says: has no attribute "EnvCleint"
from openenv.core.env_server import Acton  # says: has no attribute "Acton"
from openenv.rollout import Tusk  # says: has no attribute "Tusk"
from openenv.sandboxes import Sandbx  # says: has no attribute "Sandbx"
"""


def test_a_type_checker_knows_every_exported_name_and_no_other(tmp_path: Path) -> None:
    imports = [
        f"from {package.__name__} import {name} as all_{number}_{name}"
        for number, package in enumerate(PACKAGES)
        for name in package.__all__
    ]
    code = USER_CODE + "\n".join(imports) + "\n"
    (tmp_path / "user.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), "user.py"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--no-error-summary"]
    environment = {"MYPYPATH": str(ROOT / "src"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert not done.stderr
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        path, number, text = line.split(":", 2)
        if path == "user.py":  # what else is wrong in src is for another check
            said[int(number)] = said.get(int(number), "") + text
    for number, line in enumerate(code.splitlines(), 1):
        expected = line.partition("# says: ")[2]
        if expected:
            assert expected in said.pop(number, "nothing"), line
    assert said == {}
