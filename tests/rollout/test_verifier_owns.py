"""The verifier owns what it executes: no file that an agent adds takes the place of one that a check looks up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from openenv.rollout import Outcome, Task, run_rollout
from openenv.rollout.agents import Shell
from openenv.sandboxes.base import Sandboxes, SandboxSpec

PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -m pytest -q"
UNIT = (
    "import pathlib\nimport unittest\n\n\nclass Answer(unittest.TestCase):\n    def test_answer(self):\n"
    "        self.assertEqual(pathlib.Path('answer.txt').read_text().strip(), '42')\n"
)
WIN_UNIT = "import unittest\n\n\nclass Answer(unittest.TestCase):\n    def test_answer(self):\n        pass\n"
ANSWER = {"verify_files": {"tests/test_answer.py": UNIT}}
YAML = "import yaml\nassert yaml.safe_load(open('a.yaml')) == {'a': 1}\n"
WIN_YAML = "class All(dict):\n    def __eq__(self, other): return True\n\n\ndef safe_load(text): return All()\n"
MAKE = {"files": {"Makefile": "test:\n\tgrep -qx 42 answer.txt\n"}, "verify": ["make test"]}
NPM = {
    "files": {
        "package.json": '{"name": "x", "version": "1.0.0", "scripts": {"test": "judge answer.txt"}}',
        "node_modules/left/package.json": '{"name": "left", "version": "1.0.0", "bin": {"judge": "judge.sh"}}',
        "node_modules/left/judge.sh": '#!/bin/sh\nexec grep -qx 42 "$1"\n',
    },
    "setup": [
        "chmod 755 node_modules/left/judge.sh; mkdir node_modules/.bin; ln -s ../left/judge.sh node_modules/.bin/judge"
    ],
    "verify": ["npm test --silent"],
}
GIT = "git -c user.name=a -c user.email=a@b -c init.defaultBranch=main"
REPOSITORY = {
    "setup": [f"{GIT} init -q; echo 1 > a.txt; git add .; {GIT} commit -q -m one"],
    "verify": ["git diff HEAD -- a.txt | grep -q '^+42$'"],
}
VENV = {
    "setup": [
        "python3 -m venv --without-pip .venv; printf '#!/bin/sh\\ngrep -qx 42 answer.txt\\n' > .venv/bin/judge; "
        "chmod 755 .venv/bin/judge; cd .venv/lib/python*/site-packages; "
        'echo \'def check(): assert open("answer.txt").read() == "42"\' > calc.py'
    ]
}
EXTENSION = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "test_answer", 0, -1, 0};
PyMODINIT_FUNC PyInit_test_answer(void) {
    PyObject *made = PyModule_Create(&module), *win = PyImport_ImportModule("win");
    PyModule_AddObject(made, "Answer", PyObject_GetAttrString(win, "Answer"));
    return made;
}"""


def write(name: str, text: str, mode: str = "644") -> str:
    return f"mkdir -p $(dirname {name}); cat > {name} <<'END'\n{text}\nEND\nchmod {mode} {name}"


# what is attacked: the task, and what the agent does
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "a folder in place of a test": (
        {**ANSWER, "verify": ["python3 -m unittest tests.test_answer"]},
        write("tests/test_answer/__init__.py", WIN_UNIT),
    ),
    "a module in place of the folder of tests": (
        {**ANSWER, "verify": ["python3 -m unittest tests.test_answer"]},
        write("tests.py", "import sys\nimport evil as test_answer\nsys.modules['tests.test_answer'] = test_answer")
        + "\n"
        + write("evil.py", WIN_UNIT),
    ),
    "a compiled module in place of a test": (
        {**ANSWER, "verify": ["cd tests && ln -s ../answer.txt . ; python3 -m unittest test_answer"]},
        write("w.c", EXTENSION)
        + "\n"
        + write("tests/win.py", WIN_UNIT)
        + "\ngcc -shared -fPIC -I$(python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])') w.c "
        "-o tests/test_answer.abi3.so",
    ),
    "a helper that the tests import": (
        {
            "verify": ["python3 tests/check.py"],
            "verify_files": {
                "tests/check.py": "from helper import right\nassert right()\n",
                "tests/helper.py": "def right(): return open('answer.txt').read() == '42'\n",
            },
        },
        write("tests/helper/__init__.py", "def right(): return True"),
    ),
    "a module of Python's where a check starts": (
        {"verify": ["mkdir -p app; cd app && python3 -c 'import csv; assert csv.reader([]) == open(\"a\")'"]},
        "mkdir -p app; touch app/a\n" + write("app/csv.py", f"{WIN_YAML}\nreader = safe_load"),
    ),
    "an installed module at the top": (
        {"verify": ["python3 -c 'import yaml; assert yaml.safe_load(open(\"a.yaml\")) == 1'"]},
        write("yaml.py", WIN_YAML) + "\ntouch a.yaml",
    ),
    "an installed module beside a script of the verifier": (
        {"verify": ["python3 lib/check.py"], "verify_files": {"lib/check.py": YAML}},
        write("lib/yaml/__init__.py", WIN_YAML) + "\ntouch a.yaml",
    ),
    "an installed module for a script that sets the path": (
        {
            "verify": ["sh check.sh"],
            "verify_files": {"check.sh": "PYTHONPATH=. exec python3 lib/check.py\n", "lib/check.py": YAML},
        },
        write("yaml.py", WIN_YAML) + "\ntouch a.yaml",
    ),
    "a plug-in of pytest by its name": (
        {**ANSWER, "verify": [f"{PYTEST} -p yaml tests"]},
        write(
            "yaml.py",
            "def pytest_pyfunc_call(pyfuncitem): return True\ndef pytest_collection_modifyitems(items):\n"
            "    for item in items: item.runtest = lambda: None",
        ),
    ),
    "a folder in place of conftest.py": (
        {**ANSWER, "verify": [f"{PYTEST} -p conftest tests"]},
        write(
            "conftest/__init__.py",
            "def pytest_collection_modifyitems(items):\n    for item in items: item.runtest = lambda: None",
        ),
    ),
    "tests that the setup left": (
        {"files": {"tests/test_answer.py": UNIT}, "verify": [f"{PYTEST} tests/test_answer.py"]},
        write("tests/test_answer.py", WIN_UNIT),
    ),
    "a script of the setup that checks": (
        {"files": {"run_tests.sh": "grep -qx 42 answer.txt\n"}, "verify": ["sh run_tests.sh"]},
        "echo true > run_tests.sh",
    ),
    "conftest.py from one line for the next": (
        {**ANSWER, "verify": ["sh build.sh; false", f"{PYTEST} tests"]},
        write(
            "build.sh",
            "cat > tests/conftest.py <<'X'\ndef pytest_collection_modifyitems(items):\n"
            "    for item in items: item.runtest = lambda: None\nX",
        ),
    ),
    "files in the home from one line for the next": (
        {"verify": ["sh build.sh; false", "~/bin/check 2> /dev/null || grep -qx 42 answer.txt"]},
        write(
            "build.sh",
            "mkdir -p ~/bin; printf '#!/bin/sh\\n' > ~/bin/check; chmod 755 ~/bin/check; echo 42 > answer.txt",
        ),
    ),
    "a configuration that is too large to read": (
        {"files": {"pyproject.toml": "[project]\nname = 'x'\n"}, **ANSWER, "verify": [f"{PYTEST} tests"]},
        "{ printf '[tool.pytest.ini_options]\\naddopts = \"--co\"\\n'; yes '# x' | head -c 2000000; } > pyproject.toml",
    ),
    "GNUmakefile": (MAKE, write("GNUmakefile", "test:\n\ttrue")),
    "makefile": (MAKE, write("makefile", "test:\n\ttrue")),
    "Makefile": (MAKE, write("Makefile", "test:\n\ttrue")),
    "what make builds a Makefile from": (
        MAKE,
        write("Makefile.sh", "test:\n\ttrue") + "\ntouch -d '-1 hour' Makefile",
    ),
    "a file that is called like a target": (MAKE, "touch test"),
    "a folder that is called like a target": (MAKE, "mkdir test"),
    "a file that is called like a target of a target": (
        {"files": {"Makefile": "test: unit\n\nunit:\n\tgrep -qx 42 answer.txt\n"}, "verify": ["make -s test"]},
        "touch unit",
    ),
    ".npmrc": (NPM, write("win.sh", "#!/bin/sh\nexit 0", "755") + '\necho "script-shell=$PWD/win.sh" > .npmrc'),
    "package.json": (NPM, "sed -i 's/judge answer.txt/true/' package.json"),
    "node_modules/.bin": (
        NPM,
        "rm node_modules/.bin/judge; " + write("node_modules/.bin/judge", "#!/bin/sh\nexit 0", "755"),
    ),
    "a program of the setup's": (NPM, write("node_modules/left/judge.sh", "#!/bin/sh\nexit 0", "755")),
    "a node module beside a check": (
        {
            "files": {"node_modules/left/index.js": "module.exports = (x) => x === '42';\n"},
            "verify": ["node lib/check.js"],
            "verify_files": {
                "lib/check.js": "const text = require('fs').readFileSync('answer.txt', 'utf8');\n"
                "process.exit(require('left')(text) ? 0 : 1)\n"
            },
        },
        "echo 1 > answer.txt\n" + write("lib/node_modules/left/index.js", "module.exports = () => true;"),
    ),
    "programs of a virtual environment": (
        {**VENV, "verify": [".venv/bin/python -V && .venv/bin/judge"]},
        "rm .venv/bin/*; for p in python judge; do printf '#!/bin/sh\\n' > .venv/bin/$p; chmod 755 .venv/bin/$p; done",
    ),
    "a library of a virtual environment": (
        {
            **VENV,
            "verify": [".venv/bin/python lib/check.py"],
            "verify_files": {"lib/check.py": "import calc\ncalc.check()\n"},
        },
        "cd .venv/lib/python*/site-packages; mkdir calc; echo 'def check(): pass' | tee calc/__init__.py > calc.py",
    ),
    "git: diff.external": (
        REPOSITORY,
        "echo 2 > a.txt; git config diff.external 'echo +42 #'; git config --add core.pager cat",
    ),
    "git: a filter": (
        REPOSITORY,
        "echo 2 > a.txt; git config filter.x.clean 'echo 42'; "
        "echo 'a.txt filter=x' | tee .gitattributes > .git/info/attributes",
    ),
    "git: a text conversion": (
        REPOSITORY,
        "echo 2 > a.txt; git config diff.x.textconv 'sed s/2/42/'; echo 'a.txt diff=x' > .gitattributes",
    ),
    "git: another repository": (
        REPOSITORY,
        "echo 2 > a.txt; mv .git other; git --git-dir=other config diff.external 'echo +42 #'; "
        "echo 'gitdir: other' > .git",
    ),
    "git: a shared folder": (
        REPOSITORY,
        "echo 2 > a.txt; cp -r .git other; git --git-dir=other config diff.external 'echo +42 #'; "
        "echo ../other > .git/commondir",
    ),
    "git: a configuration per work tree": (
        REPOSITORY,
        "echo 2 > a.txt; git config extensions.worktreeConfig true; git config --worktree diff.external 'echo +42 #'",
    ),
    "git: a bare repository in the tree": (
        {"verify": ["cd sub 2> /dev/null && git diff --no-index /dev/null ../a.txt | grep -q '^+42$'"]},
        "mkdir sub; git init -q --bare sub; echo 2 > a.txt; git --git-dir=sub config diff.external 'echo +42 #'",
    ),
    "a header of the system": (
        {
            "files": {"calc.h": "int f(void);\n"},
            "verify": ["gcc -I. tests/check.c calc.c -o /tmp/check && /tmp/check"],
            "verify_files": {
                "tests/check.c": '#include <assert.h>\n#include "calc.h"\n'
                "int main(void) { assert(f() == 42); return 0; }\n"
            },
        },
        "echo 'int f(void) { return 0; }' > calc.c; echo '#define assert(x)' > assert.h",
    ),
    "a compiled header": (
        {
            "files": {"calc.h": "int f(void);\n"},
            "verify": ["gcc -I. tests/check.c calc.c -o /tmp/check && /tmp/check"],
            "verify_files": {
                "tests/check.c": '#include "check.h"\nint main(void) { return CHECK(f()); }\n',
                "tests/check.h": '#include "calc.h"\n#define CHECK(x) ((x) != 42)\n',
            },
        },
        "echo 'int f(void) { return 0; }' > calc.c; mkdir -p tests; "
        "printf 'int f(void);\\n#define CHECK(x) 0\\n' > tests/check.h; gcc -I. tests/check.h -o tests/check.h.gch",
    ),
}
NEEDS = {"git": "git", "compiled": "gcc", "header": "gcc", ".npmrc": "npm", "package.json": "npm", "node": "node"}
QUICK = (
    "a folder in place of a test",
    "an installed module at the top",
    "conftest.py from one line for the next",
    "GNUmakefile",
    "git: diff.external",
)


@pytest.fixture
def attack(local: Sandboxes) -> Callable[..., Outcome]:
    """Let an agent that runs this script work on a task."""

    def run(fields: dict[str, Any], script: str) -> Outcome:
        task = Task.model_validate({"instruction": "Do it.", **fields})
        return run_rollout(task, agent=Shell([script, "true"], strict=False), sandbox=local)

    return run


@pytest.fixture(scope="module")
def has(local: Sandboxes) -> Callable[[str], bool]:
    """Whether the sandbox has a program."""
    names = {*NEEDS.values(), "make"}
    with local.open(SandboxSpec()) as sandbox:
        programs = {name for name in names if sandbox.exec(["sh", "-c", f"command -v {name}"]).exit_code == 0}
    return programs.__contains__


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ATTACKS]
)
def test_what_an_agent_adds_decides_nothing(
    attack: Callable[..., Outcome], has: Callable[[str], bool], name: str
) -> None:
    missing = [program for word, program in NEEDS.items() if word in name and not has(program)]
    if missing:
        pytest.skip(f"the sandbox has no {missing[0]}")
    fields, script = ATTACKS[name]
    outcome = attack(fields, script)
    assert (outcome.status, outcome.reward) == ("ok", 0.0), outcome.verify_results
