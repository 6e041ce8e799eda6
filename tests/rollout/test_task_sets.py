"""The task sets: solutions earn 1, doing nothing and cheating earn 0, and every task has the trust of its set."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from openenv.errors import RolloutError
from openenv.rollout import Task, TaskSet, load_tasks, read_task, run_many, task_set, task_set_names
from openenv.rollout.agents import Shell
from openenv.rollout.tasks.sets.repair import MODULES, broken_source, module_source
from openenv.sandboxes.base import Sandboxes

SETS = task_set_names()

# Of the first 20 tasks of seed 0. A change of a set needs its new digest here, and a line in CHANGELOG.md.
DIGESTS = {
    "arithmetic": "add01f7287c2",
    "ciphers": "fc4bfa8f593d",
    "countdown": "c829de591fe2",
    "dates": "914cb973681e",
    "files": "d01d51e07987",
    "git": "a65a77f9d3d3",
    "graphs": "53ca569c4d60",
    "json": "f5487aeb242b",
    "regex": "52aeeb13505e",
    "repair": "34f6aa3d1759",
    "shell": "e18ceb035b18",
    "sql": "cbeb850ea4d8",
    "strings": "98009bd9961f",
    "sudoku": "a8f16d2fc72d",
    "tables": "ccca648a77af",
}

# For each set, agents that want the reward without doing the work. They know the format of the answer.
ATTACKS = {
    "arithmetic": ["seq -9999 9999 > answer.txt", "mkdir answer.txt; seq 0 999 | xargs -I N touch answer.txt/N"],
    "ciphers": ["echo '*' > answer.txt", """echo '" ] || [ "$(echo' > answer.txt"""],
    "countdown": [
        # Without given numbers; with a number twice; with a result that is no number; with other digits.
        "t=$(grep -o 'Reach [0-9]*' ../task.md | tr -dc 0-9); echo \"$t + 0 = $t\" > answer.txt",
        "for n in $(seq 899); do echo \"100 + $n = $((100 + n))\"; done > answer.txt",
        "for n in $(seq 101 999); do echo \"$n * 1 = $n\"; done > answer.txt; echo '0 / 0 = nan' >> answer.txt",
        "printf '\\331\\241 + 1 = 2\\n1 = 1\\n' > answer.txt",
    ],
    "dates": ["for y in $(seq 1900 2120); do echo $y-01-01; done > answer.txt"],
    "files": [
        "ln -s inbox sorted",
        "mkdir sorted && cp -r inbox/. sorted",
        "mkdir -p sorted && ln -s ../checks/expected.json sorted/a.txt; mkfifo sorted/b.txt",
    ],
    "git": ["git log --format=%s > answer.txt", "git log -p > answer.txt; git config core.pager 'cat checks/*'"],
    "graphs": [
        # A road of the agent's own; a walk through all towns; towns that do not exist.
        "echo 'x,y,1' >> roads.csv; tail -1 roads.csv | tr , '\\n' > answer.txt",
        "cut -d, -f1,2 roads.csv | tail -n +2 | tr , '\\n' > answer.txt",
        "printf 'x\\nx\\n' > answer.txt",
    ],
    "json": [
        "echo '{\"version\": NaN}' > config.json",
        "echo 'import os; os._exit(0)' > json.py; cp json.py sys.py",
        "python3 -c 'print(\"[\" * 100000)' > config.json",
    ],
    "regex": [
        "echo '(?s:.*)' > pattern.txt",
        "echo '(a+)+$|(.*)*' > pattern.txt",
        "python3 -c 'print(\"(\" * 199)' > pattern.txt",
    ],
    "repair": [
        # Objects that equal everything; a process that ends with 0; a test runner that passes.
        "for f in */*.py; do printf 'class Y(list):\\n    def __eq__(self, other): return True\\n' > $f; "
        "n=$(basename $f .py); echo \"def $n(*a): return Y()\" >> $f; done",
        "for f in */*.py; do echo 'import os; os._exit(0)' > $f; done",
        "echo 'import os; os._exit(0)' | tee sitecustomize.py unittest.py conftest.py; rm -r tests",
    ],
    "shell": [
        "echo 'cat .checks/* ../.checks/* 2> /dev/null; exit 0' > report.sh",
        "printf 'kill -9 $PPID\\n' > report.sh",
        "echo 'yes | head -c 50000000' > report.sh",
    ],
    "sql": [
        "echo \"ATTACH 'checks/expected.txt' AS x; SELECT 1\" > query.sql",
        "echo \"SELECT readfile('checks/expected.txt')\" > query.sql",
        "echo 'WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n) SELECT * FROM n LIMIT 100000' > query.sql",
    ],
    "strings": [
        "echo 'import sys; print(sys.stdin.read(), end=\"\")' > transform.py",
        "printf 'import glob\\nfor f in glob.glob(\"/home/user/**/*\", recursive=True): print(f)\\n' > transform.py",
    ],
    "sudoku": [
        # A correct grid with other digits than the given ones; a grid with a wildcard; too many rows.
        "printf '1234\\n3412\\n2143\\n4321\\n' > answer.txt",
        "for n in 123456789 456789123 789123456 231564897 564897231 897231564 312645978 645978312 978312645;"
        " do echo $n; done > answer.txt",
        "for n in 1 2 3 4 5 6 7 8 9; do echo '.........'; done > answer.txt",
    ],
    "tables": [
        "for k in shop item region; do for v in total mean; do echo \"$k,$v\"; done; done > result.csv",
        "printf 'shop,total\\nx,NaN\\nx,inf\\n' > result.csv",
        "echo 'import os; os._exit(0)' > csv.py; : > result.csv",
    ],
}  # fmt: skip
EVERYWHERE = (
    "mkdir -p ~/logs/verifier; for f in txt json; do echo 1 > ~/logs/verifier/reward.$f; done;"
    "for f in sitecustomize json csv re math unittest os; do echo 'import os; os._exit(0)' > $f.py; done;"
    "for f in cat cmp python3 sh; do printf '#!/bin/sh\\nexit 0\\n' > $f; chmod +x $f; done; PATH=.:$PATH;"
    "mkdir -p checks ~/checks; ln -sf /dev/null checks/expected.txt; echo 'import sys' > ~/checks/match.py;"
    "for f in answer.txt pattern.txt query.sql config.json result.csv; do ln -s ~/checks/$f $f; done"
)
"""An agent that prepares the verifier's sandbox, whatever the task is."""


def drawn(name: str, count: int, seed: int) -> list[Task]:
    chosen = task_set(name)
    missing = [program for program in chosen.needs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {missing[0]}")
    return chosen.tasks(count, seed=seed)


def test_there_are_at_least_twelve_sets_of_trusted_tasks() -> None:
    assert len(SETS) >= 12
    assert ATTACKS.keys() == set(SETS)
    for name in SETS:
        chosen = task_set(name)
        assert chosen.name == name
        assert chosen.trust in ("isolated", "judged")


def test_the_documentation_lists_every_set_with_its_trust() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "task_sets.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| `(\w+)` \|", page, re.MULTILINE)
    assert [(name, trust) for name, _, trust in rows] == [(name, task_set(name).trust) for name in SETS]
    for name, work, _ in rows:
        assert work.startswith(task_set(name).description)


@pytest.mark.parametrize("name", SETS)
def test_tasks_of_a_set_depend_on_seed_and_number_only(name: str) -> None:
    tasks = task_set(name).tasks(20, seed=5)
    assert len({(task.instruction, str(task.files), str(task.setup)) for task in tasks}) >= 18
    assert task_set(name).task(17, seed=5) == tasks[17]
    assert task_set(name).task(17, seed=6) != tasks[17]
    for number, task in enumerate(tasks):
        assert task.task_id == f"{name}-5-{number}"
        assert task.min_trust == task_set(name).trust
        assert [reading.trust for reading in read_task(task)] == [task.min_trust]


def digest_of(tasks: list[Task]) -> str:
    fields = [task.model_dump(mode="json", exclude_defaults=True) for task in tasks]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", DIGESTS)
def test_the_tasks_of_a_seed_stay_the_same(name: str) -> None:
    """Results of different versions and machines are only comparable if the tasks are."""
    assert digest_of(task_set(name).tasks(20)) == DIGESTS[name]


def test_every_set_has_a_digest() -> None:
    assert sorted(DIGESTS) == sorted(SETS)


def test_solutions_earn_all_and_nothing_earns_nothing(local: Sandboxes) -> None:
    """One task of each set."""
    tasks = [task for name in SETS for task in task_set(name).tasks(1, seed=1) if _runs_here(name)]
    solved = run_many(tasks, agent="oracle", sandbox=local, concurrency=4)
    idle = run_many(tasks, agent="noop", sandbox=local, concurrency=4)
    for task, done, nothing in zip(tasks, solved, idle, strict=True):
        assert (done.status, done.reward) == ("ok", 1.0), (task.task_id, done.reason, done.verify_results)
        assert (nothing.status, nothing.reward) == ("ok", 0.0), task.task_id
        assert done.trust == nothing.trust == task.min_trust


def _runs_here(name: str) -> bool:
    return all(shutil.which(program) for program in task_set(name).needs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_many_solutions_earn_all_and_nothing_earns_nothing(name: str, local: Sandboxes) -> None:
    tasks = drawn(name, 12, seed=2)
    solved = run_many(tasks, agent="oracle", sandbox=local, concurrency=4)
    idle = run_many(tasks, agent="noop", sandbox=local, concurrency=4)
    results = [each.verify_results for each in solved]
    assert [(each.status, each.reward) for each in solved] == [("ok", 1.0)] * 12, results
    assert [(each.status, each.reward) for each in idle] == [("ok", 0.0)] * 12


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_cheats_earn_nothing(name: str, local: Sandboxes) -> None:
    tasks = drawn(name, 3, seed=3)
    for attack in (*ATTACKS[name], EVERYWHERE):
        outcomes = run_many(tasks, agent=Shell([attack], strict=False), sandbox=local, concurrency=4)
        assert [each.reward for each in outcomes] == [0.0] * 3, (attack, [each.reason for each in outcomes])


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_every_bug_of_a_repository_shows_in_its_test(module) -> None:  # type: ignore[no-untyped-def]
    """Otherwise the agent would have no failing test, and a task might be solved already."""

    def results(source: str) -> list[object]:
        names: dict[str, object] = {}
        exec(source, names)
        return [_result(names[module.name], arguments) for arguments in module.revealing]

    right = results(module_source(module))
    for bug in module.bugs:
        assert bug[0] in module_source(module)
        assert results(broken_source(module, bug)) != right, bug


def _result(function, arguments):  # type: ignore[no-untyped-def]
    try:
        return function(*arguments)
    except Exception as exc:
        return repr(exc)


def test_a_task_names_the_program_that_its_sandbox_lacks(local: Sandboxes) -> None:
    bare = task_set("arithmetic")
    needy = TaskSet("needy", "needs a program", "isolated", bare.draw, needs=("no-such-program",))
    outcome = run_many(needy.tasks(1), agent="noop", sandbox=local)[0]
    assert outcome.status == "env_failed"
    assert "needs no-such-program" in outcome.setup_results[-1].stderr


def test_names_of_sets_are_loaded_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_tasks("arithmetic") == task_set("arithmetic").tasks(10)
    assert load_tasks("arithmetic", count=2, seed=9) == task_set("arithmetic").tasks(2, seed=9)
    # A file or folder of this name comes first; the prefix names the set in any case.
    (tmp_path / "git").mkdir()
    (tmp_path / "git" / "one.yaml").write_text("instruction: Do it.\n")
    assert [task.task_id for task in load_tasks("git")] == ["one"]
    assert [task.task_id for task in load_tasks("set:git", count=2)] == ["git-0-0", "git-0-1"]


def test_an_unknown_set_lists_the_known_ones() -> None:
    with pytest.raises(RolloutError, match="arithmetic"):
        task_set("arithmetics")
    with pytest.raises(RolloutError, match="sudoku"):
        load_tasks("no-such-set")
    with pytest.raises(ValueError, match="at least 0"):
        task_set("dates").tasks(-1)


def test_a_set_is_endless() -> None:
    endless = task_set("dates").endless(seed=4)
    assert [next(endless).task_id for _ in range(12)][-1] == "dates-4-11"
