"""The ten tasks of the documentation: their solutions earn 1, doing nothing earns 0, and each has the trust it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from openenv.rollout import Task, load_task, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import Sandboxes

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docs_src" / "tasks").glob("*.yaml"))
TRUST = {
    "swe_ranges": "shared",
    "npm_slugify": "shared",
    "terminal_access_log": "isolated",
    "data_sales": "isolated",
    "sql_orders": "judged",
    "regex_versions": "isolated",
    "git_culprit": "isolated",
    "humaneval_brackets": "judged",
    "make_wordcount": "judged",
    "http_counter": "judged",
}
NEEDS = {"npm_slugify": "npm", "make_wordcount": "cc", "git_culprit": "git", "swe_ranges": "git"}


def test_the_documentation_lists_every_task_with_its_trust() -> None:
    assert {path.stem for path in FILES} == TRUST.keys()
    text = (ROOT / "docs" / "topics" / "threat_model.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \|$", text, re.MULTILINE)
    assert dict(rows) == TRUST


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_solution_earns_all_and_doing_nothing_earns_nothing(path: Path, local: Sandboxes) -> None:
    if NEEDS.get(path.stem) and shutil.which(NEEDS[path.stem]) is None:
        pytest.skip(f"there is no {NEEDS[path.stem]}")
    task: Task = load_task(path)
    solved = run_rollout(task, agent="oracle", sandbox=local)
    idle = run_rollout(task, agent="noop", sandbox=local)
    assert (solved.status, solved.reward) == ("ok", 1.0), [each.stderr for each in solved.verify_results]
    assert (idle.status, idle.reward) == ("ok", 0.0)
    assert solved.trust == idle.trust == TRUST[path.stem]


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_list_of_all_commits_is_no_answer(local: Sandboxes) -> None:
    task = load_task(ROOT / "docs_src" / "tasks" / "git_culprit.yaml")
    guess = run_rollout(task, agent=Shell(["git log --format=%s > culprit.txt"]), sandbox=local)
    assert (guess.status, guess.reward) == ("ok", 0.0)
    solved = run_rollout(task, agent="oracle", sandbox=local)
    assert (solved.status, solved.reward) == ("ok", 1.0)
