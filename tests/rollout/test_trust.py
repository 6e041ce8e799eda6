"""Trust labels: the safe forms keep theirs, everything else is `shared`."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Check, Task, Trust, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.tasks.task import reaches, weakest
from openenv.rollout.verify import trust as trust_module
from openenv.rollout.verify.cases import only_reads
from openenv.rollout.verify.trust import _MODULES, trust_of
from openenv.sandboxes.base import Sandboxes
from sound_checks import FILES as SOUND_FILES
from sound_checks import JUDGES, LINES, SHORT

FILES = {
    "data.py": "import json, sys\nfrom pathlib import Path\n"
    "assert json.loads(Path('a.json').read_text()) == [1]\nsys.exit(0)\n",
    "square_check.py": "from square import square\nassert square(2) == 4\n",
    "uses_bad_helper.py": "import bad_helper\n",
    "bad_helper.py": "import subprocess\nsubprocess.run(['./a.out'])\n",
    "runs.sh": "./a.out | grep -q 42\n",
    "compare.sh": "cmp one.txt expected.txt\n",
    "tests/__init__.py": "",
    "tests/test_imports.py": "import tools\n",
    "tests/test_skips.py": "import pytest\nsquare = __import__('square')\n",
    "tests/test_square.py": "from square import square\n\ndef test_it():\n    assert square(2) == 4\n",
}
MOST_LOST = 20
"""Of a hundred sound checks, so many may lose their label, because their form is not in the list."""


def trust(check: object, **fields: Any) -> Trust:
    task = Task.model_validate({"instruction": "x", "verify": [check], "verify_files": FILES, **fields})
    return trust_of(task.verify[0], task)[0]


def test_most_sound_checks_keep_a_label_above_shared() -> None:
    checks: list[object] = [*LINES, *JUDGES, *SHORT]
    assert len(checks) == 100
    lost = [check for check in checks if trust(check, verify_files=SOUND_FILES) == "shared"]
    assert len(lost) <= MOST_LOST, lost


def test_lines_are_isolated_and_checks_are_judged() -> None:
    assert {trust(line, verify_files=SOUND_FILES) for line in LINES} == {"isolated", "shared"}
    assert {trust(check, verify_files=SOUND_FILES) for check in [*JUDGES, *SHORT]} == {"judged", "shared"}


def test_a_line_that_leaves_its_sandbox_as_it_was_is_told_from_one_that_may_write() -> None:
    task = Task(instruction="x", verify=("true",), verify_files=SOUND_FILES)
    assert only_reads("sort out.txt | cmp - expected.txt", task)
    for line in (
        "sh compare.sh",
        "python3 score.py",
        "python3 check.py",
        "echo 1 > ~/logs/verifier/reward.txt",
        "./a.out",
        "echo x > a",
    ):
        assert not only_reads(line, task)


SHARED = [
    # forms outside the list: sound or not, they are `shared`
    "if [ -e a ]; then exit 0; fi",
    'for f in *.txt; do [ -s "$f" ] || exit 1; done',
    "case $(cat a.txt) in yes) true;; esac",
    "same() { cmp -s $1 $2; }; same a b",
    "find . -name '*.txt' -size +0",
    "awk -F, '$1 > 3' a.csv",
    "jq -e '.a < 1' a.json",
    "jq -e '.a == $x' a.json",
    "sed -n '1,3w x' a.txt",
    # passes without the agent's file, or for a folder in its place
    "test -s a.py && ! grep -q TODO a.py",
    "grep -rq x a.py && ! grep -q TODO a.py",
    "grep -q x b.py a.py && ! grep -q TODO a.py",
    "cat a.py | sort && ! grep -q TODO a.py",
    "cat a.py | wc -l | grep -qx 0",
    '[ "$(cat a.py | grep -c TODO)" = 0 ]',
    '[ "$(grep -c TODO a.py)" -eq 0 ]',
    '[ "$(wc -l < a.py)" -lt 5 ]',
    '[ "$(cat a.txt)" != bad ]',
    '[ -z "$(cat a.txt)" ]',
    "[ \"$(cat a.txt)\" = '' ]",
    # what a shell takes for no comment, or for more than one command
    "stat -c %s a.#txt | grep -q > z 12",
    "cat a.txt |# x\n wc -l |# y\ngrep -qx 0",
    "grep -q x a.txt\xa0; ./a.out",
    "grep -q x a.txt\r\n./a.out",
    # options in quotes
    "sort '-oa.txt' b.txt",
    'sort "--compress-program=./x" b.txt',
    "curl -o a.txt http://x",
    "uniq a.txt b.txt",
    "grep -q x a.txt '--file=b.txt'",
    "timeout 5 grep x a.txt",
    "cd out && grep x a.txt",
    'grep "$(cat pattern.txt)" a.txt',
    "grep -f pattern.txt a.txt",
    'test "$(cat a.txt)" = "$x"',
    "cat $(cat names.txt)",
    "ls *",
    "[ -f a.txt -o -f b.txt ]",
    "xxd a.txt b.txt",
    "echo x > a.txt",
    "tee a.txt < b.txt",
    # the agent's programs and modules
    "./a.out",
    '[ "$(./a.out)" = 3 ]',
    "cat a.txt | ./filter",
    "sh run.sh",
    "python3 solution.py",
    "python3 square_check.py",
    "python3 -c 'from square import square'",
    "python3 uses_bad_helper.py",
    "python3 other_package_check.py",
    "python3 -c 'import numpy'",
    "sh runs.sh",
    "bin/python3 data.py",
    "$(cat program) x",
    "echo `./a.out`",
    "if ./a.out; then true; fi",
    "true && (./a.out)",
    "cat <<EOF\n$(./a.out)\nEOF",
    "f() { ./a.out; }; f",
    # programs that load what lies around
    "pytest",
    "pytest tests",
    "pytest tests/test_square.py",
    "pytest -p plugin tests/test_output.py",
    "python3 -m unittest",
    "make test",
    "npm test",
    "git diff --exit-code",
    "gcc -o x x.c",
    "node check.js",
    "xargs -a a.txt echo",
    "env grep x a.txt",
    "eval grep x a.txt",
    "exec ./a.out",
    "cat a.txt | sh",
    "sh < a.txt",
    "python3 < a.py",
    "cat a.py | python3 -",
    # options that run or write
    "find . -exec cat {} +",
    "find . -name x -delete",
    "find $(cat a.txt)",
    "find *",
    "sort --compress-program=./x a.txt",
    "sort $(cat a.txt)",
    "sed -i s/a/b/ a.txt",
    "sed 's/a/b/e' a.txt",
    "sed '1e ./a.out' a.txt",
    "sed -f a.sed b.txt",
    'sed "$(cat a.sed)" b.txt',
    'sed -n p "$x"',
    "timeout $x grep y z",
    "[ $(grep -c x *.txt) = 1 ]",
    "jq 'import \"a\" as a; .' a.json",
    "pytest tests/test_imports.py",
    "awk 'BEGIN { system(\"./a.out\") }'",
    "awk '{ print | \"sh\" }' a.txt",
    "awk -f a.awk b.txt",
    "jq -L lib . a.json",
    "jq -f a.jq a.json",
    "python3 -S data.py",
    "python3 -m http.server",
    'python3 -c "$(cat a.py)"',
    "python3 -c 'exec(open(\"a.py\").read())'",
    "python3 -c 'import os; os.system(\"./a.out\")'",
    "python3 -c 'import os.path; os.execv(\"./a.out\", [])'",
    "python3 -c 'import os as o; o.popen(\"x\")'",
    "python3 -c 'from os import system'",
    "python3 -c 'import os; f = os'",
    "python3 -c 'import sys; sys.path.insert(0, \"x\")'",
    'python3 -c \'import pickle; pickle.load(open("a", "rb"))\'',
    "python3 -c 'import json; json.__loader__'",
    "python3 -c 'getattr(1, \"x\")'",
    "python3 -c 'import json, importlib'",
    "python3 -c 'import os as o; o.system(1)'",
    "python3 -c 'import os.path; os.system(1)'",
    'python3 -c \'open("data.py", "w").write(open("a.py").read())\'',
    'python3 -c \'from pathlib import Path; Path("data.py").write_text("x")\'',
    'python3 -c \'from pathlib import Path; Path("data.py").open("w")\'',
    "python3 -c 'from . import x'",
    "pytest tests/test_skips.py",
    "pytest tests/test_plugins.py",
    "cd - && python3 data.py",
    "python3 -c 'no valid python'",
    # modules of modules, private parts, aliases and runners
    "python3 -c 'from pathlib import os; os.system(\"./a.out\")'",
    "python3 -c 'from random import _os; _os.system(\"./a.out\")'",
    "python3 -c 'import pathlib as p; p.os.system(\"./a.out\")'",
    "python3 -c 'import sys as s; s.modules'",
    "python3 -c 'import pytest; pytest.main([\"out\"])'",
    "python3 -c 'import unittest; unittest.TestLoader().discover(\"out\")'",
    'python3 -c \'f = open; f("a.py", "w")\'',
    'python3 -c \'open("a.py", mode="w")\'',
    'python3 -c \'print(*map(open, ["a.py"], ["w"]))\'',
    "python3 -c '__loader__.load_module(\"a\")'",
    'python3 -c \'assert open("a.txt").read() == open("b.txt").read()\'',
    "python3 -c 'import json, sys; sys.exit(json.load(open(\"a.json\")) > 1)'",
    "python3 -c 'import json; assert sum(x > 1 for x in json.load(open(\"a.json\"))) == 0'",
    "python3 -c 'import json; x = json.load(open(\"a.json\")) > 1; assert x == 0'",
    'python3 -c \'import sys; sys.exit(not open("a.txt").read() or int(open("a.txt").read()))\'',
    "python3",
    "python3 -c",
    # variables, and what shells evaluate
    "PATH=.:$PATH grep x a.txt",
    "PYTHONPATH=. python3 data.py",
    "LD_PRELOAD=./x.so cat a.txt",
    "for PATH in .; do ls; done",
    "read PATH < a.txt; ls",
    "[ $(cat a.txt) = 3 ]",
    "[ $x = 3 ]",
    "[ -v x ]",
    "echo $((x + 1))",
    'printf "$(cat a.txt)"',
    "alias ls=./ls",
    "set -- $(cat a.txt)",
    "source ./compare.sh",
    ". compare.sh",
    "trap ./a.out EXIT",
    # files of the verifier's that are written over, or not where they seem to be
    "cat a.py > data.py; python3 data.py",
    "cat a.py >> ./data.py",
    "echo x > $(cat a.txt)",
    "cd out && python3 data.py",
    "cd out && python3 ../data.py",
    "cd out && python3 -c 'import json'",
    "python3 out/../data.py",
    "check() { python3 data.py; }; cd out; check",
    "if [ -e x ]; then f() { ./a.out; }; else f() { true; }; fi; f",
    "cd $(cat a.txt) && python3 data.py",
    "cd out || true; python3 data.py",
    # syntax that is not read
    "[[ -e x ]]",
    "diff <(cat a) b",
    "cat <<< x",
    "bash bash.sh",
    "x=(1 2)",
    "cat a.txt &> /dev/null",
    "echo ${x@P}",
    "echo $'a'",
    "((x++))",
    "echo 'no end",
    "if true; then",
    "a ) b",
    "cat <<EOF\nno end",
]


@pytest.mark.parametrize("line", SHARED)
def test_a_line_outside_the_safe_forms_is_shared(line: str) -> None:
    assert trust(line) == "shared"


def test_deep_nesting_is_not_read_and_does_not_crash() -> None:
    assert trust("(" * 500 + "ls" + ")" * 500) == "shared"
    assert trust("`" * 999) == "shared"
    assert trust("python3 -c '" + "(" * 5000 + "'") == "shared"
    assert trust("python3 -c '" + "x." * 5000 + "y'") == "shared"
    assert trust("sh loop.sh", verify_files={"loop.sh": "sh loop.sh\n"}) == "shared"


def test_pytest_is_shared_if_a_setup_may_have_left_its_configuration() -> None:
    line, files = "pytest tests/test_output.py", {"tests/test_output.py": SOUND_FILES["tests/test_output.py"]}
    assert trust(line, verify_files=files) == "isolated"
    assert trust(line, verify_files=files, setup=["git clone x ."]) == "shared"
    assert trust(line, verify_files=files, files={"conftest.py": "import app"}) == "shared"
    assert trust(line, verify_files={**files, "conftest.py": "import app"}) == "shared"


RUNS_OUTPUT = [
    # evaluate, load, import or copy the agent's data
    "python3 -c 'from sympy import sympify; assert sympify(open(\"x\").read()) == 4'",
    "python3 -c 'import pandas; pandas.read_pickle(\"x\")'",
    "python3 -c 'import numpy; numpy.load(\"x\", allow_pickle=True)'",
    "python3 -c 'import yaml; yaml.load(open(\"x\"), yaml.Loader)'",
    'python3 -c \'import ast; compile(open("x").read(), "x", "exec")\'',
    'python3 -c \'import shutil; shutil.copy("x", "y")\'',
    'python3 -c \'import sqlite3; sqlite3.connect("x").executescript(open("y").read())\'',
    'awk -f "$OUTPUT/files/check.awk" expected.txt',
    'awk "$(cat "$OUTPUT/stdout")"',
    'x=$(cat "$OUTPUT/stdout"); [ $((x)) -eq 4 ]',
    '[ $(cat "$OUTPUT/stdout") -eq 4 ]',
    'sqlite3 db < "$OUTPUT/files/query.sql"',
    'sed -f "$OUTPUT/files/x.sed" expected.txt',
    'jq -f "$OUTPUT/files/x.jq" data.json',
    'bc < "$OUTPUT/stdout"',
    'xargs -a "$OUTPUT/stdout" echo',
    'grep -f "$OUTPUT/files/patterns" expected.txt',
    'grep -q "$(cat "$OUTPUT/stdout")" expected.txt',
    'unzip "$OUTPUT/files/a.zip"',
    'tee data.py < "$OUTPUT/stdout"',
    'cat "$OUTPUT/stdout" > data.py; python3 data.py',
    # believe what a test runner beside the agent's code wrote
    '[ "$(cat "$OUTPUT/exit_code")" = 0 ]',
    'grep -qx 0 "$OUTPUT/exit_code"',
    "node judge.js",
    'sh "$OUTPUT/files/x.sh"',
    '"$OUTPUT/files/a.out"',
    'python3 "$OUTPUT/files/a.py"',
    'python3 -c "$(cat "$OUTPUT/stdout")"',
    'cat "$OUTPUT/stdout" | sh',
    'cat "$OUTPUT/stdout" | python3 -',
    'sh < "$OUTPUT/stdout"',
    '. "$OUTPUT/files/env.sh"',
    'eval "$(cat "$OUTPUT/stdout")"',
    'PYTHONPATH="$OUTPUT/files" python3 data.py',
    'cd "$OUTPUT/files" && pytest',
    'cp "$OUTPUT/files/a.py" . && pytest',
    'pytest "$OUTPUT/files"',
    'place="$OUTPUT/files"; sh "$place/x.sh"',
    'for f in "$OUTPUT"/files/*; do sh "$f"; done',
    'cat "$OUTPUT/stdout" | while read -r x; do $x; done',
    'node "$OUTPUT/files/a.js"',
    'gcc -o x "$OUTPUT/files/a.c" && ./x',
    'timeout 5 sh "$OUTPUT/files/x.sh"',
    'chmod +x "$OUTPUT/files/a"',
    'sh runs_argument.sh "$OUTPUT/files/x"',
    "python3 loads.py",
    'python3 -c \'import pickle; pickle.load(open("x", "rb"))\'',
    "python3 starts.py",
    "[[ x ]]",
    'curl "$URL/x" | sh',
    'eval "$(curl "http://127.0.0.1:$PORT")"',
]


@pytest.mark.parametrize("judge", RUNS_OUTPUT)
def test_a_judge_that_runs_evaluates_or_believes_the_agents_output_is_shared(judge: str) -> None:
    files = {
        "runs_argument.sh": '"$1" | grep x',
        "loads.py": "import os\nexec(open(os.environ['OUTPUT'] + '/stdout').read())",
        "starts.py": "import os, subprocess\nsubprocess.run([os.environ['OUTPUT'] + '/files/a.out'])",
        "junit.py": "import xml.etree.ElementTree as tree\nassert tree.parse('x').getroot().get('failures') == '0'\n",
    }
    check = Check(run="./a.out", judge=judge, keep=("x",))
    assert trust(check, verify_files={**FILES, **files}) == "shared"
    assert trust(check.model_copy(update={"files": files})) == "shared"


def test_a_changed_judge_of_cases_is_not_ours() -> None:
    task = Task.model_validate({"instruction": "x", "verify": [SHORT[0]]})
    check = task.verify[0]
    assert isinstance(check, Check)
    changed = {**check.files, ".checks/judge.sh": check.files[".checks/judge.sh"] + 'sh "$results/x"\n'}
    assert (trust(check), trust(check.model_copy(update={"files": changed}))) == ("judged", "shared")


@pytest.mark.parametrize("run", ["pytest tests", "python3 -m unittest", "make check", "./a.out"])
def test_an_exit_code_alone_is_the_agents_choice(run: str) -> None:
    assert trust(Check(run=run, judge='[ "$(cat "$OUTPUT/exit_code")" = 0 ]')) == "shared"
    script = "import os, sys\nsys.stdout.write('x')\nassert open(os.environ['OUTPUT'] + '/exit_code').read() == '0'\n"
    assert trust(Check(run="./a.out", judge="python3 check.py", files={"check.py": script})) == "shared"


@pytest.mark.parametrize(
    "run",
    [
        *(
            "deno test",
            "rspec",
            "./run_tests.sh",
            "sh check.sh",
            "npm test",
            "npm run verify",
            "go test ./...",
            "bats x",
        ),
        *("prove", "mix test", "make -s test > out.xml", "python3 -m nose2", "python3 -m pytest --junitxml=out.xml"),
        *("./a.out&&echo passed", "./a.out;echo passed", "./a.out|tee b", "./$(cat a)", "./a.out & echo passed"),
        *("./a.out && echo passed", "./a.out || echo failed", "if ./a.out; then echo passed; fi", "./a.out; echo $?"),
        *("[ -e a.txt ] && cat b.txt", "cmp a.txt b.txt && cat c.txt", "./a.out | grep -q 3 && cat c.txt", "sh -c 'x'"),
        *("node -e 'console.log(1)'", 'python3 -c "import a; print(1)"', "python3 -c 'import a; print(\"passed\")'"),
        *("python3 asserts.py", "python3 prints.py", "python3 -u tries.py", "node drive.js", "sh drive.sh", "./drive"),
    ],
)
def test_a_verdict_of_run_is_not_believed(run: str) -> None:
    files = {
        "asserts.py": "from app import f\nassert f(2) == 4\n",
        "prints.py": "from app import f\nf(2)\nprint('OK')\n",
        "tries.py": "try:\n    import app\nexcept ImportError as e:\n    print(e)\n",
        "drive.js": "console.log(require('./app')(2) === 4)",
        "drive.sh": "./a.out\n./b.out || echo failed\n",
        "drive": "#!/bin/sh\n./a.out && echo passed\n",
    }
    check = Check(run=run, judge='grep -q passed "$OUTPUT/stdout"', keep=("out.xml",))
    assert trust(check, verify_files=files) == "shared"


@pytest.mark.parametrize(
    "run",
    [
        *(
            "./a.out",
            "./a.out < in.txt > out.txt",
            "echo 3 | ./a.out",
            "printf '3\\n' | python3 app.py",
            "cat in.txt | ./a",
        ),
        *("gcc -O2 -o a a.c && ./a 3", "make -s && ./a", "cd out && node app.js", "npm run build && node dist/app.js"),
        *("python3 -c 'from app import f; print(f(3))'", "java Main", "cargo run", "git log", "true"),
        *("python3 drive.py", "sh drive.sh", 'python3 app.py "$PORT"', "./a.out 2>&1", "mkdir -p x; ./a.out || true"),
    ],
)
def test_a_run_that_only_prints_the_agents_results_is_judged(run: str) -> None:
    files = {
        "drive.py": "import app\nfor n in range(3):\n    print(app.f(n))\n",
        "drive.sh": "# two programs\n./a.out < in.txt\n\n./b.out\n",
        "in.txt": "3\n",
    }
    check = Check(run=run, judge='grep -qx 9 "$OUTPUT/stdout"')
    assert trust(check, verify_files=files) == "judged"


def test_cases_and_adapters_do_not_hide_a_verdict_either() -> None:
    case = [{"stdin": "1", "stdout": "PASS"}]
    assert trust({"run": "./a.out", "cases": case}) == "judged"
    assert trust({"run": "./run_tests.sh", "cases": case}) == "shared"
    assert trust({"run": "./a.out && echo PASS", "cases": case}) == "shared"
    assert trust({"run": "./a.out", "build": "make test", "cases": case}) == "shared"
    test = {"test_it.py": "from adapter import right\n\ndef test_it():\n    assert right()\n"}
    adapted = {"pytest": "test_it.py", "of": "adapter", "needs": "adapter.py"}
    for adapter, label in (("def right(): return f(2) == 4", "shared"), ("def right(): return f(2)", "judged")):
        files = {**test, "adapter.py": f"from app import f\n{adapter}\n"}
        assert trust(adapted, verify_files=files) == label


def passed_on(run: str) -> Check:
    return Check(run=run, judge='grep -q passed "$OUTPUT/stdout"')


NOTHING, ANYTHING = re.compile("(?!)"), re.compile("(?s).*")


@pytest.mark.parametrize(
    ("guard", "off", "check"),
    [
        ("_TEST_NAME", NOTHING, passed_on("./run_tests.sh")),
        ("_RUN", ANYTHING, passed_on("./a.out && echo passed")),
        ("_DATA_FILE", ANYTHING, passed_on("node drive.js")),
        ("_DECISIONS", (), passed_on("python3 asserts.py")),
        ("_PARTED", NOTHING, "python3 -c 'import os; os.system(\"./a.out\")'"),
        ("_OTHER_MODULES", (), "python3 -c 'import pathlib; pathlib.os.abort()'"),
        ("_REFUSED", NOTHING, "python3 -c 'import json; json.__loader__'"),
        ("_BUILTINS", {"eval"}, "python3 -c 'eval(1)'"),
        ("_EXIT", NOTHING, "python3 -c 'import sys; sys.exit(len(sys.argv))'"),
        ("_NAN", NOTHING, "python3 -c 'x = float(open(\"a.txt\").read()); assert not x > 1'"),
        ("_NAN_PASSES", NOTHING, "python3 -c 'x = float(open(\"a.txt\").read()); assert not x > 1'"),
        ("_PROOF", re.compile("test"), "test -s a.py && cat a.py > /dev/null && ! grep -q TODO a.py"),
    ],
)
def test_each_rule_is_necessary(monkeypatch: pytest.MonkeyPatch, guard: str, off: Any, check: Check | str) -> None:
    files = {
        "asserts.py": "from app import f\nassert f(2) == 4\n",
        "drive.js": "console.log(require('./app')(2) === 4)",
    }
    before = trust(check, verify_files=files)
    monkeypatch.setattr(trust_module, guard, off)
    assert (before == "shared", trust(check, verify_files=files) == "shared") in ((True, False), (False, True))


def test_the_weakest_check_decides() -> None:
    assert weakest(["judged", "isolated"]) == "isolated"
    assert weakest(["judged", "shared", "isolated"]) == "shared"
    assert weakest([]) is None
    assert reaches("judged", "isolated")
    assert reaches("isolated", "isolated")
    assert not reaches("shared", "isolated")
    assert not reaches(None, "shared")


INSERTED = (
    *(
        ";./x",
        "$(./x)",
        "`./x`",
        "|./x",
        "&./x",
        "\n./x",
        " > z",
        ">a.txt",
        "<(./x)",
        "'$(./x)'",
        '"$(./x)"',
        "\\",
        "'",
    ),
    *(
        '"',
        "#",
        "\n",
        "(",
        ")",
        "*",
        "~",
        " ! ",
        " -o z",
        " --compress-program=./x",
        "$'\\n./x'",
        "\r",
        "PATH=. ",
        "&>z",
    ),
    *(" #", "\xa0", "\u2028", ">|z", "<>z", "2>&1", "<<< x", "${x}", " -exec ./x ;", "[", "]", "{", "}", "\t", "\v"),
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_line_with_something_inserted_is_shared_or_runs_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("a.txt", "b.txt", "out.txt", "answer.txt", "src/main.py"):
        (tmp_path / name).write_text("x\n42\n")
    for name in ("x", "grep", "cat"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch canary\n")
        (tmp_path / name).chmod(0o755)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    chance, isolated = random.Random(7), 0
    plain = [line for line in LINES if not re.search(r"\bsh |python", line)]
    for _ in range(1500):
        line = chance.choice(plain)
        for _ in range(chance.choice((1, 1, 2))):
            at = chance.randrange(len(line) + 1)
            line = line[:at] + chance.choice(INSERTED) + line[at + (chance.random() < 0.2) :]
        if line.lstrip().startswith("#") or trust(line) == "shared":
            continue
        isolated += 1
        subprocess.run(["bash", "-c", line], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, line
    assert isolated > 20


CANARY = "import os\nos.write(2, b'CANARY')\n"


@pytest.mark.slow
def test_isolated_lines_run_nothing_of_an_agent_that_plants_code_everywhere(local: Sandboxes) -> None:
    names = {"helper", "tools", "pytest", "conftest", "sitecustomize", "usercustomize", "posixpath", "encodings"}
    names |= {module.partition(".")[0] for module in _MODULES} - {"os", "sys"}
    program = "#!/bin/sh\necho CANARY >&2\n"
    plant = [
        "mkdir -p out expected tests/__pycache__ bin",
        *(
            f"for d in . out tests expected; do [ -e $d/{name}.py ] || cp canary.py $d/{name}.py; done"
            for name in names
        ),
        "for d in helper json out/json tests/json tests/tests xml; do mkdir -p $d; cp canary.py $d/__init__.py; done",
        "for p in a.out grep cat python3 sh sort jq; do for d in . out bin; do cp program $d/$p; done; done",
        "chmod -R 755 .; printf '[pytest]\\naddopts = -p canary\\n' | tee pytest.ini out/pytest.ini > tests/pytest.ini",
        "echo '[1]' > out.json; touch a.txt b.txt one.txt answer.txt out.txt -- -delete -exec",
        "ln -s tests link; ln -s data.py greeting.txt; ln -s . here",
    ]
    agent = Shell(["cat > canary.py <<'END'\n" + CANARY + "END", f"cat > program <<'END'\n{program}END", *plant])
    lines = tuple(line for line in LINES if trust(line, verify_files=SOUND_FILES) == "isolated")
    task = Task(instruction="x", verify=lines, verify_files=SOUND_FILES, verify_timeout_s=60)
    outcome = run_rollout(task, agent=agent, sandbox=local)
    assert outcome.status == "ok"
    assert {result.trust for result in outcome.verify_results} == {"isolated"}
    assert [result.cmd for result in outcome.verify_results if "CANARY" in result.stdout + result.stderr] == []


class Finalized:
    """Garbage in a cycle, whose finalizer lets other threads run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        os.sched_yield()


def test_several_threads_read_checks_at_once() -> None:
    line = f"python3 -c '{'assert [a for a in (1, 2) if a and not (a > 3 or {1: 2})]; ' * 40}'"
    task, start = Task(instruction="Work.", verify=(line,)), threading.Barrier(4)

    def read(depth: int) -> list[Trust]:
        if depth:
            return read(depth - 1)
        start.wait(30)
        labels = []
        for _ in range(12):
            garbage = [Finalized() for _ in range(60)]
            labels.append(trust_of(line, task)[0])
            del garbage
        return labels

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as pool:
            labels = [label for result in pool.map(read, (0, 5, 10, 15)) for label in result]
    finally:
        gc.set_threshold(*thresholds)
    assert len(set(labels)) == 1
