"""The snippets about rollouts run in the local sandbox and print what they should; the page has no other figures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import openenv.rollout
from openenv.errors import SandboxUnavailable
from openenv.rollout import load_task, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import backend
from openenv.testing import all_cheats

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "checks.md"
THREATS = PAGE.parents[1] / "topics" / "threat_model.md"
PRINTED = {
    "opencode_turns.py": "There is 1.\nA pear.\n['pear']\n",
    "own_agent.py": "ok 1.0\n['I', 't', ' is', ' ', 'P', 'ar', 'is', '.', '<|end|>']\nTrue\n",
    "own_cheat.py": "[('exit-code', None, 0.0)]\n",
    "readme_rollout.py": "ok 1.0 judged\ntool_calls 245 245\nstop 20 20\n",
    "use_branch.py": "[1.0, 1.0, 1.0, 1.0] [0.0, 0.0, 0.0, 0.0]\n",
    "use_check.py": "1.0\n0.0 [1, 1]\n",
    "use_checks.py": "['judged', 'judged']\n1.0 judged\n0.0\n",
    "use_rollout.py": "ok 1.0\nok 0.0 [1, 1]\n",
    "use_rollouts.py": "8.0\n[0.5, 1.0]\n",
    "use_task_sets.py": "15 sets\n[1.0, 1.0, 1.0, 1.0]\nsums-3-12\n",
    "use_stream.py": "search-2 [1.0, 1.0] 2 530\nsearch-1 [1.0, 1.0] 2 530\n0 failed\n",
}


@pytest.mark.slow_but_for("use_rollout.py", "own_agent.py")
@pytest.mark.parametrize("file", sorted(PRINTED))
def test_a_snippet_about_rollouts_prints_what_it_should(file: str, run_snippet: Callable[..., str]) -> None:
    try:
        backend("local").check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    if (
        file in ("opencode_turns.py", "readme_rollout.py", "use_stream.py")
        and shutil.which("npm") is None
        and shutil.which("opencode") is None
    ):
        pytest.skip("OpenCode is not here, and without npm it cannot be installed")
    assert run_snippet(file) == PRINTED[file]


def test_the_threat_model_names_only_cheats_that_exist() -> None:
    named = re.findall(r"--family ([a-z-]+)", THREATS.read_text("utf-8"))
    assert named
    assert set(named) <= {cheat.family for cheat in all_cheats()}


def test_the_task_file_on_the_page_can_be_solved_and_not_ended(tmp_path: Path) -> None:
    section = PAGE.read_text("utf-8").partition("## Run and judge separately")[2]
    text = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]
    (tmp_path / "square.yaml").write_text(text)
    task = load_task(tmp_path / "square.yaml")
    try:
        backend("local").check()
    except SandboxUnavailable as exc:
        pytest.skip(f"no local sandboxes here: {exc}")
    assert run_rollout(task, agent="oracle").reward == 1.0
    assert run_rollout(task, agent=Shell(["echo 'import os; os._exit(0)' > square.py"])).reward == 0.0


def test_every_name_of_the_package_is_documented() -> None:
    section = (
        (PAGE.parents[1] / "reference" / "api.md").read_text("utf-8").partition("## Rollouts")[2].partition("\n## ")[0]
    )
    assert [name for name in openenv.rollout.__all__ if f"`{name}`" not in section] == []
