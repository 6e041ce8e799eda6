"""No label promises more than the result: attacks on two hundred labelled tasks earn nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from labelled_tasks import FORMS, attacks_on_labels
from openenv.rollout import Task, read_task
from openenv.rollout.verify.trust import trust_of
from openenv.sandboxes.base import Sandboxes
from openenv.testing import run_cheats


def test_each_of_two_hundred_attacked_tasks_has_a_label_above_shared() -> None:
    labels = Counter(read_task(form.task())[0].trust for form in FORMS)
    assert labels["shared"] == 0
    assert min(labels["isolated"], labels["judged"]) >= 40
    assert len({cheat.name for cheat in attacks_on_labels()}) == len(attacks_on_labels()) >= 200


def test_no_attack_on_some_labels_pays(local: Sandboxes) -> None:
    report = run_cheats(local, cheats=attacks_on_labels(1)[::14], quick=True)
    assert [(result.kind, result.name) for result in report.succeeded] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_attack_on_a_label_pays_and_each_solution_does(local: Sandboxes) -> None:
    report = run_cheats(local, cheats=attacks_on_labels())
    assert report.unfit == []
    assert [(result.kind, result.name) for result in report.succeeded] == []
    assert len(report.results) >= 200


@pytest.mark.parametrize(
    ("check", "files", "reason"),
    [
        # the agent has the expected side, too
        ("cmp out.txt want.txt", {}, "can all change"),
        ("diff -r out other", {}, "can all change"),
        ("sort out.txt | cmp - want.txt", {}, "can all change"),
        ("sha256sum -c out.sums", {}, "can all change"),
        ('[ "$(cat a.txt)" = "$(cat b.txt)" ]', {}, "can all change"),
        ('[ "$(wc -l < a.txt)" -eq "$(wc -l < in.txt)" ]', {}, "can all change"),
        ({"run": "./a", "judge": 'cmp "$OUTPUT/stdout" "$OUTPUT/stderr"'}, {}, "can all change"),
        ("python3 c.py", {"c.py": "assert open('o.txt').read() == open('in.txt').read()"}, "reads in.txt"),
        # an error passes
        ("! grep -q TODO main.py", {}, "negates a reader"),
        ("grep -q x a.txt && ! grep -q TODO main.py", {}, "negates a reader"),
        ("grep -q x main.py; ! grep -q TODO main.py", {}, "negates a reader"),
        ("[ ! -s main.py ] && ! grep -q TODO main.py", {}, "negates a reader"),
        ('! [ "$(cat a.txt)" -eq 3 ]', {}, "negates a reader"),
        # names become operators
        ("! [ -e out/*.tmp ]", {}, "not in the list"),
        ("cmp out/*.txt want.txt", {"want.txt": ""}, "not in the list"),
        ("grep -q out/*.txt want.txt", {"want.txt": ""}, "not in the list"),
        # NaN is neither above nor below a limit, and the other value of `max`
        ("python3 c.py", {"c.py": "if abs(float(open('o').read()) - 1) > 1:\n    raise SystemExit(1)"}, "NaN"),
        ("python3 c.py", {"c.py": "import json\nassert not json.load(open('o')) > 1"}, "NaN"),
        ("python3 c.py", {"c.py": "import json\nassert max(json.load(open('o'))) == 1"}, "NaN"),
        # 256 mistakes are exit code 0
        ("python3 c.py", {"c.py": "import sys\nsys.exit(sum(x != 'a' for x in open('o')))"}, "256"),
        ("python3 c.py", {"c.py": "def main():\n    return int(open('o').read())\nraise SystemExit(main())"}, "256"),
        # the decision is in `run`
        ({"run": "python3 -m pytest -q", "judge": 'grep -q 3 "$OUTPUT/stdout"'}, {}, "test runner"),
        ({"run": "./a && echo passed", "judge": 'grep -qx passed "$OUTPUT/stdout"'}, {}, "may decide"),
        ({"run": "python3 go.py", "judge": 'grep -q OK "$OUTPUT/stdout"'}, {"go.py": "print('OK')"}, "may decide"),
        ({"run": "pytest", "cases": [{"exit_code": 0}]}, {}, "only exit codes"),
        # modules of modules, and writers
        ("python3 -c 'import pathlib; pathlib.os.system(1)'", {}, "pathlib.os"),
        ("python3 -c 'import os; os.path.os.system(1)'", {}, "a part of os"),
        ("python3 -c 'import io; io.FileIO(1)'", {}, "imports io"),
        ("python3 -c 'import operator; operator.methodcaller(open(1).read())'", {}, "imports operator"),
        ("python3 -c 'import tomllib'", {}, "tomllib"),
    ],
)
def test_a_form_that_the_agents_data_can_decide_is_shared(check: object, files: dict[str, str], reason: str) -> None:
    task = Task.model_validate(
        {"instruction": "x", "verify": [check], "verify_files": files, "files": {"in.txt": "1\n"}}
    )
    trust, why = trust_of(task.verify[0], task)
    assert (trust, reason in why) == ("shared", True), why


@pytest.mark.parametrize(
    "check",
    [
        "cmp out.txt data/want.txt",  # protected
        "python3 -c \"assert open('o.txt').read() == open('data/want.txt').read()\"",
        "grep -q . main.py && ! grep -q TODO main.py",
        "grep -q 'def main' main.py && ! cat main.py | grep -q print",
        "! test -e tmp",
        "python3 -c \"import math; x = float(open('o').read()); assert math.isfinite(x) and not abs(x - 1) > 1\"",
        "python3 -c \"x = float(open('o').read()); assert 0 < x < 1\"",
        "python3 -c \"import sys; sys.exit(0 if open('o').read() == 'x' else 1)\"",
    ],
)
def test_the_safe_form_of_it_is_isolated(check: str) -> None:
    task = Task(instruction="x", verify=(check,), files={"data/want.txt": "1\n"}, protected=("data/**",))
    assert trust_of(check, task) == ("isolated", "it only reads data")
