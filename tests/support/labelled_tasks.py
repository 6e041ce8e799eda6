"""Two hundred labelled tasks, each with an attack on its check: forms of checks times attacks that know no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from openenv.rollout import Task
from openenv.testing import Cheat

Target = Literal["file", "json", "program", "module", "server"]


@dataclass(frozen=True)
class Form:
    """A check in a safe form.

    Args:
        target: The kind of the file that the agent writes; it decides which attacks fit.
        check: A line, or a check as in a task file.
        solution: Shell lines that earn 1.
        files: The verifier's files.
    """

    name: str
    target: Target
    check: str | Mapping[str, Any]
    solution: str
    files: Mapping[str, str]

    def task(self) -> Task:
        """Return the form as a task."""
        return Task.model_validate(
            {
                "task_id": f"label-{self.name}",
                "instruction": "Do it.",
                "verify": [self.check],
                "verify_files": self.files,
                "solution": self.solution,
                "limits": {"memory_mb": 256, "pids": 64, "cpus": 1.0, "disk_mb": 128},
                "agent_timeout_s": 20.0,
                "verify_timeout_s": 30.0,
            }
        )


_WANT = {"tests/want.txt": "abc\ndef\nxyz\n"}
_RIGHT = "printf 'abc\\ndef\\nxyz\\n' > out.txt"


def _lines() -> list[Form]:
    """Return lines over `out.txt`, whose right content is the three lines of `tests/want.txt`."""
    checks = {
        "grep-line": "grep -qx def out.txt",
        "grep-fixed": "grep -Fxq def out.txt",
        "grep-words": "grep -qw def out.txt && grep -qw abc out.txt",
        "grep-count": "grep -c '^[a-z]*$' out.txt | grep -qx 3",
        "grep-not-after": "grep -qx abc out.txt && ! grep -q TODO out.txt",
        "grep-glob": "grep -qx def ./*.txt",
        "test-equal": "[ \"$(cat out.txt)\" = 'abc\ndef\nxyz' ]",
        "test-first": '[ "$(head -n 1 out.txt)" = abc ]',
        "test-last": '[ "$(tail -n 1 out.txt)" = xyz ]',
        "test-lines": '[ "$(wc -l < out.txt)" -eq 3 ] && grep -qx xyz out.txt',
        "test-bare-number": "[ $(wc -l < out.txt) -eq 3 ] && grep -qx xyz out.txt",
        "test-count": "[ $(grep -c '[def]' out.txt) -ge 1 ] && grep -qx xyz out.txt",
        "test-sorted": '[ "$(sort -u out.txt | head -n 1)" = abc ]',
        "test-hash": '[ "$(sha256sum out.txt | cut -c1-8)" = c2611b04 ]',
        "test-two": '[ "$(cat out.txt)" = "$(cat tests/want.txt)" ]',
        "test-cut": '[ "$(cut -c2-3 out.txt | head -n 1)" = bc ]',
        "cmp": "cmp out.txt tests/want.txt",
        "cmp-silent": "cmp -s tests/want.txt out.txt",
        "diff": "diff out.txt tests/want.txt",
        "diff-quiet": "diff -q tests/want.txt out.txt > /dev/null",
        "diff-blanks": "diff -wB out.txt tests/want.txt",
        "sort-cmp": "sort out.txt | cmp - tests/want.txt",
        "sort-diff": "sort -u out.txt | diff -q - tests/want.txt",
        "cat-grep": "cat out.txt | tail -n 2 | grep -qx def",
        "tr-grep": "tr a-z A-Z < out.txt | grep -qx DEF",
        "rev-grep": "rev out.txt | grep -qx zyx",
        "printf-diff": "printf 'abc\\ndef\\nxyz\\n' | diff - out.txt",
        "echo-cmp": "head -n 1 out.txt > /dev/null; echo abc | cmp - out.txt || cmp out.txt tests/want.txt",
        "comm": "comm -12 out.txt tests/want.txt | wc -l | grep -qx 3",
        "paste": "paste -s out.txt | grep -q 'abc.def'",
        "stat": "stat -c %s out.txt | grep -qx 12 && grep -q abc out.txt",
        "ls": "ls | grep -qx out.txt && grep -qx xyz out.txt",
        "several": "test -s out.txt\ngrep -qx abc out.txt && grep -qx xyz out.txt",
        "script": "sh tests/compare.sh",
        "reward": "sh tests/pay.sh",
    }
    files = {
        **_WANT,
        "tests/compare.sh": "# the whole file\ncmp -s out.txt tests/want.txt && grep -qx def out.txt\n",
        "tests/pay.sh": "cmp -s out.txt tests/want.txt && echo 1 > ~/logs/verifier/reward.txt\n",
    }
    return [Form(name, "file", check, _RIGHT, files) for name, check in checks.items()]


_JSON = """printf '{"total": 12.5, "rows": [1, 2.5, 9], "names": {"a": "x"}}' > out.json"""


def _scripts() -> list[Form]:
    """Return scripts over `out.json` or `out.txt`, which must be values of the agent's own."""
    read = "import json\nimport math\nimport sys\nfrom pathlib import Path\n"
    read += "data = json.loads(Path('out.json').read_text())\n"
    checks = {
        "json-equal": read + "assert data == {'total': 12.5, 'rows': [1, 2.5, 9], 'names': {'a': 'x'}}\n",
        "json-near": read + "assert abs(data['total'] - 12.5) < 1e-6\n",
        "json-between": read + "assert 12.4 < data['total'] <= 12.6 and data['rows'][2] == 9\n",
        "json-finite": read + "total = data['total']\n"
        "if not math.isfinite(total) or abs(total - 12.5) > 1e-6:\n    sys.exit(1)\n",
        "json-rows": read + "assert len(data['rows']) == 3\n"
        "assert all(abs(a - b) < 1e-6 for a, b in zip(data['rows'], [1, 2.5, 9]))\n",
        "json-map": read + "assert all(map(math.isclose, data['rows'], [1, 2.5, 9])) and len(data['rows']) == 3\n",
        "json-types": read + "assert type(data['total']) is float and data['total'] == 12.5\n",
        "json-close": read + "assert math.isclose(data['total'], 12.5)\n",
        "json-exit": read + "sys.exit(0 if data['names'] == {'a': 'x'} else 1)\n",
        "json-not": read + "sys.exit(not (data['rows'] == [1, 2.5, 9]))\n",
        "json-main": read
        + "def main():\n    return data['rows'] == [1, 2.5, 9]\n\nsys.exit(0 if main() else 'the rows are wrong')\n",
        "json-reward": read + "import os\nright = sum(a == b for a, b in zip(data['rows'], [1, 2.5, 9]))\n"
        "with open(os.path.expanduser('~/logs/verifier/reward.txt'), 'w') as file:\n    file.write(str(right / 3))\n",
    }
    forms = [
        Form(name, "json", "python3 tests/check.py", _JSON, {"tests/check.py": text}) for name, text in checks.items()
    ]
    lines = {
        "py-lines": "assert open('out.txt').read().split() == ['abc', 'def', 'xyz']\n",
        "py-csv": "import csv\nrows = list(csv.reader(open('out.txt')))\nassert rows == [['abc'], ['def'], ['xyz']]\n",
        "py-bytes": "from pathlib import Path\nassert Path('out.txt').read_bytes() == Path('tests/want.txt')."
        "read_bytes()\n",
        "py-hash": "import hashlib\nfrom pathlib import Path\n"
        "assert hashlib.sha1(Path('out.txt').read_bytes()).hexdigest().startswith('70d7')\n",
        "py-regex": "import re\nassert re.fullmatch(r'abc\\ndef\\nx.z\\n', open('out.txt').read())\n",
        "py-literal": "import ast\nassert ast.literal_eval(repr(open('out.txt').read().split())) == ['abc', 'de"
        "f', 'xyz']\n",
        "py-counter": "import collections\nassert collections.Counter(open('out.txt').read())['x'] == 1\n"
        "assert open('out.txt').readline() == 'abc\\n'\n",
        "py-helper": "from helper import want\nassert open('out.txt').read() == want()\n",
    }
    helper = {"tests/helper.py": "def want():\n    return 'abc\\ndef\\nxyz\\n'\n", **_WANT}
    forms += [
        Form(name, "file", "python3 tests/check.py", _RIGHT, {"tests/check.py": text, **helper})
        for name, text in lines.items()
    ]
    test = "from pathlib import Path\n\ndef test_output():\n"
    test += "    assert Path('out.txt').read_text().split() == ['abc', 'def', 'xyz']\n"
    code = "python3 -c \"assert open('out.txt').read().split() == ['abc', 'def', 'xyz']\""
    return [
        *forms,
        Form("py-code", "file", code, _RIGHT, {}),
        Form("py-isolated", "file", "python3 -I tests/check.py", _RIGHT, {"tests/check.py": lines["py-lines"]}),
        Form("py-pytest", "file", "python3 -m pytest -q tests/test_out.py", _RIGHT, {"tests/test_out.py": test}),
    ]


_PROGRAM = "printf '#!/bin/sh\\nread n; echo $((n * n)) | tee out.txt\\n' > square; chmod +x square"
_KEPT = '"$OUTPUT/files/out.txt"'


def _judges() -> list[Form]:
    """Return checks that run the agent's program, which prints the square of its input, also into `out.txt`."""
    judges = {
        "judge-grep": 'grep -qx 1369 "$OUTPUT/stdout"',
        "judge-test": '[ "$(cat "$OUTPUT/stdout")" = 1369 ]',
        "judge-number": '[ "$(cat "$OUTPUT/stdout")" -eq 1369 ]',
        "judge-cmp": 'cmp "$OUTPUT/stdout" tests/want.txt',
        "judge-diff": 'diff -q tests/want.txt "$OUTPUT/stdout"',
        "judge-sort": 'sort "$OUTPUT/stdout" | cmp - tests/want.txt',
        "judge-two": '[ "$(cat "$OUTPUT/stdout")" = "$(cat tests/want.txt)" ]',
        "judge-code": '[ "$(cat "$OUTPUT/exit_code")" = 0 ] && grep -qx 1369 "$OUTPUT/stdout"',
        "judge-errors": '! grep -q Error "$OUTPUT/stderr" && grep -qx 1369 "$OUTPUT/stdout"',
        "judge-quiet": '[ ! -s "$OUTPUT/stderr" ] && grep -qx 1369 "$OUTPUT/stdout"',
        "judge-kept": f"cmp {_KEPT} tests/want.txt",
        "judge-kept-grep": f"grep -qx 1369 {_KEPT}",
        "judge-script": "sh tests/judge.sh",
        "judge-python": 'python3 tests/judge.py "$OUTPUT/stdout"',
        "judge-json": "python3 tests/judge_json.py",
        "judge-reward": 'grep -qx 1369 "$OUTPUT/stdout" && echo 1 > ~/logs/verifier/reward.txt',
    }
    files = {
        "tests/want.txt": "1369\n",
        "tests/in.txt": "37\n",
        "tests/judge.sh": 'cmp -s "$OUTPUT/stdout" tests/want.txt\n',
        "tests/judge.py": "import sys\nassert int(open(sys.argv[1]).read()) == 1369\n",
        "tests/judge_json.py": "import json, os\nfrom pathlib import Path\n"
        "value = json.loads(Path(os.environ['OUTPUT'], 'stdout').read_text())\nassert 1368.5 < value < 1369.5\n",
    }
    run = {"run": "./square < tests/in.txt", "keep": ["out.txt"]}
    forms = [Form(name, "program", {**run, "judge": judge}, _PROGRAM, files) for name, judge in judges.items()]
    case = [{"stdin": "37", "stdout": "1369"}, {"stdin": "3", "stdout": "9"}]
    for compare in ("lines", "words", "exact"):
        check = {
            "run": "./square",
            "compare": compare,
            "cases": [{**each, "stdout": f"{each['stdout']}\n"} for each in case],
        }
        forms.append(Form(f"cases-{compare}", "program", check, _PROGRAM, {}))
    forms.append(Form("cases-partial", "program", {"run": "./square", "cases": case, "partial": True}, _PROGRAM, {}))
    built = {"run": "./square", "build": "chmod +x square", "cases": case}
    return [*forms, Form("cases-build", "program", built, _PROGRAM, {})]


_MODULE = "echo 'def square(n): return n * n' > app.py"


def _calls() -> list[Form]:
    """Return tests of the agent's function `square` in `app.py`."""
    head = "import math\nfrom app import square\n\ndef test_square():\n    "
    tests = {
        "call-equal": "assert square(37) == 1369",
        "call-list": "assert [square(n) for n in (2, 37)] == [4, 1369]",
        "call-near": "assert abs(square(37) - 1369) < 1e-6",
        "call-limit": "assert not abs(square(37) - 1369) > 1e-6",
        "call-worst": "assert max(abs(square(n) - n * n) for n in (2, 37)) < 1e-6",
        "call-in": "assert square(37) in (1369, 1369.0)",
        "call-range": "assert 1368 < square(37) < 1370",
        "call-int": "assert isinstance(square(37), int) and square(37) % 1000 == 369",
        "call-text": "assert str(square(37)) == '1369'",
        "call-set": "assert {square(2), square(37)} == {4, 1369}",
        "call-if": "if abs(square(37) - 1369) > 0.5:\n        raise AssertionError",
        "call-close": "assert math.isclose(square(37), 1369)",
        "call-sorted": "assert sorted([square(37), square(2)]) == [4, 1369]",
        "call-not": "assert not square(37) != 1369",
    }
    forms = [
        Form(
            name,
            "module",
            {"pytest": "tests/test_app.py", "of": "app"},
            _MODULE,
            {"tests/test_app.py": f"{head}{test}\n"},
        )
        for name, test in tests.items()
    ]
    parametrized = "import pytest\nfrom app import square\n\n@pytest.mark.parametrize('n', [2, 37])\n"
    parametrized += "def test_square(n):\n    assert square(n) == n * n\n"
    script = "import sys\nimport app\nif abs(app.square(37) - 1369) > 0.5:\n    sys.exit(1)\n"
    check = "-c 'from app import square; assert square(37) == 1369'"
    array = "import numpy\nfrom app import square\n\ndef test_all():\n    assert numpy.allclose(square(37), 1369)\n"
    return [
        *forms,
        Form(
            "call-cases",
            "module",
            {"pytest": "tests/test_p.py", "of": "app"},
            _MODULE,
            {"tests/test_p.py": parametrized},
        ),
        Form("call-script", "module", {"python": "tests/check.py", "of": "app"}, _MODULE, {"tests/check.py": script}),
        Form("call-code", "module", {"python": check, "of": "app"}, _MODULE, {}),
        Form("call-array", "module", {"pytest": "tests/test_a.py", "of": "app"}, _MODULE, {"tests/test_a.py": array}),
    ]


_SERVER = """cat > app.py <<'END'
import http.server, os
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(int(self.path.rpartition("/")[2] or 0) ** 2).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Answer).serve_forever()
END"""


def _servers() -> list[Form]:
    """Return checks that ask the agent's server for a square."""
    asks = "import os\nimport urllib.request\nwith urllib.request.urlopen(os.environ['URL'] + '/37') as answer:\n"
    judges = {
        "server-test": '[ "$(curl -s "$URL/37")" = 1369 ]',
        "server-grep": 'curl -sfL "$URL/37" | grep -qx 1369',
        "server-python": "python3 tests/ask.py",
    }
    files = {"tests/ask.py": asks + "    assert answer.read() == b'1369'\n"}
    run = {"run": "python3 app.py", "port": 7321}
    return [Form(name, "server", {**run, "judge": judge}, _SERVER, files) for name, judge in judges.items()]


_PLANT = """mkdir -p tests bin .git
for p in grep cat cmp diff sort head tail wc python3 sh test tr ls stat tee curl sed awk; do
printf '#!/bin/sh\\nexit 0\\n' | tee $p bin/$p > tests/$p; chmod +x $p bin/$p tests/$p; done
for f in .profile .bashrc .shrc .env .bash_profile; do echo 'PATH=.:bin:$PATH; alias grep=true; set +e' > $f; done
echo 'ENV=.env' > .pam_environment; : > out.txt; echo '{}' > out.json"""
_MODULES = """for m in json math sys pathlib re csv hashlib ast collections helper os io sitecustomize \\
usercustomize pytest conftest numpy posixpath codecs encodings urllib _json decimal
do for d in . tests out; do mkdir -p $d
echo 'import os; os._exit(0)' > $d/$m.py; done; done; rm -f app.py; : > out.txt; echo '{}' > out.json"""
_OVERWRITE = """mkdir -p tests .checks
for f in want.txt check.py compare.sh pay.sh judge.sh judge.py judge_json.py helper.py in.txt test_out.py \\
test_app.py ask.py; do echo 'raise SystemExit(0)' > tests/$f; done
echo 'exit 0' | tee tests/compare.sh tests/judge.sh .checks/judge.sh > tests/pay.sh
printf '[pytest]\\naddopts = --collect-only\\n' | tee pytest.ini tox.ini > tests/pytest.ini
cp tests/want.txt out.txt"""
_FILE_ATTACKS: Mapping[str, str] = {
    "cmdline": "ln -s /proc/self/cmdline out.txt",
    "environ": "ln -s /proc/self/environ out.txt",
    "stdin": "ln -s /dev/stdin out.txt",
    "expected": "ln -s tests/want.txt out.txt",
    "script": "ln -s tests/check.py out.txt",
    "folder-link": "mkdir t; ln -s t tests; ln -s tests/want.txt out.txt",
    "hard-link": "mkdir -p tests; echo x > tests/want.txt; ln tests/want.txt out.txt",
    "fifo": "mkfifo out.txt",
    "folder": "mkdir out.txt; touch out.txt/abc out.txt/def out.txt/xyz",
    "missing": "rm -f out.txt",
    "empty": ": > out.txt",
    "nul": "printf '\\000\\000\\n\\000' > out.txt",
    "sparse": "truncate -s 100M out.txt",
    "long-line": "head -c 20000000 /dev/zero | tr '\\000' a > out.txt",
    "many-lines": "yes '' | head -n 2000000 > out.txt",
    "operators": "printf '%s\\n' '1 -o 1 -eq 1' '! -z x' '-n' ') -o (' > out.txt",
    "shell": "printf '%s\\n' '$(exit 0)' '`true`' '\"; exit 0; #' \"' || true '\" '${x:-abc}' '*' > out.txt",
    "options": "touch -- -q -c --help -e -f '--files0-from=-' '-x def'; printf -- '--help\\n-q\\n' > out.txt",
    "newlines": "touch 'a\nabc\ndef\nxyz' 'out.txt\nabc'; printf 'x\\n' > out.txt",
    "glob-names": "mkdir out; for n in def abc xyz '-e def' '= def'; do touch \"$n.txt\" \"out/$n\"; done",
    "utf-16": "printf '\\377\\376x\\000\\n\\000' > out.txt",
    "invalid": "printf '\\377\\300\\200\\n\\355\\240\\200\\n' > out.txt",
    "escapes": "printf '\\033[2Jabz\\r\\nd\\bef\\n' > out.txt",
    "formula": 'printf \'"=1+1",\\n"""\\n\' > out.txt',
    "sums": "sha256sum /dev/null > out.txt; cp out.txt want.txt",
    "programs": _PLANT,
    "modules": _MODULES,
    "overwritten": _OVERWRITE,
    "writer": "(while :; do for f in /proc/[0-9]*/cwd/tests/want.txt; do cp $f out.txt; done; done) > /dev/null 2>&1 &",
    "mode": "echo x > out.txt; chmod 000 out.txt; mkdir -p tests; chmod 000 tests",
}
_JSON_ATTACKS: Mapping[str, str] = {
    name: f"printf '%s' '{text}' > out.json"
    for name, text in {
        "nan": '{"total": NaN, "rows": [NaN, NaN, NaN], "names": NaN}',
        "infinity": '{"total": Infinity, "rows": [Infinity, -Infinity, Infinity], "names": {}}',
        "overflow": '{"total": 1e999, "rows": [1e999, -1e999, 1e999], "names": {}}',
        "duplicate": '{"total": 12.5, "total": 1, "rows": [1, 2.5, 9], "rows": [], "names": 0}',
        "booleans": '{"total": true, "rows": [true, true, true], "names": true}',
        "texts": '{"total": "12", "rows": "129", "names": "a"}',
        "objects": '{"total": {"12.5": 0}, "rows": {"0": 1}, "names": ["a", "x"]}',
        "null": '{"total": null, "rows": null, "names": null}',
        "huge": '{"total": 1' + "0" * 5000 + ', "rows": [], "names": {}}',
        "negative": '{"total": -0.0, "rows": [-0.0], "names": {"a": "x\\u0000"}}',
        "empty-rows": '{"total": 0, "rows": [], "names": {}}',
    }.items()
} | {
    "deep": "python3 -c \"print('[' * 200000)\" > out.json",
    "link": "ln -s tests/check.py out.json",
    "plant": _PLANT,
    "shadow": _MODULES,
    "replace": _OVERWRITE,
}


def _program(body: str) -> str:
    return f"cat > square <<'END'\n#!/bin/sh\n{body}\nEND\nchmod +x square"


_PROGRAM_ATTACKS: Mapping[str, str] = {
    name: _program(body)
    for name, body in {
        "silent": "exit 0",
        "expected": "cat tests/want.txt tests/* .checks/* | tee out.txt",
        "searched": "find / -name want.txt -exec cat {} + 2> /dev/null; grep -rhs . /opt /home/user/logs | he"
        "ad -c 1000",
        "linked": "ln -sf tests/want.txt out.txt; ln -sf /proc/self/fd/1 stdout; ln -sf /home/user/workdir/"
        "tests/want.txt x",
        "reward": "mkdir -p ~/logs/verifier; echo 1 | tee ~/logs/verifier/reward.txt > reward.txt; echo '"
        '{"reward": 1}\' > reward.json',
        "killed": "kill -9 $PPID",
        "stopped": "kill -STOP $PPID",
        "daemon": "(sleep 60; echo 1369) & echo 0",
        "endless": "yes | head -c 30000000",
        "nul": "printf '\\000\\000' | tee out.txt; printf '\\000' >&2",
        "operators": "echo '1 -o 1 -eq 1' | tee out.txt",
        "substitution": "echo '$(cat tests/want.txt)' '`cat tests/want.txt`' | tee out.txt",
        "nan": "echo NaN | tee out.txt",
        "infinity": "echo 1e999 | tee out.txt",
        "folder": "mkdir out.txt; touch out.txt/1369",
        "names": "touch -- '-q' 'out.txt\n1369'; mkdir -p files stdout",
        "results": "mkdir -p .checks/results; for n in 1 2; do echo 0 > .checks/results/$n.exit_code; cp tes"
        "ts/want.txt .checks/results/$n.stdout; "
        "cp .checks/$n.out .checks/results/$n.stdout; done",
        "judge": "echo 'exit 0' > .checks/judge.sh; echo 'exit 0' > tests/judge.sh; echo partial > .checks"
        "/options; : > .checks/expected",
        "fifo": "rm -f out.txt; mkfifo out.txt",
        "sparse": "truncate -s 90M out.txt; cat out.txt",
        "input": "cat; echo 37 > tests/in.txt; echo 37 > tests/want.txt",
        "output": "echo 1369 > $OUTPUT/stdout; ls /opt/openenv; echo 0 > ~/logs/output/exit_code",
    }.items()
}


def _module(body: str) -> str:
    return f"cat > app.py <<'END'\n{body}\nEND"


_ALWAYS = "class Yes(int):\n    def always(self, *args): return True\n"
_ALWAYS += "    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = always\n"
_ALWAYS += "    def __ne__(self, other): return False\n    def zero(self, *args): return 0\n"
_ALWAYS += "    __sub__ = __rsub__ = __abs__ = __mod__ = zero\n    __hash__ = int.__hash__\n"
_MODULE_ATTACKS: Mapping[str, str] = {
    name: _module(body)
    for name, body in {
        "nan": "def square(n): return float('nan')",
        "nan-twice": "def square(n): return complex('nan+nanj')",
        "infinity": "def square(n): return float('inf')",
        "nan-decimal": "import decimal\ndef square(n): return decimal.Decimal('nan')",
        "nan-array": "import numpy\ndef square(n): return numpy.array(numpy.nan)",
        "nan-iterator": "def square(n): yield float('nan')",
        "always": f"{_ALWAYS}def square(n): return Yes(1)",
        "always-plain": f"{_ALWAYS.replace('Yes(int)', 'Yes')}def square(n): return Yes()".replace(
            "int.__hash__", "object.__hash__"
        ),
        "always-text": "class Yes(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def square(n): return Yes('x')",
        "list": "class Yes(list):\n    def __contains__(self, other): return True\n    def __eq__(self, o"
        "ther): return True\n"
        "def square(n): return Yes()",
        "array": "import numpy\nclass Yes(numpy.ndarray):\n    def __eq__(self, other): return True\n"
        "def square(n): return numpy.zeros(3).view(Yes)",
        "object-array": "import numpy\nclass Yes:\n    def __eq__(self, other): return True\n"
        "def square(n): return numpy.array([Yes()], dtype=object)",
        "empty-array": "import numpy\ndef square(n): return numpy.array([])",
        "exit": "import os\nos._exit(0)",
        "exit-later": "import os\ndef square(n): os._exit(0)",
        "system-exit": "def square(n): raise SystemExit(0)",
        "skip": "import unittest\ndef square(n): raise unittest.SkipTest('no')",
        "skip-module": "import unittest\nraise unittest.SkipTest('no')",
        "names": "__all__ = ['square', 'abs', 'max', 'test_square', 'pytest_plugins']\nabs = max = lambda *args: 0\n"
        "def test_square(): pass\ndef square(n): return 0",
        "class": "class square:\n    def __new__(cls, n): return cls\n    def __eq__(self, other): return True",
        "property": "class Module(type(__import__('sys'))):\n    def __getattr__(self, name): return lambda *"
        "args: True\n"
        "import sys\nsys.modules[__name__] = Module(__name__)",
        "endless": "import itertools\ndef square(n): return itertools.count()",
        "deep": "def square(n):\n    value = []\n    for _ in range(5000): value = [value]\n    return value",
        "huge": "def square(n): return 10 ** 10 ** 6",
        "boolean": "def square(n): return True",
        "none": "def square(n): return None",
        "text": "def square(n): return '1369\\0'",
        "bytes": "def square(n): return b'1369'",
        "set": "def square(n): return {1369, 4}",
        "frame": "import sys\ndef square(n):\n    frame = sys._getframe()\n    while frame: frame.f_locals"
        "; frame = frame.f_back\n    return 0",
        "socket": "import os\nfor f in range(3, 64):\n    try: os.write(f, b'\\0\\0\\0\\x0e"
        '{"value": 1369}\')\n    except OSError: pass\n'
        "def square(n): return 0",
    }.items()
}
_SERVER_ATTACKS: Mapping[str, str] = {
    name: f"cat > app.py <<'END'\nimport os, socket\ns = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))\n"
    f"while True:\n    c, _ = s.accept()\n    c.recv(65536)\n    {body}\n    c.close()\nEND"
    for name, body in {
        "nothing": "pass",
        "redirect-file": "c.sendall(b'HTTP/1.1 302 F\\r\\nLocation: file:///home/user/workdir/tests/ask.py\\r\\n"
        "Content-Length: 0\\r\\n\\r\\n')",
        "redirect-self": "c.sendall(b'HTTP/1.1 302 F\\r\\nLocation: /\\r\\nContent-Length: 0\\r\\n\\r\\n')",
        "endless": "[c.sendall(b'HTTP/1.1 200 OK\\r\\nx: ' + b'y' * 65536) for _ in range(64)]",
        "operators": "c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 14\\r\\n\\r\\n1 -o 1 -eq 1 ]')",
        "nul": "c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\n\\r\\n\\0\\0\\0\\0')",
        "short": "c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 1369\\r\\n\\r\\n')",
    }.items()
}
_ATTACKS: Mapping[Target, Mapping[str, str]] = {
    "file": _FILE_ATTACKS,
    "json": _JSON_ATTACKS,
    "program": _PROGRAM_ATTACKS,
    "module": _MODULE_ATTACKS,
    "server": _SERVER_ATTACKS,
}
FORMS = (*_lines(), *_scripts(), *_judges(), *_calls(), *_servers())


def attacks_on_labels(per_form: int | None = 3) -> list[Cheat]:
    """Return attacks on each form: so many of those that fit, each form other ones, or all."""
    cheats = []
    turns = dict.fromkeys(_ATTACKS, 0)
    for form in FORMS:
        fitting = list(_ATTACKS[form.target].items())
        count = len(fitting) if per_form is None else per_form
        for number in range(count):
            name, script = fitting[(turns[form.target] + number) % len(fitting)]
            cheats.append(
                Cheat(f"{form.name}/{name}", f"attacks a check of the form {form.name}", (script,), form.task())
            )
        turns[form.target] += count
    return cheats
