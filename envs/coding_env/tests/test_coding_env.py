"""The Coding environment: code in a real sandbox, exercises and their scores, and the package as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coding_env import CodeAction, CodeObservation, CodeState, CodingEnv
from coding_env.server.app import app
from coding_env.server.exercises import SPLITS, Exercise, find_exercise
from coding_env.server.interpreter import InterpreterLimits
from coding_env.server.python_codeact_env import PythonCodeActEnv
from openenv import LocalEnv
from openenv.core.env_server.interfaces import Transform
from openenv.core.rubrics import Rubric
from openenv.errors import ExecutionError, RequestValidationError, SandboxUnavailable
from openenv.sandboxes import Sandbox, Sandboxes, SandboxSpec
from openenv.server.local import SyncLocalEnv
from openenv.testing import Served

pytest_plugins = ["openenv.testing.plugin"]

SOLUTION = "def sum_of_squares(x):\n    return sum(n * n for n in x)"


@pytest.fixture(scope="module")
def shared() -> Iterator[SyncLocalEnv[Any, Any, Any]]:
    """The environment in this process; a step may take one second."""
    with LocalEnv(lambda: PythonCodeActEnv(limits=InterpreterLimits(step_s=1.0)), CodeAction).sync() as local:
        yield local


@pytest.fixture
def env(shared: SyncLocalEnv[Any, Any, Any]) -> SyncLocalEnv[Any, Any, Any]:
    """The environment, in an episode."""
    shared.reset()
    return shared


def run(env: SyncLocalEnv[Any, Any, Any], code: str) -> CodeObservation:
    observation: CodeObservation = env.step(CodeAction(code=code)).observation
    return observation


def test_names_files_and_imports_stay_within_an_episode(env: SyncLocalEnv[Any, Any, Any]) -> None:
    assert run(env, "import math\nx = 3").model_dump(include={"stdout", "stderr", "exit_code"}) == {
        "stdout": "",
        "stderr": "",
        "exit_code": 0,
    }
    run(env, "open('helper.py', 'w').write('def f(n): return n + 1')")
    assert run(env, "import helper\nprint('so', math.floor(helper.f(x)))\nx * 2").stdout == "so 4\n6\n"
    assert env.state().step_count == 3
    env.reset()
    assert env.state().step_count == 0
    assert "NameError" in run(env, "x").stderr
    assert run(env, "import os; os.path.exists('helper.py')").stdout == "False\n"


ENDINGS = [
    ("print('a')\n1 / 0", 1, "a\n", "ZeroDivisionError: division by zero"),
    ("def f(:", 1, "", "SyntaxError"),
    ("import sys; sys.exit(5)", 5, "", ""),
    ("raise SystemExit('bye')", 1, "", "bye"),
    ("import os; os.system('echo out; echo err >&2')", 0, "out\n0\n", "err"),
    ("input()", 1, "", "EOFError"),
    ("", 0, "", ""),
    ("print('é' * 3)", 0, "ééé\n", ""),
]
"""Code, and its exit code, output, and part of its errors."""


def test_the_result_says_how_the_code_ended(env: SyncLocalEnv[Any, Any, Any]) -> None:
    for code, exit_code, stdout, stderr in ENDINGS:
        result = run(env, code)
        assert (result.exit_code, result.stdout) == (exit_code, stdout)
        assert stderr in result.stderr
        assert "worker.py" not in result.stderr
        assert env.state().last_exit_code == exit_code


def test_a_traceback_shows_the_lines_of_the_code(env: SyncLocalEnv[Any, Any, Any]) -> None:
    run(env, "def halve(n):\n    return 1 / n")
    assert 'File "<step 1>", line 2, in halve\n    return 1 / n' in run(env, "halve(0)").stderr


def test_code_that_takes_too_long_is_interrupted_and_names_stay(env: SyncLocalEnv[Any, Any, Any]) -> None:
    run(env, "x = 3")
    result = run(env, "print('begun', flush=True)\nwhile True: pass")
    assert (result.exit_code, result.stdout) == (124, "begun\n")
    assert "longer than 1 s" in result.stderr
    assert run(env, "x").stdout == "3\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import os; print('gone', flush=True); os._exit(3)", 3),
        ("import os, signal; print('gone', flush=True); os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import signal; print('gone', flush=True)\nwhile True: signal.signal(signal.SIGINT, signal.SIG_IGN)", 124),
    ],
)
def test_code_that_ends_the_interpreter_costs_the_names_and_keeps_the_files(
    env: SyncLocalEnv[Any, Any, Any], code: str, exit_code: int
) -> None:
    run(env, "x = 3; open('kept', 'w').close()")
    result = run(env, code)
    assert (result.exit_code, result.stdout) == (exit_code, "gone\n")
    assert "All names are lost" in result.stderr
    assert run(env, "x").exit_code == 1
    assert run(env, "import os; os.listdir()").stdout == "['kept']\n"


@pytest.mark.slow
def test_code_that_speaks_to_the_host_itself_costs_the_interpreter(env: SyncLocalEnv[Any, Any, Any]) -> None:
    run(env, "x = 3")
    run(env, "import os; own = [f'/proc/self/fd/{fd}' for fd in range(3, 9)]")
    run(env, "sockets = [link for link in own if os.path.lexists(link) and 'socket' in os.readlink(link)]")
    result = run(env, "[os.write(int(link[-1]), b'[1]\\n') for link in sockets]")
    assert result.exit_code == 1
    assert "All names are lost" in result.stderr
    assert run(env, "x").exit_code == 1


def test_code_reaches_no_network_and_no_file_of_the_host(env: SyncLocalEnv[Any, Any, Any]) -> None:
    assert "unreachable" in run(env, "import socket; socket.create_connection(('192.0.2.1', 80), 1)").stderr
    assert run(env, f"import os; os.path.exists({__file__!r})").stdout == "False\n"
    own_port = "next(int(word) for word in open('/proc/self/cmdline').read().split('\\0') if word.isdigit())"
    again = run(env, f"import socket; socket.create_connection(('127.0.0.1', {own_port}), 1).recv(1)")
    assert again.stdout in ("", "b''\n")  # the host accepts one connection: the interpreter's own


def test_output_is_bounded(env: SyncLocalEnv[Any, Any, Any]) -> None:
    result = run(env, "print('y' * 10**6)")
    assert len(result.stdout) < 70_000
    assert "934465 more bytes are left out" in result.stdout


def test_a_shorter_limit_can_be_asked_for() -> None:
    env = PythonCodeActEnv()
    env.reset()
    assert env.step(CodeAction(code="while True: pass"), timeout_s=0.2).exit_code == 124
    env.close()


@pytest.mark.parametrize("exercise", [each for split in SPLITS.values() for each in split], ids=lambda e: e.function)
def test_each_exercise_shows_an_example_that_its_solution_gives(exercise: Exercise) -> None:
    arguments = exercise.arguments(random.Random(exercise.function))
    assert f"{exercise.function}({', '.join(map(repr, arguments))})" in exercise.instruction
    assert repr(exercise.solve(*arguments)) in exercise.instruction


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (SOLUTION, 1.0),
        ("def sum_of_squares(x):\n    return 0", 0.1),  # right for empty lists
        pytest.param("def sum_of_squares(x):\n    raise KeyError", 0.0, marks=pytest.mark.slow),
        pytest.param("def other(x): pass", 0.0, marks=pytest.mark.slow),
        pytest.param("syntax error", 0.0, marks=pytest.mark.slow),
        pytest.param("import os, sys; os.write(3, b'[[0]]'); sys.exit(0)", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_submitted_solution_is_scored_by_itself_and_ends_the_episode(
    env: SyncLocalEnv[Any, Any, Any], code: str, reward: float
) -> None:
    begun = env.reset(task_id="sum_of_squares")
    assert "sum_of_squares" in begun.observation.instruction
    assert env.step({"code": SOLUTION}).reward == 0.0  # only tried
    result = env.step({"code": code, "submit": True})
    assert result.reward == result.observation.score == pytest.approx(reward, abs=0.11)
    assert (result.reward == 1.0) is (reward == 1.0)
    assert result.done
    assert result.observation.terminated
    with pytest.raises(ExecutionError, match="call reset first"):
        env.step({"code": "1"})


def test_a_solution_is_compared_by_value_and_type() -> None:
    exercise = find_exercise("is_balanced")
    with LocalEnv(PythonCodeActEnv).sync() as env:
        env.reset(task_id=exercise.function)
        assert env.step({"code": "def is_balanced(text): return 1", "submit": True}).reward == 0.0


def test_rubric_and_transform_of_ones_own_decide_the_reward() -> None:
    class Quiet(Rubric):
        def forward(self, action: CodeAction, observation: CodeObservation) -> float:
            return float(observation.exit_code == 0)

    class Counted(Transform[CodeObservation]):
        def __call__(self, observation: CodeObservation) -> CodeObservation:
            observation.metadata["length"] = len(observation.metadata.get("last_code", ""))
            return observation

    with LocalEnv(lambda: PythonCodeActEnv(Counted(), Quiet()), CodeAction).sync() as env:
        env.reset()
        assert [env.step({"code": code}).reward for code in ("1", "1 / 0")] == [1.0, 0.0]
        assert env.step({"code": "x = 1"}).metadata["length"] == 5


@pytest.mark.parametrize(
    "arguments", [{"task_id": "none"}, {"split": "none"}, {"split": "test", "index": 4}, {"split": "test", "index": -1}]
)
def test_a_task_that_does_not_exist_leaves_the_episode_as_it_was(
    env: SyncLocalEnv[Any, Any, Any], arguments: dict[str, Any]
) -> None:
    run(env, "x = 3")
    with pytest.raises(ExecutionError):
        env.reset(**arguments)
    assert run(env, "x").stdout == "3\n"


def test_an_action_without_code_is_refused(env: SyncLocalEnv[Any, Any, Any]) -> None:
    with pytest.raises(RequestValidationError):
        env.step({"submit": True})


def test_without_a_sandbox_a_reset_says_what_to_install() -> None:
    class Nowhere(Sandboxes):
        name = "nowhere"

        def check(self) -> None:
            raise SandboxUnavailable("bubblewrap is missing: apt-get install bubblewrap")

        def open(self, spec: SandboxSpec | None = None) -> Sandbox:
            raise AssertionError("it was checked before")

    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        PythonCodeActEnv(sandbox=Nowhere()).reset()
    with pytest.raises(ValueError, match="unknown sandbox backend 'elsewhere'"):
        PythonCodeActEnv(sandbox="elsewhere")


def test_the_backend_without_isolation_serves_for_debugging() -> None:
    with (
        LocalEnv(lambda: PythonCodeActEnv(sandbox="process"), CodeAction).sync() as env,
        LocalEnv(lambda: PythonCodeActEnv(sandbox="process"), CodeAction).sync() as other,
    ):
        env.reset()
        other.reset()
        run(env, "x = 3")
        assert run(env, "x").stdout == "3\n"
        assert run(other, "x").exit_code == 1


def test_the_page_shows_code_and_output_and_escapes_them(env: SyncLocalEnv[Any, Any, Any]) -> None:
    world = PythonCodeActEnv()
    fields = run(env, "print('<b>')").model_dump(mode="json")
    picture = world.render_web(fields) or ""
    assert "print(&#x27;&lt;b&gt;&#x27;)" in picture
    assert "exit code 0" in picture
    assert "Python is ready." in (world.render_web({}) or "")
    assert all(CodeAction(**action) for _, action in world.web_actions(fields))


def test_tasks_are_exercises_that_the_splits_do_not_share() -> None:
    world = PythonCodeActEnv()
    train, test = world.list_tasks("train"), world.list_tasks("test")
    assert (len(train), len(test)) == (world.num_tasks("train"), world.num_tasks("test")) == (10, 4)
    assert {task["task_id"] for task in train}.isdisjoint(task["task_id"] for task in test)
    assert world.get_task_range("test", 1, 3) == [world.get_task("test", 1), world.get_task("test", 2)]


def test_the_typed_client_runs_code_on_a_server(serve_env: Callable[..., Served]) -> None:
    with CodingEnv(base_url=serve_env(app).url).sync() as env, env.new_session() as other:
        env.reset(split="train", index=0)
        other.reset()
        env.step(CodeAction(code="x = 3"))
        result = env.step(CodeAction(code="x"))
        assert isinstance(result.observation, CodeObservation)
        assert result.observation.stdout == "3\n"
        assert other.step(CodeAction(code="x")).observation.exit_code == 1
        state = env.state()
        assert isinstance(state, CodeState)
        assert (state.last_exit_code, state.task_id, other.state().last_exit_code) == (0, "sum_of_squares", 1)
        assert env.step(CodeAction(code=SOLUTION, submit=True)).reward == 1.0


@pytest.mark.slow
def test_the_installed_package_is_served_and_played(try_package: Callable[..., list[float]]) -> None:
    pieces = ["x = 1", "x", "import os; os.getcwd()", "1 / 0", "print('a' * 1000)", SOLUTION]

    def choose(observation: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        return {"code": chance.choice(pieces), "submit": chance.random() < 0.3}

    returns = try_package("coding_env", choose, split="train")
    assert len(returns) == 100
    assert set(returns) >= {0.0, 1.0}


EXHAUST = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
for _ in range(1000):
    try:
        if os.fork() == 0:
            signal.pause()
    except OSError:
        break
"""


@pytest.mark.parametrize("ending", ["while True: pass", "os._exit(3)", "pass"])
def test_code_that_uses_up_all_processes_fails_its_step_and_not_the_session(
    env: SyncLocalEnv[Any, Any, Any], ending: str
) -> None:
    result = env.step(CodeAction(code=EXHAUST + ending))
    assert result.reward == 0.0
    assert not result.done
    submitted = env.step(CodeAction(code=f"{EXHAUST}{ending}", submit=True))
    assert (submitted.reward, submitted.done) == (0.0, True)
    env.reset()
    assert run(env, "1 + 1").stdout == "2\n"
