"""The shape of a cheat, and the tasks that cheats are tried on.

`DATA` grades a file and pays by a reward file; `CODE` runs what the agent wrote and pays by the share of checks;
`LOADED` loads it into the check's own process, which has to prove its end; `JUDGED` runs and judges apart. Doing
nothing earns 0 in each, the solution 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from openenv.rollout.task import Check, Task
from openenv.sandboxes.base import Limits

_LIMITS = Limits(memory_mb=512, pids=128, cpus=1.0, disk_mb=512)

_GRADE = """
if [ "$(cat answer.txt 2>/dev/null)" = 42 ]; then
  echo 1.0 > "$HOME/logs/verifier/reward.txt"
  exit 0
fi
exit 1
"""
_TEST = """
import pathlib
import unittest


class Answer(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(pathlib.Path("../answer.txt").read_text().strip(), "42")


if __name__ == "__main__":
    unittest.main()
"""
_PYTEST_OR_UNITTEST = (
    "if ! command -v python3 > /dev/null; then grep -qx 42 answer.txt; "
    "elif cd tests && python3 -c 'import pytest' 2> /dev/null; then python3 -m pytest -q test_answer.py; "
    "else python3 test_answer.py; fi"
)

DATA = Task(
    instruction="Write the answer to answer.txt.",
    task_id="data",
    files={"tests/README": "The tests come later.\n", "tests/conftest.py": "", "pytest.ini": "[pytest]\n"},
    verify=("sh tests/grade.sh", "grep -qx 42 answer.txt", _PYTEST_OR_UNITTEST),
    verify_files={"tests/grade.sh": _GRADE, "tests/test_answer.py": _TEST},
    solution=("echo 42 > answer.txt",),
    limits=_LIMITS,
    agent_timeout_s=30.0,
    verify_timeout_s=30.0,
)
CODE = Task(
    instruction="Write square.sh, which prints the square of its argument.",
    task_id="code",
    verify=('[ "$(sh square.sh 7)" = 49 ]', '[ "$(sh square.sh 12)" = 144 ]', "sh tests/more.sh"),
    verify_files={"tests/more.sh": '[ "$(sh square.sh 3)" = 9 ] && [ "$(sh square.sh 5)" = 25 ]\n'},
    solution=("echo 'echo $(($1 * $1))' > square.sh",),
    limits=_LIMITS,
    agent_timeout_s=30.0,
    verify_timeout_s=30.0,
)
_LOADED_TEST = """
import unittest

from square import square


class Square(unittest.TestCase):
    def test_squares(self):
        self.assertEqual([square(n) for n in range(4)], [0, 1, 4, 9])

    def test_more(self):
        self.assertEqual(square(12), 144)
"""
_LOADED_CHECK = """
from openenv_proof import begin


def check():
    finish = begin()
    import sys

    sys.path.insert(0, ".")
    from square import square

    assert [square(n) for n in range(4)] == [0, 1, 4, 9] and square(12) == 144
    finish()


check()
"""
LOADED = Task(
    instruction="Write square.py. Its function square(n) returns the square of n.",
    task_id="loaded",
    verify=(
        "if python3 -c 'import pytest' 2> /dev/null; then PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q tests; "
        "else python3 tests/check.py; fi",
        "python3 tests/check.py",
    ),
    verify_files={"tests/test_square.py": _LOADED_TEST, "tests/check.py": _LOADED_CHECK},
    proof=True,
    reward_file=True,
    solution=("echo 'def square(n): return n * n' > square.py",),
    limits=_LIMITS,
    agent_timeout_s=30.0,
    verify_timeout_s=20.0,
)
_JUDGE = """
[ "$(cat "$OUTPUT/files/out/squares.txt")" = "$(printf '9\\n25\\n')" ] || exit 1
echo 1.0 > "$HOME/logs/verifier/reward.txt"
"""
JUDGED = Task(
    instruction="Write square.sh, which prints the square of its argument.",
    task_id="judged",
    verify=(
        Check(run="sh square.sh 7", judge='[ "$(cat "$OUTPUT/stdout")" = 49 ]'),
        Check(
            run="mkdir -p out; for n in $(cat tests/numbers.txt); do sh square.sh $n; done > out/squares.txt",
            judge="sh tests/judge.sh",
            keep=("out",),
        ),
    ),
    verify_files={"tests/numbers.txt": "3 5\n", "tests/judge.sh": _JUDGE},
    solution=("echo 'echo $(($1 * $1))' > square.sh",),
    limits=_LIMITS,
    agent_timeout_s=30.0,
    verify_timeout_s=20.0,
)


@dataclass(frozen=True, slots=True)
class Cheat:
    """An attempt, as shell lines that run where an agent runs; all of them run, whether they fail or not.

    In the lines `@PORT@`, `@ABSTRACT@`, `@SECRET@` and `@KEY@` stand for a port and an abstract socket that the host
    listens on, a file of the host, and the key of a rollout that is over.
    """

    name: str
    what: str
    lines: tuple[str, ...]
    task: Task = DATA
    calls_model: bool = False
