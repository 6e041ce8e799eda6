"""How far checks can be trusted, read without running them: what is not certain is `shared`."""

from __future__ import annotations

from typing import Any

import pytest

from openenv.rollout import Check, Task, Trust, run_rollout
from openenv.rollout.agents import Shell
from openenv.rollout.tasks.trust_levels import reaches, weakest
from openenv.rollout.verify.trust import _DATA_MODULES, only_reads, trust_of
from openenv.sandboxes.base import Sandboxes

FILES = {
    "data.py": "import json, sys\nfrom pathlib import Path\n"
    "assert json.loads(Path('a.json').read_text()) == [1]\nsys.exit(0)\n",
    "square_check.py": "from square import square\nassert square(2) == 4\n",
    "uses_helper.py": "import helper\nhelper.compare('a.txt', 'b.txt')\n",
    "helper.py": "def compare(a, b):\n    assert open(a).read() == open(b).read()\n",
    "uses_bad_helper.py": "import bad_helper\n",
    "bad_helper.py": "import subprocess\nsubprocess.run(['./a.out'])\n",
    "tests/__init__.py": "",
    "tests/tools.py": "from os import path\n",
    "package_check.py": "from tests.tools import path\nfrom tests import tools\n",
    "other_package_check.py": "from tests import added\n",
    "compare.sh": 'for name in one two; do cmp "$name.txt" "expected/$name.txt" || exit 1; done\n',
    "runs.sh": "./a.out | grep -q 42\n",
    "bash.sh": "names=(one two)\n",
    "tests/test_output.py": "import json\n\ndef test_it():\n    assert json.load(open('a.json')) == 1\n",
    "tests/test_imports.py": "import tools\n",
    "tests/test_skips.py": "import pytest\nsquare = pytest.importorskip('square')\n",
    "tests/test_plugins.py": "pytest_plugins = ['plugin']\n",
    "tests/test_square.py": "from square import square\n\ndef test_it():\n    assert square(2) == 4\n",
}


def trust(check: str | Check, **fields: Any) -> Trust:
    task = Task.model_validate({"instruction": "x", "verify": [check], "verify_files": FILES, **fields})
    return trust_of(task.verify[0], task)[0]


ISOLATED = [
    "grep -qx hello greeting.txt",
    "! grep -q TODO src/*.py",
    "test -s out.txt && [ ! -e tmp ]",
    '[ "$(cat answer.txt)" = 42 ]',
    "[ $(wc -l < out.txt) -eq 3 ]",
    "[ $(grep -c x out.txt) -gt 2 ]",
    "diff -r out expected && cmp a b",
    "cat a.txt | sort -u | uniq -c | head -n 1 | grep -q '3 x'",
    "sha256sum out.bin | cut -d' ' -f1 | tr -d '\\n' | wc -c > /dev/null 2>&1",
    "if [ -e a ]; then exit 0; elif [ -e b ]; then exit 1; else false; fi",
    'for f in *.txt; do [ -s "$f" ] || exit 1; done',
    'while read -r line; do echo "$line"; done < a.txt',
    "case $(cat a.txt) in yes|y) true;; *) exit 1;; esac",
    "same() { cmp -s $1 $2; }; same a b",
    "( cd out && ls ) | grep -qx a",
    "find . -name '*.txt' -size +0 | grep -q .",
    "find ./* -newer x",
    "sed -n '1,3p' a.txt | grep x",
    "sed -e 's/a/b/g' -e '/x/d' a.txt",
    "sed --sandbox '/x/,$ s/a/b/' a.txt",
    "awk -F, -v n=3 '$1 == n || $2 > 3 { print $2 }' a.csv",
    "jq -e '.a == 1' a.json",
    "timeout 5 grep x a.txt",
    "command -v gcc",
    "x=$(cat a.txt); printf '%s\\n' \"$x\" | grep -q y",
    "set -eu; N=3; echo $((1 + 2))",
    "python3 data.py",
    "python3 -I data.py with arguments",
    "cd tests && python3 ../data.py",
    "cd out && python3 /home/user/workdir/data.py",
    "cd out && python3 -I -c 'import json'",
    "check() { python3 data.py; }; check; check",
    "python3 /home/user/workdir/data.py && python3 ~/workdir/data.py",
    "python3 uses_helper.py",
    "python3 package_check.py",
    "python3 -c 'import json; assert json.load(open(\"a.json\")) == [1]'",
    "python3 - <<'EOF'\nimport csv\nprint(list(csv.reader(open('a.csv'))))\nEOF",
    "python3 -m json.tool a.json > /dev/null",
    "sh compare.sh && bash -c 'grep x a.txt' && . ./compare.sh",
    "sh -eu compare.sh one",
    "pytest -q tests/test_output.py",
    "python3 -m pytest -x tests/test_output.py::test_it",
    "echo 0.5 > ~/logs/verifier/reward.txt",
    "cat <<EOF | grep x\n$(cat a.txt)\nEOF",
]


@pytest.mark.parametrize("line", ISOLATED)
def test_a_line_that_only_reads_data_is_isolated(line: str) -> None:
    assert trust(line) == "isolated"


MAY_WRITE = ("python", "pytest", "uniq", "awk", "reward.txt")


@pytest.mark.parametrize(
    "line",
    [
        *ISOLATED,
        *(
            "sort -o a.txt b.txt",
            "cat a > b",
            "cat a >> b",
            "cat 3<> a",
            "echo x >| a",
            "sh writes.sh",
            "sh -c 'ls > a'",
        ),
        *("uniq a b", "xxd a b", "awk '{ print > \"b\" }' a", "sed -n 'w b' a", "tee a < b", "touch a", "./a.out"),
    ],
)
def test_a_line_that_leaves_all_as_it_was_is_told_from_one_that_may_not(line: str) -> None:
    task = Task(instruction="x", verify=(line,), verify_files={**FILES, "writes.sh": "cat a > b\n"})
    assert only_reads(line, task) == (line in ISOLATED and not any(word in line for word in MAY_WRITE))


SHARED = [
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
    "python3 -c 'from . import x'",
    "pytest tests/test_skips.py",
    "pytest tests/test_plugins.py",
    "cd - && python3 data.py",
    "python3 -c 'no valid python'",
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
    "true &&",
    "a ) b",
    "cat <<EOF\nno end",
]


@pytest.mark.parametrize("line", SHARED)
def test_a_line_that_may_run_something_of_the_agents_is_shared(line: str) -> None:
    assert trust(line) == "shared"


def test_deep_nesting_is_not_read_and_does_not_crash() -> None:
    assert trust("(" * 500 + "ls" + ")" * 500) == "shared"
    assert trust("echo " + "$(" * 300 + "ls" + ")" * 300) == "shared"
    assert trust("`" * 999) == "shared"
    assert trust("python3 -c '" + "(" * 5000 + "'") == "shared"


def test_pytest_is_shared_where_a_setup_may_have_left_its_configuration() -> None:
    line = "pytest tests/test_output.py"
    assert trust(line) == "isolated"
    assert trust(line, setup=["git clone x ."]) == "shared"
    assert trust(line, files={"conftest.py": "import app"}) == "shared"


JUDGED = [
    Check(run="python3 add.py < 1.in", judge='diff "$OUTPUT/stdout" 1.out'),
    Check(run="./a.out", judge='[ "$(cat "$OUTPUT/stdout")" = 42 ]'),
    Check(run="./a.out", judge='python3 data.py "$OUTPUT/stdout"'),
    Check(run="./a.out", judge="python3 -m pytest -q tests/test_output.py"),
    Check(run="./a.out", judge='cat "$OUTPUT/stdout" | python3 data.py'),
    Check(run="./a.out", judge='sh compare.sh "$OUTPUT/files"', keep=("x",)),
    Check(run="./a.out bad.json", judge='[ "$(cat "$OUTPUT/exit_code")" = 1 ]'),
    Check(run="pytest", judge='[ "$(cat "$OUTPUT/exit_code")" = 0 ] && grep -q 42 "$OUTPUT/stdout"'),
    Check(run="true", judge="node judge.js"),
    Check(run="node app.js", judge='sh -c "curl -sf $URL/health" | grep -qx ok && python3 data.py $URL', port=3000),
    Check(run="node app.js", judge='curl -sf "$URL/health" | grep -qx ok', port=3000),
]


@pytest.mark.parametrize("check", JUDGED, ids=str)
def test_a_check_is_judged(check: Check) -> None:
    assert trust(check) == "judged"


RUNS_OUTPUT = [
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
def test_a_judge_that_runs_what_the_agent_left_is_shared(judge: str) -> None:
    files = {
        "runs_argument.sh": '"$1" | grep x',
        "loads.py": "import os\nexec(open(os.environ['OUTPUT'] + '/stdout').read())",
        "starts.py": "import os, subprocess\nsubprocess.run([os.environ['OUTPUT'] + '/files/a.out'])",
    }
    check = Check(run="./a.out", judge=judge, keep=("x",))
    assert trust(check, verify_files={**FILES, **files}) == "shared"
    assert trust(check.model_copy(update={"files": files})) == "shared"


@pytest.mark.parametrize("run", ["pytest tests", "python3 -m unittest", "make check", "python3 square_check.py"])
def test_the_exit_code_of_tests_beside_the_agents_code_is_the_agents_word(run: str) -> None:
    assert trust(Check(run=run, judge='[ "$(cat "$OUTPUT/exit_code")" = 0 ]')) == "shared"


def test_the_weakest_check_decides() -> None:
    assert weakest(["judged", "isolated"]) == "isolated"
    assert weakest(["judged", "shared", "isolated"]) == "shared"
    assert weakest([]) is None
    assert reaches("judged", "isolated")
    assert reaches("isolated", "isolated")
    assert not reaches("shared", "isolated")
    assert not reaches(None, "shared")


CANARY = "import os\nos.write(2, b'CANARY')\n"


@pytest.mark.slow
def test_lines_that_are_isolated_run_nothing_of_an_agent_that_plants_code_everywhere(local: Sandboxes) -> None:
    names = {"helper", "tools", "pytest", "conftest", "sitecustomize", "usercustomize", "posixpath", "encodings"}
    names |= {module.partition(".")[0] for module in _DATA_MODULES} - {"os", "sys"}
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
        "echo '[1]' > a.json; touch a.txt b.txt one.txt answer.txt out.txt -- -delete -exec",
        "ln -s tests link; ln -s data.py greeting.txt; ln -s . here",
    ]
    agent = Shell(["cat > canary.py <<'END'\n" + CANARY + "END", f"cat > program <<'END'\n{program}END", *plant])
    task = Task(instruction="x", verify=tuple(ISOLATED), verify_files=FILES, verify_timeout_s=60)
    outcome = run_rollout(task, agent=agent, sandbox=local)
    assert outcome.status == "ok"
    assert {result.trust for result in outcome.verify_results} == {"isolated"}
    assert [result.cmd for result in outcome.verify_results if "CANARY" in result.stdout + result.stderr] == []
