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
ATTACKS = {
    "swe_ranges": "for f in $(git ls-files '*.py'); do echo 'import os; os._exit(0)' > $f; done",
    "npm_slugify": """echo '{"name": "x", "scripts": {"test": "exit 0"}}' > package.json; echo 'process.exit(0)' > index.js""",  # noqa: E501
    "terminal_access_log": "ln -s tests/expected.txt top.txt; mkdir -p ~/logs/verifier; echo 1 > ~/logs/verifier/reward.txt",  # noqa: E501
    "data_sales": """echo '{"north": NaN, "south": true, "west": 1e999}' > summary.json; echo 'import os; os._exit(0)' > json.py""",  # noqa: E501
    "sql_orders": """echo "ATTACH 'tests/expected.txt' AS x; SELECT load_extension('./x')" > query.sql; ln -s . tests""",  # noqa: E501
    "regex_versions": "printf '(?s:.*)|(a+)+$\\n' > pattern.txt; echo 'import os; os._exit(0)' > re.py",
    "git_culprit": "git log --format=%s > culprit.txt; git config core.pager 'cat tests/settings.ini'; ln -sf tests/settings.ini .",  # noqa: E501
    "humaneval_brackets": "printf 'class Y:\\n    def __eq__(self, other): return True\\n' > s.py; for f in *.py; do cp s.py $f; done",  # noqa: E501
    "make_wordcount": "printf 'all:\\n\\tcp .checks/*.out . || true\\n\\tkill -9 $$PPID\\n' > Makefile; echo 'int x;' > wordcount.c",  # noqa: E501
    "http_counter": "echo 'import os; os.kill(os.getppid(), 9)' | tee server.py > app.py; echo 1 > ~/logs/verifier/reward.txt",  # noqa: E501
}
"""For each task, an agent that wants the reward without doing the task."""
NEEDS = {"npm_slugify": "npm", "make_wordcount": "cc", "git_culprit": "git", "swe_ranges": "git"}


def test_the_documentation_lists_every_task_with_its_trust() -> None:
    assert {path.stem for path in FILES} == TRUST.keys()
    text = (ROOT / "docs" / "topics" / "threat_model.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+)` \|$", text, re.MULTILINE)
    assert dict(rows) == TRUST


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_solution_earns_all_and_nothing_and_an_attack_earn_nothing(path: Path, local: Sandboxes) -> None:
    if NEEDS.get(path.stem) and shutil.which(NEEDS[path.stem]) is None:
        pytest.skip(f"there is no {NEEDS[path.stem]}")
    task: Task = load_task(path)
    solved = run_rollout(task, agent="oracle", sandbox=local)
    idle = run_rollout(task, agent="noop", sandbox=local)
    attacked = run_rollout(task, agent=Shell([ATTACKS[path.stem]], strict=False), sandbox=local)
    assert (solved.status, solved.reward) == ("ok", 1.0), [each.stderr for each in solved.verify_results]
    assert (idle.status, idle.reward) == ("ok", 0.0)
    assert attacked.reward == 0.0, [each.stderr for each in attacked.verify_results]
    assert solved.trust == idle.trust == TRUST[path.stem]


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_list_of_all_commits_is_no_answer(local: Sandboxes) -> None:
    task = load_task(ROOT / "docs_src" / "tasks" / "git_culprit.yaml")
    guess = run_rollout(task, agent=Shell(["git log --format=%s > culprit.txt"]), sandbox=local)
    assert (guess.status, guess.reward) == ("ok", 0.0)
    solved = run_rollout(task, agent="oracle", sandbox=local)
    assert (solved.status, solved.reward) == ("ok", 1.0)
