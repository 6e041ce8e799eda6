"""What the checks of a task can be trusted for, and how to write a weak one as a `Check`.

Knows tasks and `trust`, the reading of single checks. Must not know sandboxes: a task is read before it runs.
"""

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
from openenv.rollout.tasks.task import Task
from openenv.rollout.tasks.trust_levels import Trust, reaches, weakest
from openenv.rollout.verify.shell_syntax import (
    Command,
    CommandList,
    Compound,
    Node,
    Pipeline,
    ShellSyntaxError,
    Word,
    commands,
    parse,
)
from openenv.rollout.verify.trust import COMPILERS, line_problem, runs_tests, trust_of

Suggestion = Mapping[str, object]
"""A check as a task file has it."""
_STDOUT = '"$OUTPUT/stdout"'
_TEST_LIBRARIES = frozenset(
    {"pytest", "_pytest", "hypothesis", "numpy", "pandas", "scipy", "requests", "httpx", "yaml"}
)
ADVICE = "Write it as a check with `run`, which runs the agent's part, and `judge`, which compares what it printed"
"""How to write a line for which no better form can be derived."""


@dataclass(frozen=True, slots=True)
class TrustReading:
    """How far one check can be trusted, and why."""

    check: str | Check
    trust: Trust
    reason: str
    """For a reader: which command decides, and what of the agent's it may run."""
    suggestion: Suggestion | None = None
    """The same check in a form that is `judged`; None where it is already, or where none can be derived."""


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
    """Return how far the reward of a task can be trusted: as far as its weakest check."""
    return weakest(trust_of(check, task)[0] for check in task.verify)


def require_trust(task: Task, minimum: Trust | None, *, isolated: bool = True) -> None:
    """Return if every check can be trusted so far, and as far as the task's own `min_trust` says.

    Args:
        task: The task.
        minimum: What the caller wants of every task; None for nothing.
        isolated: Whether the sandboxes isolate. Where they do not, every check is `shared`.

    Raises:
        TrustError: a check cannot be trusted so far; the text names it and says how to write it.
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


def _suggest(task: Task, line: str) -> Suggestion | None:
    """Return a line as a check, where its form is one of those that are known."""
    try:
        tree = parse(line)
    except ShellSyntaxError:
        return None
    if not tree.items or any(operator != "&&" for operator, _ in tree.items[1:]):
        return None
    if line_problem(line, task) is None:
        return _of_reading(task, tree)
    made = _of_python(task, tree.items[0][1]) if len(tree.items) == 1 else None
    return made or _of_written(task, tree) or _of_compared(task, tree) or _of_pipeline(task, tree)


def _of_python(task: Task, pipeline: Pipeline) -> Suggestion | None:
    """`pytest tests` or Python that imports the agent's modules: the same, with the modules on the other side."""
    command = pipeline.commands[0]
    if len(pipeline.commands) > 1 or pipeline.negated or not isinstance(command, Command) or command.assignments:
        return None
    words = [word.literal for word in command.words]
    if not words or command.redirections or None in words:
        return None
    texts = [str(word) for word in words]
    if texts[0] == "pytest":
        texts = ["python3", "-m", "pytest", *texts[1:]]
    if not re.fullmatch(r"python3?", texts[0]) or len(texts) < 2:
        return None
    if texts[1:3] == ["-m", "pytest"]:
        tests = [text for text in texts[3:] if not text.startswith("-")]
        modules = _modules(task, _test_sources(task, tests))
        options = " ".join(text for text in texts[3:] if text.startswith("-"))
        files = tests or [path for path in task.verify_sources if _is_test(path)]
        if not modules or not files:
            return None
        more = {} if options in ("", "-q") else {"options": options}
        return {"pytest": _short(files), "of": _short(modules), **more}
    if texts[1] == "-c" and len(texts) > 2:
        modules = _modules(task, [texts[2]])
    elif not texts[1].startswith("-"):
        modules = _modules(task, [task.verify_sources.get(posixpath.normpath(texts[1]), "")])
    else:
        return None
    return {"python": shlex.join(texts[1:]), "of": _short(modules)} if modules else None


def _short(texts: list[str]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else texts


def _test_sources(task: Task, tests: list[str]) -> list[str]:
    roots = [posixpath.normpath(test.partition("::")[0]) for test in tests] or ["."]
    return [
        text
        for path, text in task.verify_sources.items()
        if path.endswith(".py")
        and any(root == "." or path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)
    ]


def _is_test(path: str) -> bool:
    return re.fullmatch(r"test_.*\.py|.*_test\.py", posixpath.basename(path)) is not None


def _modules(task: Task, sources: list[str]) -> list[str]:
    """Return the modules of the agent that Python sources import: those that the task names, or all that are left."""
    own = {path.partition("/")[0].removesuffix(".py") for path in task.verify_sources}
    own |= {posixpath.basename(path).removesuffix(".py") for path in task.verify_sources}
    names = dict.fromkeys(
        name for source in sources for name in _imported(source) if name not in sys.stdlib_module_names
    )
    candidates = [name for name in names if name not in own and name not in _TEST_LIBRARIES]
    texts = "\n".join((task.instruction, *task.solution, *task.setup, *task.files))
    named = [name for name in candidates if re.search(rf"(?<![\w.]){re.escape(name)}(\.py|/)", texts)]
    return named or candidates


def _imported(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name.partition(".")[0] for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


# What decides has to be in `judge`. `run` shares its sandbox with the agent's code, which can end it early and print
# what `judge` expects: `grep -q x a.txt && git show HEAD:b | grep -q y && [ "$(./prog)" = 3 ]` as a `run` of all but
# the last would leave two of three decisions to the agent's word. So only what prepares may go before a command in
# `run`, and a line that decides more than once is not rewritten.

_BUILDERS = COMPILERS | {"cd", "cmake", "mkdir", "cp", "mv", "chmod", "rm", "touch", "ln", "export"}
_BUILDING = re.compile(
    r"(go|cargo|dotnet|npm run|yarn|pnpm run) build\b|npm (ci|install)\b|pip3? install\b|make\b(?!.*(test|check|verif))"
)
_COMPARING = frozenset({"[", "test", "grep", "egrep", "fgrep", "cmp", "diff"})
_COMPARES = re.compile(r"-(eq|ne|lt|le|gt|ge|z|n|\d+)")
_DECIDES = re.compile(r"[=!<>]=|[<>]|&&|\|\||\?|\b(if|unless|assert|case|switch|while)\b")
"""What code in other languages than shell and Python decides with."""
_SUCCESS = '[ "$(cat "$OUTPUT/exit_code")" = 0 ] && '


def _of_compared(task: Task, tree: CommandList) -> Suggestion | None:
    """`[ "$(sh square.sh 7)" = 49 ]`: the command in it is run, the comparison is the judge."""
    pipeline = tree.items[-1][1]
    command = pipeline.commands[0]
    if len(pipeline.commands) > 1 or not isinstance(command, Command) or command.redirections:
        return None
    if not command.words or command.words[0].literal not in ("[", "test"):
        return None
    running = [word for word in command.words if any(part.command is not None for part in word.expansions)]
    others = [word for word in command.words[1:] if word not in running]
    if len(running) != 1 or len(running[0].parts) != 1 or any(word.literal is None for word in others):
        return None
    # `-f` and the like ask for a file where the agent's are not.
    if any(not _COMPARES.fullmatch(str(word.literal)) for word in others if word.start.startswith("-")):
        return None
    inner = running[0].expansions[0].command
    if inner is None or not inner.items or any(operator != "&&" for operator, _ in inner.items[1:]):
        return None
    last = inner.items[-1][1]
    run, read = _parted(task, last)
    before = [each for _, each in (*tree.items[:-1], *inner.items[:-1])]
    if not run or last.negated or (read and any(map(_changes_folder, before))):
        return None
    printed = " | ".join([f"cat {_STDOUT}", read] if read else [f"cat {_STDOUT}"])
    judge = command.text.replace(running[0].text, f'"$({printed})"', 1)
    return _behind(task, before, run=run, judge=f"! {judge}" if pipeline.negated else judge)


def _of_pipeline(task: Task, tree: CommandList) -> Suggestion | None:
    """`./prog < 1.in | diff - 1.out`: what only reads is the judge."""
    pipeline = tree.items[-1][1]
    run, read = _parted(task, pipeline)
    before = [each for _, each in tree.items[:-1]]
    if not run or not read or any(map(_changes_folder, before)):
        return None
    return _behind(task, before, run=run, judge=f"{'! ' if pipeline.negated else ''}cat {_STDOUT} | {read}")


def _parted(task: Task, pipeline: Pipeline) -> tuple[str, str]:
    """Split a pipeline into what may run the agent's code, and what only reads what that printed.

    The first is empty where there is none, or where it decides something itself.
    """
    parts = pipeline.commands
    reads = len(parts)
    while reads > 0 and line_problem(parts[reads - 1].text, task) is None:
        reads -= 1
    run = " | ".join(part.text for part in parts[:reads])
    if any(_decides(task, part) for part in parts[:reads]) or runs_tests(run, task.verify_sources):
        run = ""
    return run, " | ".join(part.text for part in parts[reads:])


def _behind(task: Task, before: list[Pipeline], *, run: str, judge: str) -> Suggestion | None:
    """Return a check that runs a command behind what prepares for it; only the command's own output is judged."""
    if not before:
        return {"run": run, "judge": judge}
    if not all(_prepares(task, pipeline) for pipeline in before):
        return None
    # Without the exit code, a build that failed would look like a program that prints nothing.
    first = " && ".join(pipeline.text for pipeline in before)
    return {"run": f"{{ {first}; }} >&2 && {{ {run}; true; }}", "judge": _SUCCESS + judge}


def _prepares(task: Task, pipeline: Pipeline) -> bool:
    """Return whether a part of a chain makes something for the next, and decides nothing by itself."""
    command = pipeline.commands[0]
    if len(pipeline.commands) > 1 or pipeline.negated or not isinstance(command, Command) or _decides(task, command):
        return False
    words = [word.literal or "" for word in command.words]
    if not words or words[0] in _COMPARING:
        return False
    if words[0] in _BUILDERS or _BUILDING.match(" ".join(words)):
        return True
    return bool(_written(command)) and not runs_tests(pipeline.text, task.verify_sources)


def _changes_folder(pipeline: Pipeline) -> bool:
    return any(command.words and command.words[0].literal == "cd" for command in commands(pipeline))


def _written(command: Command) -> set[str]:
    """Return the files that a command writes its output to."""
    return {
        redirection.word.literal
        for redirection in command.redirections
        if redirection.operator == ">" and redirection.word.literal and not redirection.word.start.startswith("/dev/")
    }


def _decides(task: Task, node: Node) -> bool:
    """Return whether a command shows a decision of its own: a chain, a condition, a comparison."""
    if isinstance(node, Compound):
        return node.kind not in ("(", "{") or any(_chain_decides(task, part) for part in node.parts)
    for word in node.words:
        if any(part.command is not None and _chain_decides(task, part.command) for part in word.expansions):
            return True
    words = [word.literal for word in node.words]
    code = next((words[number + 1] for number, word in enumerate(words[:-1]) if word in ("-c", "-e", "-ec")), "")
    if not code:
        return False
    try:
        if words[0] in ("sh", "bash", "dash", "ash"):
            return _chain_decides(task, parse(code))
        if re.fullmatch(r"python[\d.]*", words[0] or ""):
            deciding = (ast.Assert, ast.Compare, ast.If, ast.IfExp, ast.Match, ast.While, ast.Raise)
            return any(isinstance(each, deciding) for each in ast.walk(ast.parse(code)))
    except (ShellSyntaxError, SyntaxError, ValueError):
        return True
    return _DECIDES.search(code) is not None


def _chain_decides(task: Task, sequence: CommandList) -> bool:
    *before, last = [pipeline for _, pipeline in sequence.items]
    if any(operator != "&&" for operator, _ in sequence.items[1:]) or not all(_prepares(task, each) for each in before):
        return True
    return last.negated or any(_decides(task, each) for each in last.commands)


def _of_written(task: Task, tree: CommandList) -> Suggestion | None:
    """`./prog > out.txt && diff out.txt expected.txt`: the file is kept, what only reads is the judge."""
    texts = [pipeline.text for _, pipeline in tree.items]
    reads = len(texts)
    while reads > 0 and line_problem(texts[reads - 1], task) is None:
        reads -= 1
    run = [pipeline for _, pipeline in tree.items[:reads]]
    if reads in (0, len(texts)) or not all(_prepares(task, each) for each in run) or any(map(_changes_folder, run)):
        return None
    written = {path for pipeline in run for command in commands(pipeline) for path in _written(command)}
    judge = " && ".join(texts[reads:])
    kept = [path for path in sorted(written) if not path.startswith("/") and _names(judge, path)]
    if not kept:
        return None
    return {"run": " && ".join(texts[:reads]), "judge": _SUCCESS + _kept(judge, kept), "keep": kept}


def _of_reading(task: Task, tree: CommandList) -> Suggestion | None:
    """`grep -qx 42 answer.txt`, which is isolated: the same over files that are kept."""
    paths: dict[str, None] = {}
    for command in commands(tree):
        for word in (*command.words[1:], *(each.word for each in command.redirections if each.operator == "<")):
            if _is_file(word) and posixpath.normpath(str(word.literal)) not in task.verify_sources:
                paths[str(word.literal)] = None
    if not paths or any(command.words and command.words[0].literal == "cd" for command in commands(tree)):
        return None
    return {"run": "true", "judge": _kept(tree.text, list(paths)), "keep": list(paths)}


def _is_file(word: Word) -> bool:
    return re.fullmatch(r"(?!-)[\w-]+(?:/[\w.-]+)*\.\w+", word.literal or "") is not None and not word.quoted


def _names(line: str, path: str) -> bool:
    return re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])", line) is not None


def _kept(line: str, paths: list[str]) -> str:
    for path in paths:
        clean = posixpath.normpath(path)
        line = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])", f'"$OUTPUT/files/{clean}"', line)
    return line
