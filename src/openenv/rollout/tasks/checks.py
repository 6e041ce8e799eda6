"""`Check`: the agent's code runs in one sandbox, and its output is judged in another. Also the short forms of checks.

Each function here returns a `Check`. In a task file the same check is a mapping with the names of the arguments;
`expand` converts it. Knows values only.
"""

# python                                                     task file
# -------------------------------------------------------    ----------------------------------------------------------
# Check(run="sh go.sh", judge='grep -q 42 "$OUTPUT/stdout"')  {run: sh go.sh, judge: 'grep -q 42 "$OUTPUT/stdout"'}
# case_check("./square", [Case(stdin="7", stdout="49")],      {run: ./square, build: gcc -o square square.c,
#            build="gcc -o square square.c")                   cases: [{stdin: 7, stdout: 49}]}
# pytest_check("tests/test_square.py", of="square")           {pytest: tests/test_square.py, of: square}
# python_check("check.py", of="square")                       {python: check.py, of: square}
# Check(run="node app.js", port=3000, judge="...")            {run: node app.js, port: 3000, judge: ...}

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
    validate_call,
)

from openenv.protocol.schema import problems_of

Compare = Literal["lines", "words", "exact"]
"""How outputs are compared. `lines` ignores blanks at the end of lines and of the output, `words` ignores every
difference in blanks and line ends, `exact` ignores nothing."""
CALLS_PORT = 7010
"""The port in the agent's sandbox that receives the calls of a test."""
_CASES = ".checks"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CASE_BLOCKS = 32 * 1024
"""The output limit of a case, in blocks of 512 bytes."""


AS_STORED: Mapping[str, object] = {"as_stored": True}
"""The validation context of stored tasks: newer rules do not apply to them."""


def runs_nothing(line: str) -> bool:
    """Return whether a shell line is blank or only a comment: it always exits with 0."""
    return all(part.strip() in ("", "\\") or part.lstrip().startswith("#") for part in line.split("\n"))


def _command(line: str, info: ValidationInfo) -> str:
    if runs_nothing(line) and info.context is not AS_STORED:
        raise ValueError(f"{line!r} is blank or a comment and runs nothing; write a command")
    return line


ShellLine = Annotated[str, AfterValidator(_command)]


class Check(BaseModel):
    """A check in two separate parts: the agent's code runs in one sandbox, its output is judged in another.

    `run` sees the agent's work tree. Afterwards its output, its exit code and the files in `keep` are taken out as
    data, and its sandbox is closed. `judge` runs in a sandbox that contains only that data of the agent, in the folder
    `$OUTPUT`: `stdout`, `stderr`, `exit_code`, and `files/` with the files in `keep`. The exit code of `judge` decides,
    or the number that it writes to `~/logs/verifier/reward.txt`.

    With a `port`, both parts run at the same time. Connections of `judge` to `$URL` reach that port in the sandbox of
    `run`, and `$OUTPUT` is not set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: ShellLine
    """A shell line that runs the agent's work, in the work folder. A crash or hang counts as a failed check."""
    judge: ShellLine
    """A shell line that runs in the baseline's work folder, with the `verify_files`."""
    keep: tuple[str, ...] = ()
    """Files and folders below the work folder that are taken out after `run`. Links are ignored."""
    needs: tuple[str, ...] | None = None
    """Patterns of the `verify_files` that `run` sees. None: the files that `run` names."""
    files: Mapping[str, str] = Field(default_factory=dict)
    """Text files for this check only, in addition to the task's `verify_files`."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """The port of a server that `run` starts; `run` finds it in `$PORT`."""
    name: str = ""
    """The name in reports. Short forms set one; otherwise reports show `run` and `judge`."""

    @field_validator("keep")
    @classmethod
    def _below(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for path in keep:
            clean = posixpath.normpath(path)
            if path.startswith("/") or clean == "." or clean.split("/")[0] == ".." or "\0" in path:
                raise ValueError(f"{path!r} is not below the work folder; `keep` takes relative paths")
        return tuple(posixpath.normpath(path) for path in keep)

    @model_validator(mode="after")
    def _whole(self) -> Check:
        if self.port is not None and self.keep:
            raise ValueError("a check with a port is judged while it runs; remove `keep` or `port`")
        return self

    def __str__(self) -> str:
        """Return the name, or both parts in one line."""
        return self.name or f"{self.run} => {self.judge}"


class Case(BaseModel):
    """One call of a program: its input and its expected output."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    stdin: str = ""
    args: tuple[str, ...] = ()
    """Arguments behind the check's `run`."""
    stdout: str | None = None
    """None: any output is right."""
    exit_code: int | None = 0
    """None: any exit code is right."""


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _module(name: str) -> str:
    if not _MODULE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a Python module")
    return name


def _class(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not the name of a class; write it without its module")
    return name


Texts = Annotated[tuple[str, ...], BeforeValidator(_several)]
Modules = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_several)]


@validate_call
def case_check(
    run: ShellLine,
    cases: Annotated[tuple[Case, ...], Field(min_length=1)],
    *,
    build: str | None = None,
    compare: Compare = "lines",
    partial: bool = False,
    case_timeout_s: Annotated[float, Field(gt=0)] = 10.0,
) -> Check:
    """Run a program on inputs and compare its output. The expected outputs never enter the program's sandbox.

    Args:
        run: A shell line that runs the program once, in the work folder.
        cases: Inputs and expected outputs.
        build: A shell line before the first case, such as a call of a compiler.
        compare: How outputs are compared.
        partial: Earn the share of right cases. By default all cases together earn 1, and less earns 0.
        case_timeout_s: The time limit of each case; the task's `verify_timeout_s` limits all of them together.
    """
    files = {f"{_CASES}/run.sh": _run_script(run, cases, build, case_timeout_s)}
    for number, case in enumerate(cases, 1):
        files[f"{_CASES}/{number}.in"] = case.stdin
        if case.stdout is not None:
            files[f"{_CASES}/{number}.out"] = case.stdout
    codes = ("any" if case.exit_code is None else str(case.exit_code) for case in cases)
    files[f"{_CASES}/expected"] = "".join(f"{number} {code}\n" for number, code in enumerate(codes, 1))
    files[f"{_CASES}/options"] = f"{compare} {'partial' if partial else 'all'}\n"
    files[f"{_CASES}/judge.sh"] = JUDGE_SCRIPT
    return Check(
        run=f"sh {_CASES}/run.sh",
        judge=CASES_JUDGE,
        keep=(f"{_CASES}/results",),
        needs=(f"{_CASES}/run.sh", f"{_CASES}/*.in"),
        files=files,
        name=f"{run}: {len(cases)} {'case' if len(cases) == 1 else 'cases'}",
    )


def _run_script(run: str, cases: tuple[Case, ...], build: str | None, case_timeout_s: float) -> str:
    """Return the script that runs all cases beside the agent's program. The judge reads its output as data."""
    lines = [f"cd {_CASES} && rm -rf results && mkdir results && cd .. || exit 1"]
    if build is not None:
        lines += ["{", build, "} < /dev/null || exit 1"]
    lines.append(f"ulimit -f {_CASE_BLOCKS}")
    for number, case in enumerate(cases, 1):
        line = shlex.quote(" ".join([run, *map(shlex.quote, case.args)]))
        place = f"{_CASES}/results/{number}"
        lines.append(f"timeout -s KILL {case_timeout_s:g} sh -c {line} < {_CASES}/{number}.in > {place}.stdout")
        lines.append(f"echo $? > {place}.exit_code")
    return "\n".join([*lines, "exit 0", ""])


CASES_JUDGE = f"sh {_CASES}/judge.sh"
JUDGE_SCRIPT = r"""# Compares the outputs of all cases. Cases and options are data: all tasks have this very script.
results=$OUTPUT/files/.checks/results
read -r compare partial < .checks/options
passed=0 count=0
same() {
  [ -f "$1" ] || return 1
  case $compare in
  exact) cmp -s "$1" "$2" ;;
  lines) [ "$(sed 's/[[:space:]]*$//' "$1")" = "$(sed 's/[[:space:]]*$//' "$2")" ] ;;
  words) [ "$(tr -s '[:space:]' '\n' < "$1" | sed '/^$/d')" = "$(tr -s '[:space:]' '\n' < "$2" | sed '/^$/d')" ] ;;
  *) return 1 ;;
  esac
}
while read -r number expected; do
  count=$((count + 1))
  code=$(cat "$results/$number.exit_code" 2> /dev/null)
  if [ "$expected" != any ] && [ "$code" != "$expected" ]; then
    echo "case $number: exit code ${code:-none}, expected $expected"
  elif [ -e ".checks/$number.out" ] && ! same "$results/$number.stdout" ".checks/$number.out"; then
    echo "case $number: unexpected output"
    head -c 2000 ".checks/$number.out" | awk 'NR <= 20 { print "  expected: " $0 }'
    head -c 2000 "$results/$number.stdout" 2> /dev/null | awk 'NR <= 20 { print "  actual:   " $0 }'
  else
    passed=$((passed + 1))
  fi
done < .checks/expected
echo "$passed of $count cases are right"
if [ "$partial" = partial ]; then
  awk "BEGIN { print $passed / $count }" > "$HOME/logs/verifier/reward.txt"
fi
[ "$count" -gt 0 ] && [ "$passed" = "$count" ]
"""
"""The judge of every `case_check`. A judge with exactly this text is `judged`, see `verify/trust.py`."""
_VERDICT_OF_CASE = re.compile(r"case (\d+): (.*)")
_ACTUAL = "  actual:   "


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """One case of a `case_check`: its input, and its expected and actual output."""

    number: int
    stdin: str
    expected: str | None
    """None: any output is right."""
    problem: str = ""
    """Why the case failed; empty if it passed."""
    actual: str = ""
    """The beginning of an unexpected output."""


def case_verdicts(check: Check, stdout: str) -> list[CaseVerdict]:
    """Return the cases of a `case_check` with the results that its judge printed; an empty list for other checks.

    The judge indents outputs of the agent's program, so they cannot pretend to be results.
    """
    if check.judge != CASES_JUDGE:
        return []
    problems: dict[int, str] = {}
    outputs: dict[int, list[str]] = {}
    number = 0
    for line in stdout.split("\n"):
        if match := _VERDICT_OF_CASE.fullmatch(line):
            number = int(match[1])
            problems[number], outputs[number] = match[2], []
        elif line.startswith(_ACTUAL) and number:
            outputs[number].append(line.removeprefix(_ACTUAL))
    numbers = [int(line.split()[0]) for line in check.files.get(f"{_CASES}/expected", "").splitlines()]
    return [
        CaseVerdict(
            each,
            check.files.get(f"{_CASES}/{each}.in", ""),
            check.files.get(f"{_CASES}/{each}.out"),
            problems.get(each, ""),
            "\n".join(outputs.get(each, ())),
        )
        for each in numbers
    ]


@validate_call
def pytest_check(
    pytest: Modules,
    *,
    of: Modules,
    options: str = "-q",
    path: Texts = (),
    needs: Texts = (),
    classes: Texts = (),
) -> Check:
    """Run tests with pytest in the judge's sandbox, and the agent's modules that they import in another sandbox.

    Values cross as data, so the agent's code can change only its own process, never the tests. The check passes if at
    least one test passed, none failed, and none was skipped because of a value of the agent.

    Args:
        pytest: Test files or folders, as on pytest's command line.
        of: The agent's modules and packages; `import` finds them in the agent's sandbox.
        options: Other arguments of pytest.
        path: Folders below the work folder that contain the agent's modules; by default the work folder.
        needs: Patterns of `verify_files` for the agent's sandbox, such as a module with adapters.
        classes: Names of the agent's classes whose instances may be referenced. All other results must be data.
    """
    tests = " ".join(shlex.quote(test) for test in pytest)
    python = f"-m pytest -p no:cacheprovider {options} {tests}".replace("  ", " ")
    check = python_check(python, of=of, path=path, needs=needs, classes=classes)
    return check.model_copy(update={"name": f"pytest {tests}"})


@validate_call
def python_check(python: ShellLine, *, of: Modules, path: Texts = (), needs: Texts = (), classes: Texts = ()) -> Check:
    """Run Python in the judge's sandbox, and the agent's modules that it imports in another sandbox.

    Args:
        python: The arguments of `python3`: a script of the `verify_files`, `-m unittest ...` or `-c ...`.
        of: The agent's modules and packages; `import` finds them in the agent's sandbox.
        path: Folders below the work folder that contain the agent's modules; by default the work folder.
        needs: Patterns of `verify_files` for the agent's sandbox, such as a module with adapters.
        classes: Names of the agent's classes whose instances may be referenced. All other results must be data.
    """
    modules = " ".join(map(_module, of))
    declared = f" --classes {','.join(map(_class, classes))}" if classes else ""
    return Check(
        run=" ".join(["python3 -m openenv_calls serve", *map(shlex.quote, path)]),
        judge=f"python3 -m openenv_calls judge {modules}{declared} -- {python}",
        needs=needs,
        port=CALLS_PORT,
        name=f"python {python}",
    )


_SHORT: dict[str, Callable[..., Check]] = {"cases": case_check, "pytest": pytest_check, "python": python_check}


def expand(value: object) -> object:
    """Return the check for a mapping in a short form; return any other value unchanged.

    Raises:
        ValueError: the mapping is an invalid short form; the text lists the problems.
    """
    if not isinstance(value, Mapping):
        return value
    fields: dict[str, Any] = {str(key): item for key, item in value.items()}
    for key, make in _SHORT.items():
        if key in fields:
            name = fields.pop("name", None)
            try:
                check = make(**fields)
                return check if name is None else Check.model_validate({**check.model_dump(), "name": name})
            except ValidationError as exc:
                raise ValueError(f"a check with '{key}' has {problems_of(exc)}") from None
    return value
