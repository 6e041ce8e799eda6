"""Proof: a plain check that code of the agent ended is not passed, and an honest one never loses by having to prove."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Check, Outcome, Task, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.verify.verify_lines import Proof, could_not_load, runs_pytest
from openenv.sandboxes.base import Sandbox, Sandboxes, SandboxSpec

TEST = "from solution import f\n\ndef test_one():\n    assert f(1) == 1\n\ndef test_two():\n    assert f(2) == 4\n"
PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q"  # without what else is installed, it starts quickly
LINE = f"{PYTEST} tests/test_f.py"
RIGHT = "def f(n): return n * n"
WRONG = "def f(n): return 1"


@pytest.fixture(scope="module")
def pytest_inside(local: Sandboxes) -> None:
    """Skip where the sandbox's Python has no pytest."""
    with local.open(SandboxSpec()) as sandbox:
        if sandbox.exec("python3 -m pytest --version").exit_code != 0:
            pytest.skip("the sandbox's Python has no pytest")


@pytest.fixture
def earn(local: Sandboxes, pytest_inside: None) -> Callable[..., Outcome]:
    """Let an agent that writes this module work on a task."""

    def run(code: str, *lines: str, more: tuple[str, ...] = (), test: str = TEST, **fields: Any) -> Outcome:
        task = Task(instruction="x", verify=lines or (LINE,), **{"verify_files": {"tests/test_f.py": test}, **fields})
        agent = Shell([f"cat > solution.py <<'EOF'\n{code}\nEOF", *more])
        return run_rollout(task, agent=agent, sandbox=local)

    return run


def test_an_honest_solution_passes_and_a_wrong_one_fails(earn: Callable[..., Outcome]) -> None:
    honest = earn(RIGHT)
    assert (honest.reward, honest.verify_results[0].note, honest.verify_results[0].cmd) == (1.0, None, LINE)
    wrong = earn(WRONG)
    assert (wrong.reward, wrong.verify_results[0].exit_code, wrong.verify_results[0].note) == (0.0, 1, None)
    assert "1 failed, 1 passed" in wrong.verify_results[0].stdout


@pytest.mark.slow_but_for("import os; os._exit(0)-ended from within")
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(0)", "ended from within"),
        ("import os\ndef f(n): os._exit(0)", "ended from within"),
        ("import os; os.execv('/bin/true', ['true'])", "ended from within"),
        (f"import os\nif os.fork(): os._exit(0)\n{RIGHT}", "ended from within"),
        ("import pytest\ndef f(n): pytest.exit('enough', returncode=0)", "no test passed"),
        ("import pytest\ndef f(n):\n    if n > 1: pytest.exit('enough', returncode=0)\n    return n", "only 1 of 2"),
        ("import pytest\ndef f(n):\n    if n > 1: pytest.skip('hard')\n    return n", "skipped by"),
        ("import pytest\ndef f(n):\n    if n > 1: pytest.xfail('hard')\n    return n", "skipped by"),
        ("import unittest\ndef f(n):\n    raise unittest.SkipTest()", "no test passed"),
    ],
)
def test_a_session_that_code_under_test_ended_well_is_not_passed(
    earn: Callable[..., Outcome], code: str, why: str
) -> None:
    outcome = earn(code)
    [result] = outcome.verify_results
    assert (outcome.status, outcome.reward, result.exit_code) == ("ok", 0.0, 1)
    assert why in (result.note or "")
    assert "exited with 0" in (result.note or "")


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        pytest.param("import sys; sys.exit(0)", marks=pytest.mark.slow),
        f"import atexit, os\natexit.register(os._exit, 0)\n{WRONG}",
        f"import os, sys\nsys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)\n{WRONG}",
        "import pytest\npytest.skip('all', allow_module_level=True)",
    ],
)
def test_a_session_that_failed_stays_so_whatever_runs_after_it(earn: Callable[..., Outcome], code: str) -> None:
    outcome = earn(code)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)
    assert outcome.verify_results[0].exit_code != 0


FORMS = (
    "cd tests && PYTHONPATH=.. PYTEST test_f.py",
    "PYTHONPATH=$PWD:$PYTHONPATH PYTEST tests",
    "export PYTHONPATH=; PYTEST tests/test_f.py -p no:cacheprovider -W error",
    "PYTEST tests -k one && PYTEST tests -k two",
    "for t in one two; do PYTEST tests -k $t || exit 1; done",
    "PYTEST --collect-only tests",
    "PYTEST --version && PYTEST --fixtures > /dev/null",
    "! PYTEST tests -k 'neither'",
    "PYTEST tests/other.py || PYTEST tests",
    'python3 -c \'import sys, pytest; sys.exit(pytest.main(["-q", "tests"]))\'',
    "grep -q pytest tests/test_f.py || true",
)


@pytest.mark.slow
def test_honest_lines_pass_in_every_form(earn: Callable[..., Outcome]) -> None:
    lines = [line.replace("PYTEST ", f"{PYTEST} ") for line in FORMS]
    results = earn(RIGHT, *lines).verify_results
    assert [(result.cmd, result.exit_code, result.note) for result in results] == [(line, 0, None) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        'env -i PATH="$PATH" PYTEST tests',
        "env -u PYTHONPATH PYTEST tests",
        'python3 -I -c \'import sys; sys.path[:0] = ["."]; import pytest; sys.exit(pytest.main(["tests"]))\' # pytest',
    ],
)
def test_a_line_that_keeps_the_proof_out_counts_as_it_always_did(earn: Callable[..., Outcome], line: str) -> None:
    line = line.replace("PYTEST ", f"{PYTEST} ")
    assert earn(RIGHT, line).reward == 1.0
    assert earn(WRONG, line).reward == 0.0


def test_tests_may_skip_themselves_and_start_a_pytest_of_their_own(earn: Callable[..., Outcome]) -> None:
    test = (
        "import pytest, subprocess, sys\nfrom helper import too_old\nfrom solution import f\n\n"
        "def test_f():\n    assert f(3) == 9\n\n"
        "def test_here():\n    pytest.skip('not here')\n\n"
        "def test_there():\n    too_old()\n\n"
        "@pytest.mark.xfail\ndef test_later():\n    assert f(3) == 8\n\n"
        "def test_inner(tmp_path):\n"
        "    (tmp_path / 'test_x.py').write_text('def test_x(): assert 0')\n"
        "    assert subprocess.run([sys.executable, '-m', 'pytest', str(tmp_path)]).returncode == 1\n"
    )
    files = {"tests/test_f.py": test, "helper.py": "import pytest\ndef too_old(): pytest.skip('old')\n"}
    outcome = earn(RIGHT, verify_files=files)
    assert (outcome.reward, outcome.verify_results[0].note) == (1.0, None)


def test_a_module_of_the_agent_does_not_take_the_proofs_place(earn: Callable[..., Outcome]) -> None:
    fake = "for d in . tests; do mkdir -p $d; echo 'import os; os._exit(0)' > $d/openenv_proof.py; done"
    outcome = earn(WRONG, more=(fake,))
    assert outcome.reward == 0.0
    assert "openenv_proof.py" in outcome.metadata["protected"]["removed"]
    unguarded = earn(WRONG, more=(fake,), protected=())
    assert (unguarded.status, unguarded.reward) == ("ok", 0.0)


def test_a_reward_that_code_under_test_writes_does_not_count_when_the_line_is_refused(
    earn: Callable[..., Outcome],
) -> None:
    code = "import os; os.system('echo 1.0 > ~/logs/verifier/reward.txt'); os._exit(0)"
    outcome = earn(code, reward_file=True)
    assert (outcome.reward, outcome.metadata["ignored_reward_file"]) == (0.0, True)


# scripts


SCRIPT = (
    "from openenv_proof import begin\n\ndef check():\n    finish = begin()\n"
    "    import sys\n    sys.path.insert(0, '.')\n"
    "    from solution import f\n    assert f(2) == 4\n    finish()\n\ncheck()\n"
)


PLAIN = {
    "checks/plain.py": "import sys\nsys.path.insert(0, '.')\nfrom solution import f\nassert f(2) == 4, sys.argv\n",
    "checks/test_unit.py": (
        "import unittest\nfrom solution import f\n\nclass F(unittest.TestCase):\n"
        "    def test_f(self):\n        self.assertEqual(f(2), 4)\n"
    ),
}
PLAIN_LINES = (
    "python3 checks/plain.py one two",
    "python3 -c 'from solution import f; assert f(2) == 4'",
    "PYTHONPATH=.:checks python3 -m unittest -q test_unit",
)


def test_plain_scripts_prove_their_end_without_being_changed(earn: Callable[..., Outcome]) -> None:
    honest = earn(RIGHT, *PLAIN_LINES, verify_files=PLAIN)
    assert [(result.exit_code, result.note, result.stdout) for result in honest.verify_results] == [(0, None, "")] * 3
    wrong = earn(WRONG, *PLAIN_LINES, verify_files=PLAIN)
    assert [(result.exit_code, result.note) for result in wrong.verify_results] == [(1, None)] * 3
    stderr = wrong.verify_results[0].stderr
    assert stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        '  File "checks/plain.py", line 4, in <module>',
    ]
    assert "['checks/plain.py', 'one', 'two']" in stderr


@pytest.mark.slow_but_for("import os; os._exit(0)", "import sys; sys.exit(0)")
@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def f(n): raise SystemExit",
        "exec('def f(n): raise SystemExit')",
        f"import atexit, os, sys\natexit.register(os._exit, 0)\nsys.excepthook = lambda *a: os._exit(0)\n{WRONG}",
        f"import os\nif os.fork(): os._exit(0)\n{RIGHT}",
    ],
)
def test_plain_scripts_cannot_be_ended_by_what_they_load(earn: Callable[..., Outcome], code: str) -> None:
    outcome = earn(code, *PLAIN_LINES, verify_files=PLAIN)
    assert (outcome.status, outcome.reward) == ("ok", 0.0)


ENDS = (
    ("import sys; sys.exit()", 0),
    ("import sys; sys.exit(0)", 0),
    ("import sys; sys.exit(7)", 7),
    ("import sys; sys.exit('why')", 1),
    ("import os; os._exit(0)", 0),
    ("import os; os._exit(3)", 3),
    ("import argparse; argparse.ArgumentParser().parse_args(['-h'])", 0),
    ("import unittest; unittest.main(argv=['x'])", None),
    ("syntax error", 1),
    (
        "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\nassert __file__ and __name__ == '__main__'",
        0,
    ),
)


@pytest.mark.slow
def test_scripts_end_as_they_always_did(earn: Callable[..., Outcome]) -> None:
    files = {f"script_{number}.py": f"{text}\n" for number, (text, _) in enumerate(ENDS)}
    lines = [f"python3 {name}" for name in files]
    proven = earn(RIGHT, *lines, verify_files=files).verify_results
    plain = earn(RIGHT, *lines, verify_files=files, proof=False).verify_results
    for (text, code), one, other in zip(ENDS, proven, plain, strict=True):
        assert (one.exit_code == 0, one.note) == (other.exit_code == 0, None), text
        assert code is None or one.exit_code == other.exit_code == code, text


@pytest.mark.slow
def test_python_that_is_no_check_is_left_alone_and_may_fail_on_the_way(earn: Callable[..., Outcome]) -> None:
    lines = (
        "if python3 -c 'import nothing_like_that' 2> /dev/null; then false; else true; fi",
        "python3 solution.py && python3 -c 'import sys; assert sys.stdin.read() == \"x\\n\"' <<EOF\nx\nEOF",
        't() { python3 -c "assert $1"; }; t 1 && t 2 && t 3',
        "for n in 1 2 3; do python3 -c 'pass' || exit 1; done",
        "env -i PATH=\"$PATH\" python3 -c 'import solution'",
    )
    outcome = earn(RIGHT, *lines)
    assert [(result.exit_code, result.note) for result in outcome.verify_results] == [(0, None)] * 5


@pytest.mark.slow
def test_proof_can_be_required_of_any_check(earn: Callable[..., Outcome]) -> None:
    fields: dict[str, Any] = {"verify_files": {"tests/check.py": SCRIPT}, "proof": True}
    line = "python3 tests/check.py"
    assert earn(RIGHT, line, **fields).reward == 1.0
    assert earn(WRONG, line, **fields).reward == 0.0
    ended = earn("raise SystemExit(0)", line, **fields)
    assert (ended.reward, ended.verify_results[0].exit_code) == (0.0, 1)
    unasked = earn("import os; os._exit(0)", line, **{**fields, "proof": None})
    assert (unasked.reward, unasked.verify_results[0].exit_code) == (0.0, 1)
    assert earn(RIGHT, line, **{**fields, "proof": None}).reward == 1.0
    silent = earn(RIGHT, "true", **fields)
    assert (silent.reward, silent.verify_results[0].note) == (
        0.0,
        "exited with 0, but nothing in it proved that it came to its end",
    )


def test_proof_can_be_waived(earn: Callable[..., Outcome]) -> None:
    assert earn("import os; os._exit(0)", proof=False).reward == 1.0


@pytest.mark.slow
def test_code_that_looks_for_the_proof_finds_it_and_a_judge_does_not_care(earn: Callable[..., Outcome]) -> None:
    """What proof cannot do, and what can."""
    code = (
        "import gc, os\nfor each in gc.get_objects():\n    if type(each).__name__ == 'Pass': each.end()\nos._exit(0)\n"
    )
    assert earn(code).reward == 1.0
    judged = Check(run="python3 -c 'from solution import f; print(f(7))'", judge='grep -qx 49 "$OUTPUT/stdout"')
    assert earn(code, judged).reward == 0.0
    assert earn(RIGHT, judged).reward == 1.0


# on the host


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("pytest", True),
        ("python3 -m pytest -q", True),
        (".venv/bin/pytest tests", True),
        ("cd x && py.test", True),
        ("uv run pytest; true", True),
        ("python3 check.py", False),
        ("cat pytest.ini", False),
        ("python3 test_pytest.py", False),
        ("pip install pytest", False),
        ("python3 -c 'import pytest'", False),
        ("ls pytest-cov", False),
    ],
)
def test_lines_that_run_pytest_are_known(line: str, is_one: bool) -> None:
    assert runs_pytest(line) is is_one


def laid(
    local: Sandboxes,
    tmp_path: Path,
    line: str,
    then: Callable[[Proof, Sandbox], None],
    files: Mapping[str, str] | None = None,
) -> None:
    with local.open(SandboxSpec()) as sandbox:
        proof = Proof(line, sandbox.home, sandbox.workdir, files or {})
        proof.lay(sandbox, tmp_path / "proof.tar")
        then(proof, sandbox)


def test_each_run_has_secrets_of_its_own_and_forged_proofs_count_for_nothing(local: Sandboxes, tmp_path: Path) -> None:
    def forge(proof: Proof, sandbox: Sandbox) -> None:
        assert proof.read(sandbox).problem == "nothing in it proved that it came to its end"
        assert proof.judge([{"begun": 0}, {"ended": 0, "secret": "guessed", "ok": True}]).problem
        assert proof.judge([{"begun": 99}, {"ended": 99, "secret": "x", "ok": True}]).problem
        assert proof.judge([{"begun": None}, {"ended": None, "secret": None, "ok": True}]).problem
        sandbox.exec(f"mkfifo {proof.folder}/mark-x; ln -s /dev/zero {proof.folder}/mark-y; echo x > mark-z")
        assert not proof.read(sandbox).seen
        for text in ("[" * 50_000, '{"ended": 0, "secret": "\\ud800", "ok": true}', '{"begun": 1e400}'):
            sandbox.write_text(f"{proof.folder}/mark-w", text)
            assert proof.read(sandbox).problem
        secret = sandbox.exec(f"cat {proof.folder}/pass-000").stdout
        assert secret.count("secret") == 1
        secrets.append(secret)

    secrets: list[str] = []
    laid(local, tmp_path, "pytest", forge)
    laid(local, tmp_path, "pytest", forge)
    assert secrets[0] != secrets[1]


def test_the_mark_of_a_beginning_cannot_be_removed_or_spoilt(local: Sandboxes, tmp_path: Path) -> None:
    def spoil(proof: Proof, sandbox: Sandbox) -> None:
        first, second = (
            json.loads(sandbox.exec(f"head -n 1 {proof.folder}/pass-{number:03}").stdout) for number in (0, 1)
        )
        end = {"ended": 0, "secret": first["secret"], "ok": True, "why": None}
        for mark in (f"printf '[' > {proof.folder}/mark-a", "true"):  # without a line break, or removed
            sandbox.exec(f"rm -f {proof.folder}/*")
            sandbox.write_text(f"{proof.folder}/mark-begun-1", json.dumps({"begun": 0}) + "\n")
            sandbox.write_text(f"{proof.folder}/mark-ended-1", json.dumps(end) + "\n")
            sandbox.exec(mark)
            assert proof.read(sandbox).problem == "it was ended from within, before its own end"
            sandbox.write_text(f"{proof.folder}/pass-001", json.dumps(second) + "\n")
            assert proof.read(sandbox).problem is None

    laid(local, tmp_path, "python3 -c 'import pytest' && pytest", spoil)


def test_files_of_a_large_verifier_do_not_hide_the_passes(local: Sandboxes, tmp_path: Path) -> None:
    def look(proof: Proof, sandbox: Sandbox) -> None:
        assert not proof.read(sandbox).seen  # nothing has begun
        assert sandbox.exec(f"ls {proof.folder}").stdout.count("pass-") == 64

    files = {f"tests/{'x' * 60}/{number}.py": "" for number in range(2000)}
    laid(local, tmp_path, "for n in 1 2; do pytest; done", look, files)


def test_a_refusal_to_load_is_distinguished_from_other_failures() -> None:
    assert could_not_load("ImportError: Error importing plugin \"openenv_proof\": No module named 'openenv_proof'")
    assert not could_not_load("1 failed")
