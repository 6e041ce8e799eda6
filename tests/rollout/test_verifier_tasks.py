"""Tasks as authors write them: whatever the verifier does against cheats, the solution earns 1 and doing nothing 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenv.rollout import Task, run_rollout
from openenv.sandboxes.base import Sandboxes, SandboxSpec

PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q"  # without what else is installed, it starts quickly
SQUARE = "def square(n):\n    return n * n\n"
BROKEN = "def square(n):\n    return n\n"
TEST = "from calc import square\n\n\ndef test_square():\n    assert square(7) == 49\n"
FIX = "sed -i 's/return n$/return n * n/' calc/__init__.py"
GIT = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"


def shell(name: str, text: str) -> str:
    return f"mkdir -p $(dirname {name}) && cat > {name} <<'END'\n{text}\nEND"


TASKS: dict[str, dict[str, Any]] = {
    "pytest beside a package": {
        "instruction": "Repair the package.",
        "files": {"calc/__init__.py": BROKEN, "README.md": "x", "tests/conftest.py": "", "tests/__init__.py": ""},
        "verify": [PYTEST, f"{PYTEST} tests/test_calc.py", "cd tests && PYTHONPATH=.. " + PYTEST],
        "verify_files": {"tests/test_calc.py": TEST},
        "solution": FIX,
    },
    "tests that import a new package from the root": {
        "instruction": "Write a package that computes areas.",
        "verify": [f"{PYTEST} tests", "python3 -m unittest discover -s tests -t ."],
        "verify_files": {
            "tests/test_area.py": "import unittest\nfrom shapes.area import area\n\n\nclass Area(unittest.TestCase):\n"
            "    def test_area(self):\n        self.assertEqual(area(2), 4)\n",
            "tests/__init__.py": "",
        },
        "solution": "mkdir shapes; touch shapes/__init__.py; echo 'from .helper import sq as area' > shapes/area.py; "
        "echo 'def sq(n): return n * n' > shapes/helper.py",
    },
    "a folder that the check enters": {
        "instruction": "Write an application in app.",
        "verify": ["cd app && python3 -c 'from main import run; assert run() == 3'", "cd app && python3 main.py"],
        "solution": "mkdir app; echo 'from util import three as run' > app/main.py; "
        "echo 'def three(): return 3' > app/util.py",
    },
    "a Makefile of the setup": {
        "instruction": "Repair the package so that make test passes.",
        "files": {
            "calc/__init__.py": BROKEN,
            "Makefile": "test: build\n\tPYTHONPATH=. python3 checks.py\n\nbuild:\n\tmkdir -p out\n\techo > out/x\n",
            "checks.py": "from calc import square\nassert square(7) == 49\n",
        },
        "verify": ["make test", "make -s test && test -e out/x", "make"],
        "solution": FIX,
    },
    "a Makefile that the agent writes": {
        "instruction": "Write a Makefile with a target hello that prints hello.",
        "verify": ['[ "$(make -s hello)" = hello ]'],
        "solution": "printf 'hello:\\n\\t@echo hello\\n' > Makefile",
    },
    "a script that writes beside itself": {
        "instruction": "Write answer.txt.",
        "verify": ["sh tests/check.sh && test -s tests/out.txt"],
        "verify_files": {"tests/check.sh": "cd tests; cat ../answer.txt > out.txt; grep -qx 42 out.txt\n"},
        "solution": "echo 42 > answer.txt",
    },
    "a virtual environment in the work folder": {
        "instruction": "Repair the package.",
        "files": {"src/calc/__init__.py": BROKEN},
        "setup": [
            'python3 -m venv --without-pip .venv && echo "$PWD/src" > '
            "\"$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/calc.pth\""
        ],
        "verify": [".venv/bin/python -c 'from calc import square; assert square(7) == 49'"],
        "solution": "sed -i 's/return n$/return n * n/' src/calc/__init__.py",
    },
    "an editable package that a finder loads": {  # as setuptools installs one: .venv is before the work folder's own
        "instruction": "Repair the package.",
        "files": {
            "lib/calc/__init__.py": BROKEN,
            "finder.py": "import os, sys\nfrom importlib.util import spec_from_file_location\n\n\nclass Finder:\n"
            "    @classmethod\n    def find_spec(cls, name, path=None, target=None):\n"
            "        file = os.path.expanduser(f'~/workdir/lib/{name}/__init__.py')\n"
            "        return spec_from_file_location(name, file) if name == 'calc' else None\n\n\n"
            "sys.meta_path.append(Finder)\n",
        },
        "setup": [
            "python3 -m venv --without-pip .venv && cd \"$(.venv/bin/python -c 'import site; "
            "print(site.getsitepackages()[0])')\" && mv ~/workdir/finder.py editable_finder.py && "
            "echo 'import editable_finder' > calc.pth"
        ],
        "verify": [".venv/bin/python -c 'from calc import square; assert square(7) == 49'"],
        "solution": "sed -i 's/return n$/return n * n/' lib/calc/__init__.py",
    },
    "a package that setuptools develops": {
        "instruction": "Repair the package.",
        "files": {
            "setup.py": "from setuptools import setup\n"
            "setup(name='calc', packages=['calc'], package_dir={'': 'src'})\n",
            "src/calc/__init__.py": BROKEN,
        },
        "setup": ["python3 -m venv --system-site-packages .venv && .venv/bin/python setup.py -q develop 2> /dev/null"],
        "verify": [
            ".venv/bin/python -c 'from calc import square; assert square(7) == 49'",
            f"{PYTEST.replace('python3', '.venv/bin/python')} tests",
        ],
        "verify_files": {"tests/test_calc.py": TEST},
        "solution": "sed -i 's/return n$/return n * n/' src/calc/__init__.py",
    },
    "a virtual environment in the home": {
        "instruction": "Repair the package.",
        "files": {"src/calc/__init__.py": BROKEN},
        "setup": [
            'python3 -m venv --without-pip ~/.venv && echo "$PWD/src" > '
            "\"$(~/.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')/calc.pth\""
        ],
        "verify": ["~/.venv/bin/python -c 'from calc import square; assert square(7) == 49'"],
        "solution": "sed -i 's/return n$/return n * n/' src/calc/__init__.py",
    },
    "a repository": {
        "instruction": "Write answer.txt and commit it.",
        "setup": [f"{GIT} init -q && echo x > given.txt && git add . && {GIT} commit -q -m first"],
        "verify": [
            "git diff --stat HEAD~1 | grep -q answer.txt",
            "git log --oneline | grep -q 'the answer'",
            'test -e answer.txt && test -z "$(git status --porcelain)"',
        ],
        "solution": f"echo 42 > answer.txt; git add answer.txt; {GIT} commit -q -m 'the answer'",
    },
    "a repository that the agent makes": {
        "instruction": "Make a repository with a remote called origin.",
        "verify": ['[ "$(git remote get-url origin)" = /srv/x.git ]', "git rev-parse HEAD"],
        "solution": f"{GIT} init -q; {GIT} commit -q --allow-empty -m x; git remote add origin /srv/x.git",
    },
    "a package that is also installed": {  # the repository under repair is one that the sandbox's Python has, too
        "instruction": "Repair the package.",
        "files": {"yaml/__init__.py": BROKEN, "json5.py": BROKEN},
        "verify": [f"{PYTEST} tests", "python3 -c 'from yaml import square; assert square(7) == 49'"],
        "verify_files": {"tests/test_it.py": TEST.replace("calc", "yaml")},
        "solution": "sed -i 's/return n$/return n * n/' yaml/__init__.py",
    },
    "a module that is named like one of Python's": {
        "instruction": "Write calendar.py. Its function square(n) returns the square of n.",
        "verify": ["python3 -c 'from calendar import square; assert square(7) == 49'"],
        "solution": shell("calendar.py", SQUARE),
    },
    "a package that is run, and a namespace package": {
        "instruction": "Write the packages.",
        "verify": ['[ "$(python3 -m tool.cli 7)" = 49 ]', "python3 -c 'import spaces.deep.calc'"],
        "solution": f"{shell('tool/calc.py', SQUARE)}\n"
        + shell("tool/cli.py", "import sys\nfrom .calc import square\nprint(square(int(sys.argv[1])))")
        + "\ntouch tool/__init__.py; mkdir -p spaces/deep; cp tool/calc.py spaces/deep/",
    },
    "every import mode of pytest": {
        "instruction": "Repair the package.",
        "files": {"calc/__init__.py": BROKEN},
        "verify": [f"{PYTEST} --import-mode={mode} tests" for mode in ("prepend", "append", "importlib")],
        "verify_files": {"tests/unit/test_calc.py": TEST, "tests/conftest.py": ""},
        "solution": FIX,
    },
    "a server": {
        "instruction": "Write server.py: it answers every GET on port 8123 with 42.",
        "verify": ["python3 server.py & pid=$!; python3 tests/ask.py; code=$?; kill $pid; exit $code"],
        "verify_files": {
            "tests/ask.py": "import time, urllib.request\n\n\ndef ask():\n    for _ in range(100):\n        try:\n"
            "            return urllib.request.urlopen('http://127.0.0.1:8123').read()\n        except OSError:\n"
            "            time.sleep(0.05)\n\n\nassert ask() == b'42'\n"
        },
        "solution": shell(
            "server.py",
            "import http.server\n\n\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n"
            "        self.send_response(200)\n        self.end_headers()\n        self.wfile.write(b'42')\n\n\n"
            "http.server.HTTPServer(('127.0.0.1', 8123), H).serve_forever()",
        ),
    },
    "a program in C": {
        "instruction": "Write vec.c and vec.h with int sum(int *, int).",
        "files": {
            "Makefile": "check: tests/check.c vec.c\n\tgcc -I. -o /tmp/check tests/check.c vec.c\n\t/tmp/check\n"
        },
        "verify": ["gcc -I. -o /tmp/check tests/check.c vec.c && /tmp/check", "make check"],
        "verify_files": {
            "tests/check.c": '#include <assert.h>\n#include "vec.h"\n'
            "int main(void) { int v[] = {1, 2, 3}; assert(sum(v, 3) == 6); return 0; }\n"
        },
        "solution": "echo 'int sum(int *, int);' > vec.h; "
        "echo 'int sum(int *v, int n) { int s = 0; while (n--) s += *v++; return s; }' > vec.c",
    },
    "an npm project": {
        "instruction": "Repair square.js.",
        "files": {
            "package.json": '{"name": "x", "version": "1.0.0", "scripts": {"test": "node --test tests/"}}',
            "square.js": "module.exports = (n) => n;\n",
            "node_modules/left/package.json": '{"name": "left", "version": "1.0.0", "main": "index.js"}',
            "node_modules/left/index.js": "module.exports = 7;\n",
        },
        "verify": ["npm test --silent", "node tests/square.test.js"],
        "verify_files": {
            "tests/square.test.js": "const test = require('node:test');\nconst assert = require('assert');\n"
            "test('square', () => assert.strictEqual(require('../square')(require('left')), 49));\n"
        },
        "solution": "echo 'module.exports = (n) => n * n;' > square.js",
    },
    "a program that hangs until it is repaired": {
        "instruction": "Repair loop.sh, which never ends.",
        "files": {"loop.sh": "while :; do sleep 0.1; done\n"},
        "verify": ['[ "$(sh loop.sh)" = done ]'],
        "verify_timeout_s": 2,
        "solution": "echo 'echo done' > loop.sh",
    },
    "a reward file": {
        "instruction": "Write answer.txt.",
        "verify": ["python3 tests/grade.py", "test -e answer.txt"],
        "verify_files": {
            "tests/grade.py": "import os, pathlib\n"
            "right = os.path.exists('answer.txt') and '42' in pathlib.Path('answer.txt').read_text()\n"
            "pathlib.Path('~/logs/verifier/reward.txt').expanduser().write_text(str(float(right)))\n"
        },
        "solution": "echo 42 > answer.txt",
    },
}
NEEDS = {"npm": "npm", "C": "gcc", "repository": "git", "Makefile": "make"}
QUICK = ("pytest beside a package", "a folder that the check enters", "a Makefile of the setup", "a repository")


@pytest.fixture(scope="module")
def has(local: Sandboxes) -> Callable[[str], bool]:
    """Whether the sandbox has a program."""
    with local.open(SandboxSpec()) as sandbox:
        programs = {name for name in NEEDS.values() if sandbox.exec(["sh", "-c", f"command -v {name}"]).exit_code == 0}
    return programs.__contains__


@pytest.mark.slow_but_for("pytest beside a package", "a folder that the check enters")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]
)
def test_the_solution_earns_1_and_doing_nothing_0(local: Sandboxes, has: Callable[[str], bool], name: str) -> None:
    missing = [program for word, program in NEEDS.items() if word in name and not has(program)]
    if missing:
        pytest.skip(f"the sandbox has no {missing[0]}")
    task = Task.model_validate(TASKS[name])
    solved, idle = (run_rollout(task, agent=agent, sandbox=local) for agent in ("oracle", "noop"))
    assert [
        (result.exit_code, result.note, result.stderr) for result in solved.verify_results if result.exit_code
    ] == []
    assert (solved.status, solved.reward) == ("ok", 1.0)
    assert (idle.status, idle.reward) == ("ok", 0.0)
    notes = [result.note for result in solved.verify_results]
    assert notes == [None] * len(notes)
