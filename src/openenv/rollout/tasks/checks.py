"""`Check`: what the agent wrote runs in one sandbox and is judged in another; and short ways to write one.

Each function here returns a `Check`; a task file has the same as a mapping with the arguments' names, which `expand`
turns into it. Knows values only.
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

Compare = Literal["lines", "words", "exact"]
"""How outputs are compared: `lines` ignores blanks at the end of lines and of the output, `words` all differences
between blanks and ends of lines, `exact` nothing."""
CALLS_PORT = 7010
"""Where calls from a test arrive in the agent's sandbox."""
_CASES = ".checks"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CASE_BLOCKS = 32 * 1024
"""How much a case may print, in blocks of 512 bytes."""


AS_STORED: Mapping[str, object] = {"as_stored": True}
"""The context in which stored tasks are validated: rules that came after them do not count."""


def runs_nothing(line: str) -> bool:
    """Say whether a shell line is blank or only a comment: it exits with 0 whatever the agent did."""
    return all(part.strip() in ("", "\\") or part.lstrip().startswith("#") for part in line.split("\n"))


def _command(line: str, info: ValidationInfo) -> str:
    if runs_nothing(line) and info.context is not AS_STORED:
        raise ValueError(f"{line!r} is blank or a comment and runs nothing; write a command")
    return line


ShellLine = Annotated[str, AfterValidator(_command)]


class Check(BaseModel):
    """A check in two parts that never meet: what the agent wrote runs in one sandbox, its output is judged in another.

    `run` has the agent's work tree. Its output, its exit code and the files in `keep` are taken out as data, and its
    sandbox is gone. `judge` has a sandbox in which nothing of the agent is but that data, below the folder `$OUTPUT`:
    `stdout`, `stderr`, `exit_code`, and `files/` with what was kept. Its exit code decides, or the number it writes to
    `~/logs/verifier/reward.txt`.

    With a `port`, both run at the same time: connections of `judge` to `$URL` reach that port in the sandbox of `run`,
    and there is no `$OUTPUT`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: ShellLine
    """A shell line that runs the agent's work, in the work folder. A crash or hang is the agent's failure."""
    judge: ShellLine
    """A shell line in the work folder as the setup left it, with the `verify_files`. One that also dies without the
    agent's work gives no verdict."""
    keep: tuple[str, ...] = ()
    """Files and folders below the work folder that are taken out after `run`; links are not."""
    needs: tuple[str, ...] | None = None
    """Patterns: which of the `verify_files` are there for `run`. None: those that it names."""
    files: Mapping[str, str] = Field(default_factory=dict)
    """Text files of this check alone, beside the task's `verify_files`."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Where a server that `run` starts listens; `run` has it as `$PORT`."""

    @field_validator("keep")
    @classmethod
    def _below(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for path in keep:
            clean = posixpath.normpath(path)
            if path.startswith("/") or clean == "." or clean.split("/")[0] == ".." or "\0" in path:
                raise ValueError(f"what is kept lies below the work folder, not at {path!r}")
        return tuple(posixpath.normpath(path) for path in keep)

    @model_validator(mode="after")
    def _whole(self) -> Check:
        if self.port is not None and self.keep:
            raise ValueError("a check with a port is judged while it runs: there is nothing to keep")
        return self

    def __str__(self) -> str:
        """Return both parts in a line."""
        return f"{self.run} => {self.judge}"


class Case(BaseModel):
    """One call of a program: what goes in, and what must come out."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    stdin: str = ""
    args: tuple[str, ...] = ()
    """Arguments behind the check's `run`."""
    stdout: str | None = None
    """None: whatever it prints is right."""
    exit_code: int | None = 0
    """None: any."""


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _module(name: str) -> str:
    if not _MODULE.fullmatch(name):
        raise ValueError(f"{name!r} is no module of Python")
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
    """Run a program on inputs and compare what it prints; the expected outputs are never where it runs.

    Args:
        run: A shell line that runs the program once, in the work folder.
        cases: Inputs and expected outputs.
        build: A shell line before the first case, such as a compiler's.
        compare: How outputs are compared.
        partial: Earn the share of cases that are right, rather than 1 for all and 0 otherwise.
        case_timeout_s: How long each case may take; the task's `verify_timeout_s` is for all of them.
    """
    files = {f"{_CASES}/run.sh": _run_script(run, cases, build, case_timeout_s)}
    for number, case in enumerate(cases, 1):
        files[f"{_CASES}/{number}.in"] = case.stdin
        if case.stdout is not None:
            files[f"{_CASES}/{number}.out"] = case.stdout
    files[f"{_CASES}/judge.sh"] = _judge_script(cases, compare, partial=partial)
    return Check(
        run=f"sh {_CASES}/run.sh",
        judge=f"sh {_CASES}/judge.sh",
        keep=(f"{_CASES}/results",),
        needs=(f"{_CASES}/run.sh", f"{_CASES}/*.in"),
        files=files,
    )


def _run_script(run: str, cases: tuple[Case, ...], build: str | None, case_timeout_s: float) -> str:
    """Return the script that runs all cases beside the agent's program. All that it writes is data to the judge."""
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


_SAME = {
    "exact": 'cmp -s "$1" "$2"',
    "lines": '[ "$(sed \'s/[[:space:]]*$//\' "$1")" = "$(sed \'s/[[:space:]]*$//\' "$2")" ]',
    "words": "[ \"$(tr -s '[:space:]' '\\n' < \"$1\" | sed '/^$/d')\" = "
    "\"$(tr -s '[:space:]' '\\n' < \"$2\" | sed '/^$/d')\" ]",
}


def _judge_script(cases: tuple[Case, ...], compare: Compare, *, partial: bool) -> str:
    lines = [
        f'results="$OUTPUT/files/{_CASES}/results"',
        "passed=0",
        f'same() {{ [ -f "$1" ] && {_SAME[compare]}; }}',
        "judge() {",
        '  code=$(cat "$results/$1.exit_code" 2> /dev/null)',
        '  if [ "$2" != any ] && [ "$code" != "$2" ]; then',
        '    echo "case $1: exit code ${code:-none}, expected $2"',
        f'  elif [ -e "{_CASES}/$1.out" ] && ! same "$results/$1.stdout" "{_CASES}/$1.out"; then',
        '    echo "case $1: another output than expected"',
        "  else",
        "    passed=$((passed + 1))",
        "  fi",
        "}",
    ]
    for number, case in enumerate(cases, 1):
        lines.append(f"judge {number} {'any' if case.exit_code is None else case.exit_code}")
    lines.append(f'echo "$passed of {len(cases)} cases are right"')
    if partial:
        lines.append(f'awk "BEGIN {{ print $passed / {len(cases)} }}" > "$HOME/logs/verifier/reward.txt"')
    return "\n".join([*lines, f'[ "$passed" = {len(cases)} ]', ""])


@validate_call
def pytest_check(
    pytest: Modules,
    *,
    of: Modules,
    options: str = "-q",
    path: Texts = (),
    needs: Texts = (),
) -> Check:
    """Run tests with pytest in the judge's sandbox, and what they import of the agent's in another.

    Values cross as data, so that nothing which the agent's code does to its own process reaches the test's.

    Args:
        pytest: Test files or folders, as on pytest's command line.
        of: The agent's modules and packages: those that `import` finds on the agent's side.
        options: Other arguments of pytest.
        path: Folders below the work folder in which the agent's modules are; by default the work folder itself.
        needs: Patterns of `verify_files` that are there on the agent's side, such as a module with adapters.
    """
    tests = " ".join(shlex.quote(test) for test in pytest)
    return python_check(
        f"-m pytest -p no:cacheprovider {options} {tests}".replace("  ", " "), of=of, path=path, needs=needs
    )


@validate_call
def python_check(python: ShellLine, *, of: Modules, path: Texts = (), needs: Texts = ()) -> Check:
    """Run Python in the judge's sandbox, and what it imports of the agent's in another.

    Args:
        python: What follows `python3`: a script of the `verify_files`, `-m unittest ...` or `-c ...`.
        of: The agent's modules and packages: those that `import` finds on the agent's side.
        path: Folders below the work folder in which the agent's modules are; by default the work folder itself.
        needs: Patterns of `verify_files` that are there on the agent's side, such as a module with adapters.
    """
    modules = " ".join(map(_module, of))
    return Check(
        run=" ".join(["python3 -m openenv_calls serve", *map(shlex.quote, path)]),
        judge=f"python3 -m openenv_calls judge {modules} -- {python}",
        needs=needs,
        port=CALLS_PORT,
    )


_SHORT: dict[str, Callable[..., Check]] = {"cases": case_check, "pytest": pytest_check, "python": python_check}


def expand(value: object) -> object:
    """Return the check that a mapping stands for; another value stays as it is.

    Raises:
        ValueError: the mapping is one of the short forms, and not right; the text says what is wrong.
    """
    if not isinstance(value, Mapping):
        return value
    fields: dict[str, Any] = {str(key): item for key, item in value.items()}
    for key, make in _SHORT.items():
        if key in fields:
            try:
                return make(**fields)
            except ValidationError as exc:
                problems = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors())
                raise ValueError(f"a check with '{key}' has {'; '.join(problems)}") from None
    return value
