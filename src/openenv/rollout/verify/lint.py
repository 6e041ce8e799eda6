"""The trust levels of a task's checks, and suggestions for weak ones: the same check as a `Check`.

Knows tasks and `trust`, which reads single checks. Must not know sandboxes: a task is read before it runs.
"""

# A suggestion is made from the text of a shell line, by the first form that fits:
#
#   pytest tests                               {pytest: tests, of: square}              `_of_python`
#   ./prog > out.txt && diff out.txt want      {run: ..., judge: diff ..., keep: [...]}  `_of_written`
#   [ "$(sh square.sh 7)" = 49 ]               {run: sh square.sh 7, judge: [ ... ]}     `_of_compared`
#   ./prog < 1.in | diff - 1.out               {run: ./prog < 1.in, judge: diff ...}     `_of_pipeline`
#   grep -qx 42 answer.txt                     {run: true, judge: grep ..., keep: [...]} `_of_reading`
#   ! grep -q TODO a.py                        grep -q . a.py && ! grep -q TODO a.py     `_REPAIRS`, then as above
#
# A suggestion that is not `judged` when it is read again is dropped.

from __future__ import annotations

import ast
import json
import posixpath
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openenv.errors import TrustError
from openenv.rollout.tasks.checks import Check
from openenv.rollout.tasks.task import Task, Trust, reaches, weakest
from openenv.rollout.verify.trust import parse_python, trust_of

Suggestion = Mapping[str, object]
"""A check in the form of a task file."""
ADVICE = "Write it as a check with `run`, which runs the agent's part, and `judge`, which compares what it printed"
"""The advice for a line without a suggestion."""


@dataclass(frozen=True, slots=True)
class TrustReading:
    """The trust level of one check, and the reason."""

    check: str | Check
    trust: Trust
    reason: str
    """For a reader: the command that decides, and the agent's code that it may run."""
    suggestion: Suggestion | None = None
    """The same check in a `judged` form; None if it is judged already, or no form fits."""


def read_task(task: Task) -> tuple[TrustReading, ...]:
    """Read every check of a task, in order; nothing is run."""
    return tuple(_read(task, check) for check in task.verify)


def _read(task: Task, check: str | Check) -> TrustReading:
    trust, reason = trust_of(check, task)
    suggestion = _suggest(task, check) if isinstance(check, str) else None
    if suggestion is not None:
        short = Task.model_validate({"instruction": "-", "verify": [suggestion], "verify_files": task.verify_files})
        if trust_of(short.verify[0], task)[0] != "judged":
            suggestion = None
    return TrustReading(check, trust, reason, suggestion)


def task_trust(task: Task) -> Trust | None:
    """Return the trust level of a task's reward: the level of its weakest check."""
    return weakest(trust_of(check, task)[0] for check in task.verify)


def require_trust(task: Task, minimum: Trust | None, *, isolated: bool = True) -> None:
    """Check that every check of a task reaches `minimum` and the task's `min_trust`.

    Args:
        task: The task.
        minimum: The lowest level for the caller, or None.
        isolated: Whether the sandboxes isolate. If not, every check is `shared`.

    Raises:
        TrustError: a check is below the required level; the text names it and suggests a better form.
    """
    asked = [trust for trust in (minimum, task.min_trust) if trust is not None and trust != "shared"]
    if not asked:
        return
    wanted: Trust = "judged" if "judged" in asked else "isolated"
    name = f"task '{task.task_id}'" if task.task_id else "the task"
    for number, reading in enumerate(read_task(task), 1):
        if not isolated:
            raise TrustError(f"{name} needs checks that are {wanted}, and these sandboxes isolate nothing")
        if not reaches(reading.trust, wanted):
            form = ADVICE if reading.suggestion is None else f"Write it as {json.dumps(reading.suggestion)}"
            raise TrustError(
                f"Check {number} of {name} is {reading.trust}, and {wanted} is required: {reading.check}\n"
                f"  {reading.reason}.\n  {form}."
            )


# ---- suggestions ----
#
# The decision has to be in `judge`. `run` shares its sandbox with the agent's code, which can end it early and print
# the text that `judge` expects. So `run` gets one command that decides nothing, with build steps before it, and a line
# that decides in several places gets no suggestion.

_STDOUT = 'cat "$OUTPUT/stdout"'
_SUCCESS = '[ "$(cat "$OUTPUT/exit_code")" = 0 ] && '
_TEST_LIBRARIES = frozenset({"pytest", "hypothesis", "numpy", "pandas", "scipy", "requests", "httpx", "yaml"})
_BUILD = re.compile(
    r"(gcc|g\+\+|cc|clang|rustc|javac|tsc|cmake|mkdir|cp|mv|chmod|rm|touch)\s[^|]*|make(?!.*(test|check))( [\w.=-]+)*|"
    r"(go|cargo|dotnet|npm run) build\b[^|]*|npm (ci|install)\b[^|]*|pip3? install\b[^|]*"
)
_PLAIN = re.compile(
    r"""(?!!|(?:if|while|until|for|case|\[|test|grep|cmp|diff)\b)(?:[^&|;()$`'"\n]|'[^']*'|"[^"$`\\]*")+"""
)
"""One command without operators, substitutions and comparisons."""
_COMPARED = re.compile(
    r"""(?P<before>(?:! )?(?:\[|test) )"?\$\((?P<run>[^()]+)\)"?(?P<after> (?:=|!=|-[engl][qte]) [^$`"]+)"""
)
_FILE = re.compile(r"(?<![\w./\"'-])(?!-)[\w-]+(?:/[\w.-]+)*\.\w+(?![\w/-])")


_REPAIRS = (
    # ! grep -q TODO a.py               ->  grep -q . a.py && ! grep -q TODO a.py
    (r"! grep ((?:-[a-zA-Z]+ )*)('[^']*'|\w+) ([\w./-]+)", r"grep -q . \3 && ! grep \1\2 \3"),
    # [[ $(cat a) == 42 ]]              ->  [ "$(cat a)" = 42 ]
    (r'\[\[ "?\$\(([^()"]+)\)"? ==? ([\w.-]+|"[^"$`\\]*") \]\]', r'[ "$(\1)" = \2 ]'),
    # x=$(cat a); [ "$x" = 42 ]         ->  [ "$(cat a)" = 42 ]
    (r'(\w+)="?\$\(([^()"]+)\)"?(?:; | && |\n)(\[|test) "\$\1" (.+)', r'\3 "$(\2)" \4'),
    # if [ -e a ]; then grep -q x a; else false; fi  ->  [ -e a ] && grep -q x a
    (r"if ([^;]+); then ([^;]+);(?: else (?:false|exit 1);)? fi", r"\1 && \2"),
    # cd out && grep -q x a.txt         ->  grep -q x out/a.txt
    (r"cd ([\w.-]+) && (\w+(?: -\w+)*(?: '[^']*'| \w+)?) ([\w-]+\.\w+)", r"\2 \1/\3"),
)
"""Lines that are not safe, and a safe line that decides in the same way, or more strictly."""


def _repaired(line: str) -> str:
    """Return a line in a safe form, if one of the repairs fits; else the line itself."""
    for pattern, replacement in _REPAIRS:
        if re.fullmatch(pattern, line):
            return re.sub(pattern, replacement, line)
    return line


def _is_safe(line: str, task: Task) -> bool:
    return trust_of(line, task)[0] == "isolated"


def _suggest(task: Task, line: str) -> Suggestion | None:
    """Return a line as a check, if it has one of the forms that have a safe equivalent."""
    line = _repaired(line)
    if _is_safe(line, task):
        return _of_reading(task, line)
    # In the judge's sandbox the initial files are as the setup left them: the agent's cannot be the expected ones.
    own = task.model_copy(update={"verify_files": {**task.files, **task.verify_files}})
    if task.files and _is_safe(line, own):
        return _of_reading(own, line)
    steps = line.split(" && ")
    build = [step for step in steps[:-1] if _BUILD.fullmatch(step)]
    if build == steps[:-1]:
        last = _of_python(task, line) or _of_compared(task, steps[-1]) or _of_pipeline(task, steps[-1])
        return last and (_behind(build, last) if build else last)
    return _of_written(task, steps)


def _of_python(task: Task, line: str) -> Suggestion | None:
    """`pytest tests`, or Python that imports the agent's modules: the same, with those modules on the other side."""
    try:
        words = shlex.split(line)
    except ValueError:
        return None
    words = ["python3", "-m", *words] if words[:1] == ["pytest"] else words
    if len(words) < 2 or words[0] not in ("python", "python3") or set(line) & set("|&;<>$`"):
        return None
    sources = task.verify_sources
    if words[1:3] == ["-m", "pytest"]:
        tests = [word for word in words[3:] if not word.startswith("-")]
        options = " ".join(word for word in words[3:] if word.startswith("-"))
        files = tests or [path for path in sources if re.fullmatch(r"(.*/)?(test_[^/]*|[^/]*_test)\.py", path)]
        roots = [posixpath.normpath(test.partition("::")[0]) for test in tests] or ["."]
        texts = [
            text
            for path, text in sources.items()
            if path.endswith(".py") and any(root in (".", path) or path.startswith(f"{root}/") for root in roots)
        ]
        modules = _agents_modules(task, texts)
        more = {} if options in ("", "-q") else {"options": options}
        return {"pytest": _short(files), "of": _short(modules), **more} if modules and files else None
    code = words[2] if words[1] == "-c" and len(words) > 2 else sources.get(posixpath.normpath(words[1]), "")
    modules = _agents_modules(task, [code])
    return {"python": shlex.join(words[1:]), "of": _short(modules)} if modules else None


def _short(texts: list[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else texts


def _agents_modules(task: Task, sources: list[str]) -> list[str]:
    """Return the agent's modules that Python sources import: those the task names, or else all that are unknown."""
    verify_modules = {path.partition("/")[0].removesuffix(".py") for path in task.verify_sources}
    verify_modules |= {posixpath.basename(path).removesuffix(".py") for path in task.verify_sources}
    names = dict.fromkeys(name for source in sources for name in _imports(source))
    unknown = [name for name in names if name not in verify_modules | _TEST_LIBRARIES | sys.stdlib_module_names]
    texts = "\n".join((task.instruction, *task.solution, *task.setup, *task.files))
    return [name for name in unknown if re.search(rf"(?<![\w.]){re.escape(name)}(\.py|/)", texts)] or unknown


def _imports(source: str) -> Iterator[str]:
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name.partition(".")[0] for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _of_compared(task: Task, step: str) -> Suggestion | None:
    """`[ "$(sh square.sh 7)" = 49 ]`: the command in it is run, the comparison is the judge."""
    match = _COMPARED.fullmatch(step)
    run, _, reader = match["run"].partition(" | ") if match else ("", "", "")
    if match is None or not _PLAIN.fullmatch(run):
        return None
    printed = f"{_STDOUT} | {reader}" if reader else _STDOUT
    return {"run": run, "judge": f'{match["before"]}"$({printed})"{match["after"]}'}


def _of_pipeline(task: Task, step: str) -> Suggestion | None:
    """`./prog < 1.in | diff - 1.out`: the readers after the first pipe are the judge."""
    run, _, readers = step.removeprefix("! ").partition(" | ")
    if not readers or not _is_safe(readers, task) or not _PLAIN.fullmatch(run):
        return None
    return {"run": run, "judge": f"{'! ' if step.startswith('! ') else ''}{_STDOUT} | {readers}"}


def _of_written(task: Task, steps: list[str]) -> Suggestion | None:
    """`./prog > out.txt && diff out.txt expected.txt`: the file is kept, the readers are the judge."""
    run, *readers = steps
    command, _, path = run.partition(" > ")
    judge = " && ".join(readers)
    if not re.fullmatch(r"\w[\w./-]*", path) or not _PLAIN.fullmatch(command):
        return None
    if not readers or not _is_safe(judge, task) or path not in _FILE.findall(judge):
        return None
    return {"run": run, "judge": _SUCCESS + _with_kept(judge, [path]), "keep": [path]}


def _of_reading(task: Task, line: str) -> Suggestion | None:
    """`grep -qx 42 answer.txt`, which is isolated: the same line over files in `keep`."""
    paths = [path for path in dict.fromkeys(_FILE.findall(line)) if posixpath.normpath(path) not in task.verify_sources]
    return {"run": "true", "judge": _with_kept(line, paths), "keep": paths} if paths else None


def _behind(build: list[str], check: Suggestion) -> Suggestion | None:
    """Run build steps before a check's command; its own output alone is judged, and only if the build succeeds."""
    if "run" not in check:
        return None
    run = f"{' >&2 && '.join(build)} >&2 || exit 1; {check['run']}; true"
    return {**check, "run": run, "judge": f"{_SUCCESS}{check['judge']}"}


def _with_kept(line: str, paths: list[str]) -> str:
    for path in paths:
        place = f'"$OUTPUT/files/{posixpath.normpath(path)}"'.replace("\\", r"\\")  # no escapes of `sub`
        line = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])", place, line)
    return line
