"""The guide to a new project: its commands work in the order in which a newcomer types them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import openenv
from openenv.cli.init import Names, write_package
from openenv.packaging.validate.probe import read_plan
from openenv.packaging.validate.rules import RULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "new_project.md"
SOURCE = Path(openenv.__file__).parents[1]


def blocks(kind: str = "") -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for language, text in fences if language == kind]


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find openenv as these tests do."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("COLUMNS", "200")


def command(line: str) -> list[str]:
    return [sys.executable, "-m", "openenv", *shlex.split(line)[1:]]


@pytest.mark.usefixtures("environ")
def test_the_commands_of_the_guide_work_one_after_another(tmp_path: Path) -> None:
    typed = [line for block in blocks() for line in block.splitlines() if line.startswith(("openenv ", "cd "))]
    assert typed == [
        "openenv init maze_env",
        "openenv serve maze_env",
        "cd maze_env && python -m pytest && cd ..",
        "openenv validate maze_env",
        "openenv validate http://localhost:8000",
        "openenv build maze_env",
    ]
    init, serve, _, validate, ask, _ = (command(line) for line in typed)
    run(init, tmp_path)
    server = subprocess.Popen(
        [*serve, "--port", "0", "--log-level", "warning"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url = server.stderr.readline().strip()
        play = (ROOT / "docs_src" / "play_maze.py").read_text(encoding="utf-8").replace("http://localhost:8000", url)
        assert run([sys.executable, "-c", play], tmp_path) == "hello 0.5\n"
        assert "5 passed" in run([sys.executable, "-m", "pytest"], tmp_path / "maze_env")
        assert "0 failed" in run(validate, tmp_path)
        assert "0 failed" in run([*ask[:-1], url, "--timeout", "30"], tmp_path)
    finally:
        server.terminate()
        server.communicate(timeout=30)


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tree_on_the_page_is_that_of_a_new_project(tmp_path: Path) -> None:
    made = {str(path.relative_to(tmp_path)) for path in write_package(Names.of("maze_env"), tmp_path)}
    tree = next(block for block in blocks() if block.startswith("maze_env/"))
    *lines, rest = tree.splitlines()[1:]
    assert {line.split()[0] for line in lines} | set(rest.split()) == made


def test_the_checks_on_the_page_are_those_that_are_done() -> None:
    named = set(re.findall(r"`((?:static|runtime|semantic)\.\w+)`", PAGE.read_text(encoding="utf-8")))
    assert named <= {rule.id for rule in RULES}
    skipped = {"rubric_introspectable", "reward_attribution", "host_containment"}
    skipped |= {"oracle_containment", "oracle_max", "canary_floor", "no_solution_leakage", "trajectory_record"}
    assert {rule.id for rule in RULES} - named == {rule.id for rule in RULES if rule.id.partition(".")[2] in skipped}


def test_the_plan_on_the_page_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "runtime.json").write_text(blocks("json")[0], encoding="utf-8")
    assert len(read_plan(tmp_path / "runtime.json").actions) == 2
