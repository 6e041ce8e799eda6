"""`openenv client` writes a module that type checkers and linters accept and that plays."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from environments import Counter
from openenv.cli.__main__ import build
from openenv.cli.client import module_source
from openenv.client.schema_models import read_models
from openenv.protocol.schema import json_schema
from openenv.server.loading import as_app
from openenv.types import Observation, State
from servers import Serve

HOSTILE = 'End """ of\\ it"; import os; os._exit(3) # \x1b[31m \u202e'
ROBOT: dict[str, Any] = {
    "title": "Robot Move",
    "description": HOSTILE,
    "type": "object",
    "$defs": {"Node": {"type": "object", "title": "Node", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    "properties": {
        "to": {"type": "integer", "minimum": 0, "maximum": 9, "description": "Where it goes, " * 12},
        "how": {"enum": [f"in the way number {n}" for n in range(6)], "default": "in the way number 1"},
        "tree": {"$ref": "#/$defs/Node"},
        "camera": {"x-openenv-array": "uint8"},
        "when": {"type": "string", "format": "date-time"},
        'class" or': {"type": "string", "default": HOSTILE},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 1}, "default": []},
        "many": {"type": "object", "additionalProperties": {"type": "number"}, "default": {"a": 1.5}},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "maxItems": 2},
        "metadata": {"type": "object"},
    },
    "required": ["to", "tree", "camera"],
    "additionalProperties": False,
}


def source() -> str:
    documents = {"action": ROBOT, "observation": json_schema(Observation), "state": json_schema(State)}
    return module_source(read_models(documents), "RobotEnv", "the robot")


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_a_module_is_written_and_plays(serve: Serve, tmp_path: Path) -> None:
    url = serve(as_app(Counter, "Counter")).url
    path = tmp_path / "written_counter.py"
    written = CliRunner().invoke(build(), ["client", url, "-o", str(path)])
    assert (written.exit_code, "CounterEnv" in written.output) == (0, True)
    module = loaded(path)
    with module.CounterEnv(url).sync() as env:
        env.reset()
        result = env.step(module.Add(amount=4))
        assert (type(result.observation), result.observation.total) == (module.Sum, 4)


def test_linters_accept_it(tmp_path: Path) -> None:
    (tmp_path / "robot.py").write_text(source(), encoding="utf-8")
    for command in (["check", "--select", "E,F,W,I,UP,B,RUF,PIE,RET", "--ignore", "RUF001"], ["format", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", command[0], "--isolated", *command[1:], "robot.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_type_checkers_accept_it(tmp_path: Path) -> None:
    use = "move = RobotMove(to=1, tree=Node(), camera=np.zeros(3, dtype=np.uint8))\nprint(move.to + 1)\n"
    (tmp_path / "robot.py").write_text(f"{source()}\n\n{use}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "robot.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_texts_of_a_server_are_texts(tmp_path: Path) -> None:
    (tmp_path / "hostile_robot.py").write_text(source(), encoding="utf-8")
    module = loaded(tmp_path / "hostile_robot.py")  # and the tests go on
    text = (tmp_path / "hostile_robot.py").read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "\u202e" not in text
    move = module.RobotMove(to=1, tree=module.Node(), camera=np.zeros(1))
    assert move.model_dump(mode="json", fallback=list)['class" or'] == HOSTILE


def test_a_file_of_ones_own_is_not_replaced(serve: Serve, tmp_path: Path) -> None:
    url = serve(as_app(Counter, "Counter")).url
    path = tmp_path / "mine.py"
    path.write_text("mine = 1\n", encoding="utf-8")
    refused = CliRunner().invoke(build(), ["client", url, "-o", str(path)])
    assert (refused.exit_code, path.read_text(encoding="utf-8")) == (1, "mine = 1\n")
    assert "--force" in refused.output
    for options in (["--force"], [], ["--name", "OtherEnv"]):
        assert CliRunner().invoke(build(), ["client", url, "-o", str(path), *options]).exit_code == 0
    assert "class OtherEnv(EnvClient[Add, Sum, State])" in path.read_text(encoding="utf-8")


def test_a_name_that_is_none_and_an_absent_server_are_plain_errors(free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    absent = CliRunner().invoke(build(), ["client", url])
    assert (absent.exit_code, "Is the server running" in absent.output) == (1, True)
