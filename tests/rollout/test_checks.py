"""Short ways to write checks: cases, tests over the agent's modules, servers; in task files and in Python."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from openenv.errors import RolloutError
from openenv.rollout import Case, Check, Outcome, Task, case_check, load_task, pytest_check, python_check, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.tasks.checks import case_verdicts, expand
from openenv.rollout.tasks.task import parse_check
from openenv.sandboxes import backend
from openenv.sandboxes.base import Sandboxes

TESTS = {
    "tests/test_square.py": "import pytest\nfrom square import square\n\n\n@pytest.mark.parametrize('n', [0, 3, -7])\n"
    "def test_square(n):\n    assert square(n) == n * n\n\n\ndef test_text():\n    with pytest.raises(TypeError):\n"
    "        square('x')\n",
}
RIGHT = "printf 'def square(n):\\n    return n * n\\n' > square.py"


@pytest.fixture
def roll(local: Sandboxes, leftovers: Callable[[], None]) -> Callable[..., Outcome]:
    """Let an agent that runs these lines work on a task."""

    def run(task: Task, *lines: str, **options: Any) -> Outcome:
        outcome = run_rollout(task, agent=Shell([*lines, "true"]), **{"sandbox": local, **options})
        leftovers()
        return outcome

    return run


def task(*checks: str | Check, **fields: Any) -> Task:
    return Task.model_validate({"instruction": "Write square", "verify": checks, **fields})


def file(name: str, text: str) -> str:
    return f"cat > {name} <<'END'\n{text}\nEND"


# ---- as they are written ----


def test_task_files_have_the_same_short_forms(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "instruction: x\nverify:\n"
        "  - {pytest: tests/test_square.py, of: square}\n"
        "  - {python: check.py, of: [square, shapes.round]}\n"
        "  - run: ./square\n    build: gcc -o square square.c\n"
        "    cases: [{stdin: 7, stdout: 49}, {args: [x], exit_code: 2}]\n"
        "  - {run: node app.js, port: 3000, judge: sh judge.sh}\n"
    )
    assert load_task(tmp_path / "t.yaml").verify == (
        pytest_check("tests/test_square.py", of="square"),
        python_check("check.py", of=("square", "shapes.round")),
        case_check(
            "./square",
            (Case(stdin="7", stdout="49"), Case(args=("x",), exit_code=2)),
            build="gcc -o square square.c",
        ),
        Check(run="node app.js", port=3000, judge="sh judge.sh"),
    )


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("{python: check.py, of: square}", python_check("check.py", of="square")),
        ("{run: ./a, cases: [{stdout: 1}]}", case_check("./a", (Case(stdout="1"),))),
        ("{run: ./a, judge: sh judge.sh}", Check(run="./a", judge="sh judge.sh")),
    ],
)
def test_a_single_check_needs_no_list(tmp_path: Path, text: str, check: Check) -> None:
    (tmp_path / "t.yaml").write_text(f"instruction: x\nverify: {text}\n")
    assert load_task(tmp_path / "t.yaml").verify == (check,)


def test_a_check_with_files_is_stored_and_read_again() -> None:
    before = task(case_check("./a", (Case(stdout="1"),)), pytest_check(("a.py", "b.py"), of=("a", "b"), path="src"))
    assert Task.model_validate_json(before.model_dump_json()) == before


@pytest.mark.parametrize(
    ("check", "problem"),
    [
        ("{run: x, cases: []}", "cases"),
        ("{run: x, cases: [{stdin: 1, output: 2}]}", "output"),
        ("{run: x, cases: [{stdout: 1}], compare: roughly}", "compare"),
        ("{pytest: tests}", "of"),
        ("{pytest: tests, of: []}", "of"),
        ("{pytest: tests, of: square, judge: x}", "judge"),
        ("{python: check.py, of: 'a; rm -rf /'}", "not the name of a Python module"),
        ("{run: x, judge: y, port: 70000}", "port"),
        ("{run: x, judge: y, port: 80, keep: [a]}", "remove `keep` or `port`"),
    ],
)
def test_a_short_form_that_is_wrong_is_an_error_that_names_the_problem(
    tmp_path: Path, check: str, problem: str
) -> None:
    (tmp_path / "t.yaml").write_text(f"instruction: x\nverify: [{check}]\n")
    with pytest.raises(RolloutError, match=problem):
        load_task(tmp_path / "t.yaml")


def test_a_short_form_on_a_command_line_is_json() -> None:
    assert parse_check(json.dumps({"pytest": "t.py", "of": "a"})) == pytest_check("t.py", of="a")
    with pytest.raises(RolloutError, match="of"):
        parse_check('{"pytest": "t.py"}')
    with pytest.raises(ValidationError):
        pytest_check("t.py", of="a", typo="x")  # type: ignore[call-arg]


# ---- cases ----


CASES = case_check(
    "python3 square.py",
    (Case(stdin="3", stdout="9"), Case(stdin="-12\n", stdout="144\n"), Case(stdin="x", exit_code=1)),
)
PROGRAM = file("square.py", "print(int(input()) ** 2, ' ')")


def test_a_failed_case_reports_its_expected_and_actual_output(roll: Callable[..., Outcome]) -> None:
    check = case_check("sh a.sh", (Case(stdin="7", stdout="49"), Case(stdout="a\nb\n")))
    check = check.model_copy(update={"name": "prints squares"})
    result = roll(task(check), file("a.sh", "printf 'a\\ncase 1: right'")).verify_results[0]
    assert (result.title, result.exit_code) == ("prints squares", 1)
    verdicts = [(each.stdin, each.expected, each.problem, each.actual) for each in case_verdicts(check, result.stdout)]
    assert verdicts == [
        ("7", "49", "unexpected output", "a\ncase 1: right"),
        ("", "a\nb\n", "unexpected output", "a\ncase 1: right"),
    ]


def test_checks_have_names(tmp_path: Path) -> None:
    assert str(pytest_check("tests/a.py", of="a")) == "pytest tests/a.py"
    assert str(python_check("check.py", of="a")) == "python check.py"
    assert str(case_check("./a", (Case(stdout="1"),))) == "./a: 1 case"
    assert str(Check(run="./a", judge="true")) == "./a => true"
    assert str(expand({"pytest": "a.py", "of": "a", "name": "adds"})) == "adds"


@pytest.mark.slow
def test_cases_are_run_and_compared(roll: Callable[..., Outcome]) -> None:
    solved = roll(task(CASES), PROGRAM)
    assert (solved.reward, solved.trust, solved.verify_results[0].trust) == (1.0, "judged", "judged")
    assert "3 of 3 cases are right" in solved.verify_results[0].stdout
    partly = case_check("sh a.sh", tuple(Case(args=(n,), stdout=n) for n in ("a", "b c", "$d", "'")), partial=True)
    assert roll(task(partly), file("a.sh", '[ "$1" = "\'" ] || echo "$1"')).reward == 0.75
    assert roll(task(CASES)).reward == 0.0


@pytest.mark.parametrize(
    ("compare", "printed", "reward"),
    [
        ("exact", "a b\\n", 1.0),
        ("exact", "a b", 0.0),
        ("lines", "a b  \\n\\n", 1.0),
        ("lines", "a  b", 0.0),
        ("words", "  a\\nb ", 1.0),
        ("words", "ab", 0.0),
    ],
)
@pytest.mark.slow
def test_outputs_are_compared_as_asked(roll: Callable[..., Outcome], compare: Any, printed: str, reward: float) -> None:
    check = case_check("sh a.sh", (Case(stdout="a b\n"),), compare=compare)
    assert roll(task(check), f"echo \"printf '{printed}'\" > a.sh").reward == reward


@pytest.mark.slow
def test_a_compiled_program_is_built_once_and_run_on_every_case(roll: Callable[..., Outcome]) -> None:
    check = case_check(
        "./square",
        (Case(stdin="3", stdout="9"), Case(stdin="5", stdout="25")),
        build="echo built >> log; test $(wc -l < log) = 1; gcc -o square square.c",
    )
    source = '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", n * n); }'
    assert roll(task(check), file("square.c", source)).reward == 1.0
    broken = roll(task(check), file("square.c", "int main("))
    assert (broken.status, broken.reward) == ("ok", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat",
    [
        "import os; os.system('cat .checks/*.out .checks/judge.sh ../*/.checks/*')",
        "import os; os.system('cp .checks/1.in .checks/results/1.stdout')",
        "import os; os.system('for i in 1 2 3; do echo 0 > .checks/results/$i.exit_code; done'); os._exit(0)",
        "import os, signal; os.kill(os.getppid(), 9); os.kill(-1, 9)",
        "import shutil; shutil.rmtree('.checks')",
        "import os; os.rename('.checks/results', 'r'); os.symlink('/etc', '.checks/results')",
        "while True: print('x' * 1000000)",
        "import signal; signal.pause()",
    ],
)
def test_no_program_passes_a_case_without_its_answer(roll: Callable[..., Outcome], cheat: str) -> None:
    quick = case_check("python3 square.py", (Case(stdin="3", stdout="9"),), case_timeout_s=2)
    outcome = roll(task(quick), file("square.py", cheat))
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


# ---- tests that call the agent's modules in another sandbox ----


SQUARE = task(pytest_check("tests/test_square.py", of="square"), verify_files=TESTS)


def test_tests_call_a_module_in_another_sandbox(roll: Callable[..., Outcome]) -> None:
    solved = roll(SQUARE, RIGHT)
    assert (solved.status, solved.reward, solved.trust) == ("ok", 1.0, "judged")
    [result] = solved.verify_results
    assert "4 passed" in result.stdout
    assert result.run is not None
    assert result.run.cmd == "python3 -m openenv_calls serve"


@pytest.mark.slow
def test_tests_fail_as_in_one_process(roll: Callable[..., Outcome]) -> None:
    wrong = roll(SQUARE, "echo 'def square(n): return n + n' > square.py")
    assert wrong.reward == 0.0
    assert "assert 6 == (3 * 3)" in wrong.verify_results[0].stdout
    assert roll(SQUARE).reward == 0.0


CHEATS = {
    "lies about equality": "class Yes(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = None\ndef square(n): return Yes(5)",
    "an object that equals everything": "class Yes:\n    def __eq__(self, other): return True\n"
    "def square(n): return Yes()",
    "patched builtins": "import builtins, sys\nbuiltins.AssertionError = Exception\nsys.exit = lambda *a: None\n"
    "builtins.print = lambda *a: None\ndef square(n): return 0",
    "patched pytest": "import pytest, _pytest.runner\n_pytest.runner.check_interactive_exception = None\n"
    "pytest.raises = lambda *a: open('/dev/null')\ndef square(n): return 0",
    "exit when loaded": "import os\nos._exit(0)",
    "exit when called": "import os\ndef square(n): os._exit(0)",
    "system exit": "def square(n): raise SystemExit(0)",
    "skips": "import unittest\ndef square(n): raise unittest.SkipTest('x')",
    "skip of pytest": "import pytest\ndef square(n): pytest.skip('x')",
    "keyboard interrupt": "def square(n): raise KeyboardInterrupt",
    "stop iteration": "def square(n): raise StopIteration",
    "import error": "raise ImportError('no')",
    "kills all": "import os\ndef square(n): os.kill(-1, 9)",
    "reads the tests": "import glob\nassert not glob.glob('/home/user/**/test_*', recursive=True)\n"
    "def square(n): return 0",
    "writes a reward": "import os, pathlib\nplace = pathlib.Path.home() / 'logs/verifier'\n"
    "place.mkdir(parents=True, exist_ok=True)\n(place / 'reward.txt').write_text('1')\ndef square(n): return 0",
    "deep": "def square(n):\n    value = []\n    for _ in range(100000): value = [value]\n    return value",
    "huge integer": "def square(n): return 1 << 10_000_000",
    "huge text": "def square(n): return 'x' * 50_000_000",
    "memory": "def square(n): return [0] * (1 << 40)",
    "many": "def square(n): return list(range(800_000))",
}
CHEATS["subtracts itself"] = (
    "class Yes:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\ndef square(n): return Yes()"
)
SCRIPT = {"check.py": "from square import square\nassert all(map(lambda n: square(n) == n * n, range(-3, 3)))\n"}


@pytest.mark.parametrize("name", ["lies about equality", "system exit"])
def test_nothing_that_a_module_does_passes_a_script(roll: Callable[..., Outcome], name: str) -> None:
    check = task(python_check("check.py", of="square"), verify_files=SCRIPT)
    outcome = roll(check, file("square.py", CHEATS[name]))
    assert (outcome.status, outcome.reward, outcome.trust) == ("ok", 0.0, "judged")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_nothing_that_a_module_does_passes_a_test(roll: Callable[..., Outcome], name: str) -> None:
    outcome = roll(SQUARE, file("square.py", CHEATS[name]))
    assert (outcome.status, outcome.reward, outcome.trust) == ("ok", 0.0, "judged")


# Speaks to the judge in the place of the module server, which the verifier starts behind it.
SOCKET = """
import os, socket, struct, threading, time
def serve():
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", 7010))
    listener.listen(50)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,)).start()
def answer(connection):
    BODY
serve()
"""
FRAMES = {
    "floods": "while True: connection.sendall(b'\\0\\0\\0\\7{\"a\":1}' * 1000)",
    "floods with one frame": "connection.sendall(b'\\x7f\\xff\\xff\\xff')\n"
    "    while True: connection.sendall(b'x' * 65536)",
    "no json": "connection.sendall(b'\\0\\0\\0\\1x')",
    "deep json": "connection.sendall(struct.pack('>I', 400000) + b'[' * 400000)",
    "never answers": "import signal; signal.pause()",
    "answers a byte at a time": "connection.sendall(struct.pack('>I', 100000))\n"
    "    while True: connection.sendall(b' '); time.sleep(0.2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMES)
def test_nothing_that_the_other_side_sends_is_more_than_a_wrong_answer(roll: Callable[..., Outcome], name: str) -> None:
    shadow = file("openenv_calls.py", SOCKET.replace("BODY", FRAMES[name]))
    check = pytest_check("tests/test_square.py", of="square")
    outcome = roll(task(check, "true", verify_files=TESTS, verify_timeout_s=20 if "answers" in name else 60), shadow)
    assert (outcome.status, outcome.reward) == ("ok", 0.5)
    assert outcome.verify_results[0].exit_code != 0


def test_a_judge_that_the_agents_side_hangs_is_the_agents_failure(roll: Callable[..., Outcome]) -> None:
    # The judge's own client waits without a limit, so the judge is killed; with what the setup left it is not.
    wait = "import socket\nsocket.create_connection(('127.0.0.1', 8000)).recv(1)\n"
    check = Check(run="python3 app.py", judge="python3 wait.py; false", port=8000, files={"wait.py": wait})
    server = "import socket, signal\ns = socket.create_server(('127.0.0.1', 8000))\nkept = s.accept()\nsignal.pause()"
    outcome = roll(task(check, verify_timeout_s=4), file("app.py", server))
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert "did not end" in (outcome.verify_results[0].note or "")


MODULE = '''
import asyncio
LIMIT = {"a": (1, 2.5, None), "b": [float("inf"), b"x", {1, 2}]}
class Stack:
    """A stack."""
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
    def __add__(self, other): return Stack(self.items + other.items)
class Empty(LookupError): pass
def squares():
    n = 0
    while True:
        yield n * n
        n += 1
def echo(*args, **kwargs): return args, kwargs
def fail(): raise Empty("nothing", 3)
def big(): return 1 << 5000
async def later(n):
    await asyncio.sleep(0)
    return n + 1
'''
MODULE_TESTS = """
import asyncio, itertools, math, threading
import pytest
import app, app.tools
from app import LIMIT, Stack, big, echo, fail, later, squares
from openenv_calls import CallFailed

def test_values():
    assert LIMIT == {"a": (1, 2.5, None), "b": [math.inf, b"x", {1, 2}]}
    given = (1, "ä\\ud800", b"\\0", 1.5, -0.0, None, True, [1, (2,)], {3}, frozenset({4}), {(1, 2): {"k": []}}, 2j)
    back = echo(*given, k=1)
    assert back == (given, {"k": 1}) and repr(back[0]) == repr(given)
    assert math.isnan(echo(math.nan)[0][0])
    assert big() == 1 << 5000

def test_objects():
    stack = Stack([1]).push(2)
    assert (stack.pop(), stack.items) == (2, [1])
    stack.items = [5]
    assert stack.items == [5]
    for use in (lambda: stack == stack, lambda: stack + stack, lambda: stack[0], lambda: len(stack)):
        with pytest.raises(CallFailed, match="refused"):
            use()
    with pytest.raises(AttributeError):
        stack.missing

def test_iterators():
    assert list(itertools.islice(squares(), 5)) == [0, 1, 4, 9, 16]

def test_exceptions():
    with pytest.raises(LookupError) as caught:
        fail()
    assert caught.value.args == ("nothing", 3)
    with pytest.raises(CallFailed, match="cannot cross"):
        echo(lambda: 1)

def test_async_and_threads():
    assert asyncio.run(later(1)) == 2
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(echo(n)[0][0])) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(results) == [0, 1, 2, 3]

def test_packages():
    assert app.tools.double(4) == 8
    with pytest.raises(CallFailed):
        app.LIMIT = 3
"""


@pytest.mark.slow
def test_values_objects_and_exceptions_cross_as_in_one_process(roll: Callable[..., Outcome]) -> None:
    check = pytest_check("test_app.py", of="app", path="src", classes="Stack")
    outcome = roll(
        task(check, verify_files={"test_app.py": MODULE_TESTS}),
        "mkdir -p src/app",
        file("src/app/__init__.py", MODULE),
        file("src/app/tools.py", "def double(n): return 2 * n"),
    )
    assert outcome.reward == 1.0, outcome.verify_results[0].stdout


@pytest.mark.slow
def test_scripts_and_the_setups_own_module_of_that_name(roll: Callable[..., Outcome]) -> None:
    checks = (
        python_check("check.py", of="square"),
        python_check("-c 'from square import square; assert square(4) == 16'", of="square"),
        python_check("-m unittest -q unit", of="square"),
    )
    fields = {
        "files": {"square.py": "def square(n): return 0\n"},  # what the agent is to repair; not what is judged
        "verify_files": {
            "check.py": "from square import square\nassert [square(n) for n in (1, 2)] == [1, 4]\n",
            "unit.py": "import unittest\nfrom square import square\nclass T(unittest.TestCase):\n"
            "    def test_it(self): self.assertEqual(square(3), 9)\n",
        },
    }
    assert roll(task(*checks, **fields), RIGHT).reward == 1.0
    assert roll(task(*checks, **fields)).reward == 0.0


# ---- servers ----


SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.path.encode() * 100000
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
ASKS = """
import os, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(n): return urllib.request.urlopen(f"{os.environ['URL']}/{n}").read() == f"/{n}".encode() * 100000
assert all(ThreadPoolExecutor(4).map(ask, range(8)))
"""
HTTP = task(Check(run="python3 app.py", judge="python3 ask.py", port=8080), verify_files={"ask.py": ASKS})


def test_a_server_is_asked_from_another_sandbox(roll: Callable[..., Outcome]) -> None:
    outcome = roll(HTTP, file("app.py", SERVER))
    assert (outcome.status, outcome.reward, outcome.trust) == ("ok", 1.0, "judged"), outcome.verify_results
    idle = roll(HTTP)  # the program ends at once: there is nothing to wait for
    assert (idle.status, idle.reward) == ("ok", 0.0)


def test_servers_and_calls_work_without_isolation_and_are_shared() -> None:
    processes = backend("process", i_know_there_is_no_isolation=True)
    calls = python_check("-c 'from square import square; assert square(4) == 16'", of="square")
    both = HTTP.model_copy(update={"verify": (*HTTP.verify, calls)})
    outcome = run_rollout(both, agent=Shell([file("app.py", SERVER), RIGHT]), sandbox=processes)
    assert (outcome.status, outcome.reward, outcome.trust) == ("ok", 1.0, "shared"), outcome.verify_results
    assert processes.leftovers() == []


@pytest.mark.slow
def test_servers_and_calls_work_in_containers(docker_engines: Any) -> None:
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        docker = backend("docker", image="host", engine="docker", host=host)
        calls = python_check("-c 'from square import square; assert square(4) == 16'", of="square")
        both = HTTP.model_copy(update={"verify": (*HTTP.verify, calls, CASES)})
        right = [
            file("app.py", SERVER),
            RIGHT,
            "echo 'if __name__ == \"__main__\": print(int(input())**2)' >> square.py",
        ]
        outcome = run_rollout(both, agent=Shell(right), sandbox=docker)
        assert (outcome.status, outcome.reward, outcome.trust) == ("ok", 1.0, "judged"), outcome.verify_results
        liar = [file("app.py", "import time; time.sleep(3)"), file("square.py", CHEATS["system exit"])]
        assert run_rollout(both, agent=Shell(liar), sandbox=docker).reward == 0.0
        assert docker.leftovers() == []
